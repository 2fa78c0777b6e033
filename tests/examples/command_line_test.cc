#include "client/examples/command_line.h"

#include <gmock/gmock.h>
#include <gtest/gtest.h>

namespace gradsync::examples {
namespace {

using ::testing::HasSubstr;

class CommandLineTest : public ::testing::Test {
 protected:
  CommandLineTest() : flags_("A program.\n") {
    flags_.Text("json", "FILE", "Where to.", &json_);
    flags_.Number("ranks", "How many.", 1, 8, &ranks_);
    flags_.Choice("overlap", {"on", "off"}, "When.", &overlap_);
    flags_.Switch("keep", "Stays.", &keep_);
  }

  absl::StatusOr<bool> Parse(std::vector<std::string> arguments) {
    arguments.insert(arguments.begin(), "program");
    std::vector<char*> pointers;
    for (std::string& argument : arguments) pointers.push_back(argument.data());
    return flags_.Parse(static_cast<int>(pointers.size()), pointers.data());
  }

  std::string Complaint(const std::vector<std::string>& arguments) {
    const absl::Status status = Parse(arguments).status();
    EXPECT_TRUE(absl::IsInvalidArgument(status));
    return std::string(status.message());
  }

  std::string json_;
  std::uint64_t ranks_ = 2;
  std::string overlap_ = "on";
  bool keep_ = false;
  CommandLine flags_;
};

TEST_F(CommandLineTest, KeepsDefaults) {
  EXPECT_TRUE(*Parse({}));
  EXPECT_EQ(ranks_, 2u);
  EXPECT_EQ(overlap_, "on");
  EXPECT_FALSE(keep_);
}

TEST_F(CommandLineTest, TakesBothForms) {
  EXPECT_TRUE(*Parse({"--ranks", "3", "--json=a=b", "--keep", "--overlap", "off"}));
  EXPECT_EQ(ranks_, 3u);
  EXPECT_EQ(json_, "a=b");
  EXPECT_EQ(overlap_, "off");
  EXPECT_TRUE(keep_);
}

TEST_F(CommandLineTest, RefusesWhatItDoesNotKnow) {
  EXPECT_EQ(Complaint({"--rank=3"}), "unknown flag --rank");
  EXPECT_EQ(Complaint({"3"}), "unexpected argument '3'");
  EXPECT_EQ(Complaint({"-n"}), "unexpected argument '-n'");
  EXPECT_EQ(Complaint({"--ranks"}), "--ranks needs a value: --ranks N");
  EXPECT_EQ(Complaint({"--ranks=0"}), "--ranks takes a number from 1 to 8, not '0'");
  EXPECT_EQ(Complaint({"--ranks=two"}), "--ranks takes a number from 1 to 8, not 'two'");
  EXPECT_EQ(Complaint({"--ranks", ""}), "--ranks takes a number from 1 to 8, not ''");
  EXPECT_EQ(Complaint({"--overlap=maybe"}), "--overlap takes on or off, not 'maybe'");
  EXPECT_EQ(Complaint({"--keep=yes"}), "--keep takes no value");
}

TEST_F(CommandLineTest, HelpsFromTheDeclarations) {
  EXPECT_FALSE(*Parse({"--help"}));
  EXPECT_FALSE(*Parse({"--ranks=3", "-h"}));
  EXPECT_THAT(flags_.Help(), HasSubstr("A program.\n"));
  EXPECT_THAT(flags_.Help(), HasSubstr("--ranks N\n      How many. Default: 2.\n"));
  EXPECT_THAT(flags_.Help(), HasSubstr("--overlap on|off\n"));
}

}  // namespace
}  // namespace gradsync::examples
