#include "tools/bench/options.h"

#include <optional>
#include <string>
#include <vector>

#include "gmock/gmock.h"
#include "gtest/gtest.h"
#include "tools/bench/byte_size.h"

namespace gradsync::bench {
namespace {

using ::testing::ElementsAre;
using ::testing::HasSubstr;

std::string Fault(const std::vector<absl::string_view>& arguments) {
  const absl::StatusOr<Options> options = ParseOptions(arguments);
  EXPECT_FALSE(options.ok());
  return std::string(options.status().message());
}

TEST(ByteSizeTest, ReadsPowersOfTwo) {
  EXPECT_EQ(ParseByteSize("65536"), 65536u);
  EXPECT_EQ(ParseByteSize("64K"), 65536u);
  EXPECT_EQ(ParseByteSize("25M"), 25u << 20);
  EXPECT_EQ(ParseByteSize("1G"), 1u << 30);
}

TEST(ByteSizeTest, RefusesEverythingElse) {
  for (const char* text : {"", "K", "-1", "+1", " 1", "1 ", "1k", "1KB", "0x10", "1.5M", "1MM",
                           "99999999999999999999", "99999999999999G"}) {
    EXPECT_EQ(ParseByteSize(text), std::nullopt) << text;
  }
}

TEST(ByteSizeTest, FormatsShortest) {
  EXPECT_EQ(FormatByteSize(0), "0");
  EXPECT_EQ(FormatByteSize(100), "100");
  EXPECT_EQ(FormatByteSize(1536 << 10), "1536K");
  EXPECT_EQ(FormatByteSize(25 << 20), "25M");
}

TEST(OptionsTest, ReadsNcclTestsSpelling) {
  const absl::StatusOr<Options> options = ParseOptions({"allreduce",   "-b",
                                                        "64K",         "-e",
                                                        "100M",        "-f",
                                                        "4",           "--ranks",
                                                        "4",           "--dtype",
                                                        "bfloat16",    "--busy",
                                                        "--json",      "out.json",
                                                        "-n",          "7",
                                                        "-w=0",        "--impl=gloo,gradsync",
                                                        "--threads=3", "--daemon=/bin/d"});
  ASSERT_TRUE(options.ok()) << options.status();
  EXPECT_EQ(options->command, Command::kAllReduce);
  EXPECT_EQ(options->begin_bytes, 64u << 10);
  EXPECT_EQ(options->end_bytes, 100u << 20);
  EXPECT_EQ(options->factor, 4u);
  EXPECT_EQ(options->ranks, 4u);
  EXPECT_EQ(options->dtype, DataType::kBfloat16);
  EXPECT_TRUE(options->busy);
  EXPECT_EQ(options->json, "out.json");
  EXPECT_EQ(options->iterations, 7u);
  EXPECT_EQ(options->warmup, 0u);
  EXPECT_THAT(options->implementations,
              ElementsAre(Implementation::kGloo, Implementation::kGradsync));
  EXPECT_EQ(options->threads, 3u);
  EXPECT_EQ(options->daemon, "/bin/d");
}

TEST(OptionsTest, CountsRanksPerNode) {
  const absl::StatusOr<Options> options =
      ParseOptions({"allreduce", "--nodes", "4", "--ranks", "1", "--rate", "100mbit"});
  ASSERT_TRUE(options.ok()) << options.status();
  EXPECT_EQ(options->nodes, 4u);
  EXPECT_EQ(options->ranks, 1u);
  EXPECT_EQ(options->bits_per_second, 100'000'000u);
  EXPECT_TRUE(ParseOptions({"handoff", "--nodes", "2"}).ok());
  EXPECT_THAT(Fault({"allreduce", "--ranks", "1"}), HasSubstr("1 ranks in all, must be 2 to 8"));
  EXPECT_THAT(Fault({"allreduce", "--nodes", "3", "--ranks", "3"}),
              HasSubstr("--ranks 3 on --nodes 3: 9 ranks in all, must be 2 to 8"));
  EXPECT_THAT(Fault({"allreduce", "--rate", "1gbit"}), HasSubstr("--rate is of the links between"));
  EXPECT_THAT(Fault({"allreduce", "--nodes", "2", "--impl", "gradsync,openmpi"}),
              HasSubstr("--impl openmpi is of one node alone"));
}

TEST(OptionsTest, MeasuresTheLargestSizeEvenBetweenTwoFactors) {
  Options options;
  options.begin_bytes = 64 << 10;
  options.end_bytes = 1000 << 10;
  options.factor = 4;
  EXPECT_THAT(Sizes(options), ElementsAre(64 << 10, 256 << 10, 1000 << 10));
  options.end_bytes = 256 << 10;
  EXPECT_THAT(Sizes(options), ElementsAre(64 << 10, 256 << 10));
  options.end_bytes = options.begin_bytes;
  EXPECT_THAT(Sizes(options), ElementsAre(64 << 10));
}

TEST(OptionsTest, HelpWinsOverAnythingElse) {
  for (const std::vector<absl::string_view>& arguments :
       {std::vector<absl::string_view>{"--help"}, {"allreduce", "--no-such", "--help"}, {"-h"}}) {
    const absl::StatusOr<Options> options = ParseOptions(arguments);
    ASSERT_TRUE(options.ok());
    EXPECT_EQ(options->command, Command::kHelp);
  }
}

TEST(OptionsTest, NamesEveryFault) {
  const std::string fault =
      Fault({"allreduce", "--ranks", "9", "--dtype", "int8", "-b", "64KB", "--verbose", "--busy=no",
             "-f", "1", "--impl", "mpich", "--rate", "fast"});
  EXPECT_THAT(fault, HasSubstr("--ranks 9: must be a number from 1 to 8"));
  EXPECT_THAT(fault, HasSubstr("--rate fast: must be a rate like 1gbit"));
  EXPECT_THAT(fault, HasSubstr("--dtype int8: must be float32"));
  EXPECT_THAT(fault, HasSubstr("-b 64KB: must be a size"));
  EXPECT_THAT(fault, HasSubstr("unknown argument: --verbose"));
  EXPECT_THAT(fault, HasSubstr("--busy takes no value"));
  EXPECT_THAT(fault, HasSubstr("-f 1: must be a number"));
  EXPECT_THAT(fault, HasSubstr("--impl mpich: must be a list of roofline,gradsync,gloo,openmpi"));
}

TEST(OptionsTest, RefusesWhatItCannotMean) {
  EXPECT_THAT(Fault({}), HasSubstr("a command is missing"));
  EXPECT_THAT(Fault({"all-reduce"}), HasSubstr("unknown command: all-reduce"));
  EXPECT_THAT(Fault({"allreduce", "-n"}), HasSubstr("-n needs a value"));
  EXPECT_THAT(Fault({"allreduce", "-n", "5x"}), HasSubstr("-n 5x: must be a number"));
  EXPECT_THAT(Fault({"allreduce", "-n", "5", "-n", "6"}), HasSubstr("-n given twice"));
  EXPECT_THAT(Fault({"allreduce", "--impl", "gloo,gloo"}), HasSubstr("names gloo twice"));
  EXPECT_THAT(Fault({"allreduce", "--json="}), HasSubstr("must not be empty"));
  EXPECT_THAT(Fault({"allreduce", "-b", "1M", "-e", "64K"}), HasSubstr("-b 1M is larger"));
  EXPECT_THAT(Fault({"allreduce", "-b", "6"}), HasSubstr("no whole number of float32"));
  EXPECT_THAT(Fault({"handoff", "-b", "64K"}), HasSubstr("-b belongs to allreduce"));
}

}  // namespace
}  // namespace gradsync::bench
