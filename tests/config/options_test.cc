#include "daemon/config/options.h"

#include <google/protobuf/descriptor.h>

#include <algorithm>
#include <cstdint>
#include <fstream>
#include <iterator>
#include <optional>
#include <random>
#include <string>
#include <vector>

#include "absl/strings/match.h"
#include "absl/strings/str_cat.h"
#include "absl/strings/str_join.h"
#include "absl/strings/str_replace.h"
#include "absl/strings/str_split.h"
#include "daemon/base/version.h"
#include "daemon/config/config.pb.h"
#include "daemon/config/config_file.h"
#include "daemon/config/option_table.h"
#include "gmock/gmock.h"
#include "gtest/gtest.h"

namespace gradsync::daemon {
namespace {

using ::testing::ElementsAre;
using ::testing::ElementsAreArray;
using ::testing::HasSubstr;
using ::testing::IsEmpty;

absl::StatusOr<Options> Load(const std::vector<std::string>& arguments) {
  std::vector<const char*> argv = {"gradsyncd"};
  for (const std::string& argument : arguments) argv.push_back(argument.c_str());
  return LoadOptions(static_cast<int>(argv.size()), argv.data());
}

// The path of a config file of this test.
std::string Write(const std::string& text) {
  const auto* test = ::testing::UnitTest::GetInstance()->current_test_info();
  const std::string path = absl::StrCat(
      ::testing::TempDir(), "/", absl::StrReplaceAll(test->name(), {{"/", "_"}}), ".textproto");
  std::ofstream(path, std::ios::binary) << text;
  return path;
}

// The faults of a file, with FILE for its name, or of flags.
std::vector<std::string> Faults(const absl::Status& status) {
  if (status.ok()) return {};
  EXPECT_EQ(status.code(), absl::StatusCode::kInvalidArgument);
  return absl::StrSplit(status.message(), '\n');
}

std::vector<std::string> FlagFaults(const std::vector<std::string>& arguments) {
  return Faults(Load(arguments).status());
}

std::vector<std::string> FileFaults(const std::string& text) {
  const std::string path = Write(text);
  std::vector<std::string> faults = Faults(Load({"--config=" + path}).status());
  for (std::string& fault : faults) fault = absl::StrReplaceAll(fault, {{path, "FILE"}});
  return faults;
}

std::vector<std::string> Values(const Options& options) {
  std::vector<std::string> values;
  for (const OptionEntry& option : OptionTable()) {
    values.push_back(absl::StrCat(std::string(option.name), "=", option.format(options)));
  }
  return values;
}

TEST(OptionsTest, DefaultsAreValid) {
  EXPECT_TRUE(Validate(Options()).ok()) << Validate(Options());
  auto loaded = Load({});
  ASSERT_TRUE(loaded.ok()) << loaded.status();
  EXPECT_THAT(Values(*loaded), ElementsAreArray(Values(Options())));
}

TEST(OptionsTest, OptionsAndFieldsAreTheSame) {
  const auto* config = config::Config::descriptor();
  ASSERT_EQ(static_cast<std::size_t>(config->field_count()), OptionTable().size());
  for (int i = 0; i < config->field_count(); ++i) {
    const auto* field = config->field(i);
    const OptionEntry& option = OptionTable()[i];
    EXPECT_EQ(field->name(), option.name);
    EXPECT_TRUE(field->has_presence()) << field->name();
    using Field = google::protobuf::FieldDescriptor;
    const Field::CppType expected =
        option.literal == OptionEntry::Literal::kBool      ? Field::CPPTYPE_BOOL
        : option.literal == OptionEntry::Literal::kInteger ? Field::CPPTYPE_UINT64
                                                           : Field::CPPTYPE_STRING;
    EXPECT_EQ(field->cpp_type(), expected) << field->name();
  }
}

TEST(OptionsTest, ExamplesAreAllowedAndNotTheDefault) {
  for (const OptionEntry& option : OptionTable()) {
    const std::string name(option.name);
    std::vector<std::string> flags = {absl::StrCat("--", name, "=", option.example)};
    if (name == "peer_listen") flags.push_back("--peer_plain_text=true");
    auto loaded = Load(flags);
    ASSERT_TRUE(loaded.ok()) << loaded.status();
    EXPECT_EQ(option.format(*loaded), option.example);
    EXPECT_NE(option.format(*loaded), option.format(Options())) << name;
  }
}

TEST(OptionsTest, FileAndFlagsMeanTheSame) {
  std::string file;
  std::vector<std::string> flags;
  for (const OptionEntry& option : OptionTable()) {
    const std::string name(option.name);
    absl::StrAppend(&file, name, ": ", ToLiteral(option, option.example), "\n");
    flags.push_back(absl::StrCat("--", name, "=", option.example));
  }
  auto from_file = Load({"--config=" + Write(file)});
  auto from_flags = Load(flags);
  ASSERT_TRUE(from_file.ok()) << from_file.status();
  ASSERT_TRUE(from_flags.ok()) << from_flags.status();
  EXPECT_THAT(Values(*from_file), ElementsAreArray(Values(*from_flags)));
}

TEST(OptionsTest, EveryFieldSetsItsMember) {
  auto options = Load({"--socket=/a/b.sock",
                       "--socket_mode=0600",
                       "--require_token",
                       "--allow_overflow_uid=true",
                       "--pod_root_sees_all=true",
                       "--reduce_threads=3",
                       "--staging_bytes=8192",
                       "--lease=1m30s",
                       "--step_timeout=500ms",
                       "--drain_timeout=1h",
                       "--quota_sessions_per_user=4",
                       "--quota_jobs_per_user=5",
                       "--quota_arena_bytes_per_user=6GiB",
                       "--quota_layouts_per_session=7",
                       "--quota_buckets_per_layout=8",
                       "--quota_parameters_per_layout=9",
                       "--quota_control_bytes_per_user=10MiB",
                       "--quota_engine_bytes_per_user=12MiB",
                       "--peer_plain_text=true",
                       "--peer_coordinators=node7",
                       "--peer_tls_name=x",
                       "--engine_lanes=4",
                       "--engine_chunk_bytes=64KiB",
                       "--engine_wire_type=float16",
                       "--engine_timeout=3s",
                       "--quota_gpu_bytes_per_user=11GiB",
                       "--nvml_library=/opt/nvml.so",
                       "--mps_multiuser=true",
                       "--mps_control=/opt/mps",
                       "--log_level=error",
                       "--log_format=json",
                       "--log_file=/var/log/x"});
  ASSERT_TRUE(options.ok()) << options.status();
  EXPECT_EQ(options->socket, "/a/b.sock");
  EXPECT_EQ(options->socket_mode, 0600u);
  EXPECT_TRUE(options->require_token);
  EXPECT_TRUE(options->allow_overflow_uid);
  EXPECT_TRUE(options->pod_root_sees_all);
  EXPECT_EQ(options->reduce_threads, 3u);
  EXPECT_EQ(options->staging_bytes, 8192u);
  EXPECT_EQ(options->lease, absl::Seconds(90));
  EXPECT_EQ(options->step_timeout, absl::Milliseconds(500));
  EXPECT_EQ(options->drain_timeout, absl::Hours(1));
  EXPECT_EQ(options->quota_sessions_per_user, 4u);
  EXPECT_EQ(options->quota_jobs_per_user, 5u);
  EXPECT_EQ(options->quota_arena_bytes_per_user, std::uint64_t{6} << 30);
  EXPECT_EQ(options->quota_layouts_per_session, 7u);
  EXPECT_EQ(options->quota_buckets_per_layout, 8u);
  EXPECT_EQ(options->quota_parameters_per_layout, 9u);
  EXPECT_EQ(options->quota_control_bytes_per_user, std::uint64_t{10} << 20);
  EXPECT_EQ(options->quota_engine_bytes_per_user, std::uint64_t{12} << 20);
  EXPECT_TRUE(options->peer_plain_text);
  EXPECT_EQ(options->peer_coordinators, "node7");
  EXPECT_EQ(options->peer_tls_name, "x");
  EXPECT_EQ(options->engine_lanes, 4u);
  EXPECT_EQ(options->engine_chunk_bytes, 65536u);
  EXPECT_EQ(options->engine_wire_type, WireType::kFloat16);
  EXPECT_EQ(options->engine_timeout, absl::Seconds(3));
  EXPECT_EQ(options->quota_gpu_bytes_per_user, std::uint64_t{11} << 30);
  EXPECT_EQ(options->nvml_library, "/opt/nvml.so");
  EXPECT_TRUE(options->mps_multiuser);
  EXPECT_EQ(options->mps_control, "/opt/mps");
  EXPECT_EQ(options->log_level, LogLevel::kError);
  EXPECT_EQ(options->log_format, LogFormat::kJson);
  EXPECT_EQ(options->log_file, "/var/log/x");
}

TEST(OptionsTest, FlagsOverrideTheFile) {
  const std::string file = Write("lease: \"1s\"\nreduce_threads: 2\nrequire_token: true\n");
  auto options = Load({"--lease=2s", "--config=" + file, "--require_token=false"});
  ASSERT_TRUE(options.ok()) << options.status();
  EXPECT_EQ(options->lease, absl::Seconds(2));
  EXPECT_EQ(options->reduce_threads, 2u);
  EXPECT_FALSE(options->require_token);
}

TEST(OptionsTest, ExampleConfigHasEveryFieldWithItsDefault) {
  const std::string path = "deploy/gradsyncd.textproto";
  const Settings example = ReadConfigFile(path);
  EXPECT_THAT(example.faults, IsEmpty());
  ASSERT_EQ(example.settings.size(), OptionTable().size());
  for (std::size_t i = 0; i < example.settings.size(); ++i) {
    EXPECT_EQ(example.settings[i].option->name, OptionTable()[i].name);
  }
  auto loaded = Load({"--config=" + path});
  ASSERT_TRUE(loaded.ok()) << loaded.status();
  EXPECT_THAT(Values(*loaded), ElementsAreArray(Values(Options())));
}

// ---- Faults of flags ----

struct FlagFault {
  std::string name;
  std::vector<std::string> arguments;
  std::string fault;
};

class FlagFaultTest : public ::testing::TestWithParam<FlagFault> {};

TEST_P(FlagFaultTest, NamesTheFlag) {
  EXPECT_THAT(FlagFaults(GetParam().arguments), ElementsAre(GetParam().fault));
}

INSTANTIATE_TEST_SUITE_P(
    All, FlagFaultTest,
    ::testing::Values(
        FlagFault{"Unknown", {"--colour=red"}, "--colour: unknown flag; --help lists all"},
        FlagFault{"Misspelled", {"--leese=3s"}, "--leese: unknown flag; did you mean --lease?"},
        FlagFault{"Dashes",
                  {"--drain-timeout=3s"},
                  "--drain-timeout: unknown flag; did you mean --drain_timeout?"},
        FlagFault{
            "MisspelledConfig", {"--confg=/x"}, "--confg: unknown flag; did you mean --config?"},
        FlagFault{"Positional", {"/etc/x"}, "\"/etc/x\": not a flag; flags are --NAME=VALUE"},
        FlagFault{"OneDash", {"-lease=3s"}, "\"-lease=3s\": not a flag; flags are --NAME=VALUE"},
        FlagFault{"TwoDashesAlone", {"--"}, "\"--\": not a flag; flags are --NAME=VALUE"},
        FlagFault{"Empty", {""}, "\"\": not a flag; flags are --NAME=VALUE"},
        FlagFault{"NoValue", {"--lease"}, "--lease: needs a value, such as --lease=1m"},
        FlagFault{"Twice", {"--lease=3s", "--lease=3s"}, "--lease: given twice"},
        FlagFault{"ConfigTwice",
                  {"--config=deploy/gradsyncd.textproto", "--config=deploy/gradsyncd.textproto"},
                  "--config: given twice"},
        FlagFault{"ConfigWithoutFile", {"--config"}, "--config: needs a file, --config=FILE"},
        FlagFault{"ConfigAbsent",
                  {"--config=/nowhere/x"},
                  "--config: \"/nowhere/x\" cannot be opened: No such file or directory"},
        FlagFault{
            "ConfigIsADirectory", {"--config=/"}, "--config: \"/\" cannot be read: Is a directory"},
        FlagFault{"ConfigTooLarge",
                  {"--config=/dev/zero"},
                  "--config: \"/dev/zero\" is larger than 1 MiB"},
        FlagFault{"HelpWithValue", {"--help=lease"}, "--help: takes no value"},
        FlagFault{"CheckWithValue", {"--check=true"}, "--check: takes no value"},
        FlagFault{"MisspelledCheck", {"--chek"}, "--chek: unknown flag; did you mean --check?"},
        FlagFault{"NotABool",
                  {"--require_token=1"},
                  "--require_token: \"1\" is neither true nor false; allowed: true or false"},
        FlagFault{"EmptyBool",
                  {"--require_token="},
                  "--require_token: \"\" is neither true nor false; allowed: true or false"},
        FlagFault{"NotANumber",
                  {"--reduce_threads=four"},
                  "--reduce_threads: \"four\" is not a whole number; allowed: 0 to 256"},
        FlagFault{"NegativeNumber",
                  {"--reduce_threads=-1"},
                  "--reduce_threads: \"-1\" is not a whole number; allowed: 0 to 256"},
        FlagFault{"SpaceInNumber",
                  {"--reduce_threads= 1"},
                  "--reduce_threads: \" 1\" is not a whole number; allowed: 0 to 256"},
        FlagFault{"NumberOutOfRange",
                  {"--reduce_threads=257"},
                  "--reduce_threads: 257 is out of range; allowed: 0 to 256"},
        FlagFault{"NumberOver32Bits",
                  {"--reduce_threads=4294967296"},
                  "--reduce_threads: 4294967296 is too large; allowed: 0 to 256"},
        FlagFault{"NumberOver64Bits",
                  {"--reduce_threads=18446744073709551616"},
                  "--reduce_threads: \"18446744073709551616\" is too large; allowed: 0 to 256"},
        FlagFault{"QuotaZero",
                  {"--quota_jobs_per_user=0"},
                  "--quota_jobs_per_user: 0 is out of range; allowed: 1 to 65536"},
        FlagFault{"NotASize",
                  {"--staging_bytes=32MB"},
                  "--staging_bytes: \"32MB\" is not a size: a whole number and B, KiB, MiB, GiB or "
                  "TiB, such as 32MiB; allowed: 4KiB to 1GiB, a multiple of 4KiB"},
        FlagFault{"SizeWithoutNumber",
                  {"--staging_bytes=MiB"},
                  "--staging_bytes: \"MiB\" is not a size: a whole number and B, KiB, MiB, GiB or "
                  "TiB, such as 32MiB; allowed: 4KiB to 1GiB, a multiple of 4KiB"},
        FlagFault{"SizeTooSmall",
                  {"--staging_bytes=0"},
                  "--staging_bytes: 0B is out of range; allowed: 4KiB to 1GiB, a multiple of 4KiB"},
        FlagFault{"SizeNoMultiple",
                  {"--staging_bytes=5000"},
                  "--staging_bytes: 5000B is not a multiple of 4KiB; allowed: 4KiB to 1GiB, a "
                  "multiple of 4KiB"},
        FlagFault{"SizeOver64Bits",
                  {"--quota_arena_bytes_per_user=16777216TiB"},
                  "--quota_arena_bytes_per_user: \"16777216TiB\" is too large; allowed: 1MiB to "
                  "64TiB"},
        FlagFault{"TimeWithoutUnit",
                  {"--lease=30"},
                  "--lease: \"30\" is not a duration: whole numbers with ms, s, m or h, such as "
                  "30s or 1h30m; allowed: 100ms to 1h"},
        FlagFault{"TimeWithFraction",
                  {"--lease=1.5s"},
                  "--lease: \"1.5s\" is not a duration: whole numbers with ms, s, m or h, such as "
                  "30s or 1h30m; allowed: 100ms to 1h"},
        FlagFault{"TimeNegative",
                  {"--lease=-1s"},
                  "--lease: \"-1s\" is not a duration: whole numbers with ms, s, m or h, such as "
                  "30s or 1h30m; allowed: 100ms to 1h"},
        FlagFault{"TimeInfinite",
                  {"--lease=inf"},
                  "--lease: \"inf\" is not a duration: whole numbers with ms, s, m or h, such as "
                  "30s or 1h30m; allowed: 100ms to 1h"},
        FlagFault{
            "TimeOutOfRange", {"--lease=2h"}, "--lease: 2h is out of range; allowed: 100ms to 1h"},
        FlagFault{"TimeOverflows",
                  {"--lease=99999999999999999h"},
                  "--lease: \"99999999999999999h\" is too long; allowed: 100ms to 1h"},
        FlagFault{"NotAMode",
                  {"--socket_mode=660"},
                  "--socket_mode: \"660\" is not one of the choices; allowed: 0600, 0660, 0666"},
        FlagFault{"NotALevel",
                  {"--log_level=INFO"},
                  "--log_level: \"INFO\" is not one of the choices; allowed: debug, info, warning, "
                  "error"},
        FlagFault{"SocketRelative",
                  {"--socket=x.sock"},
                  "--socket: \"x.sock\" is not an absolute path; allowed: an absolute path that "
                  "ends in .sock, at most 103 bytes"},
        FlagFault{"SocketEmpty",
                  {"--socket="},
                  "--socket: \"\" is not an absolute path; allowed: an absolute path that ends in "
                  ".sock, at most 103 bytes"},
        FlagFault{"SocketWithoutSuffix",
                  {"--socket=/run/x"},
                  "--socket: \"/run/x\" does not end in a name with .sock; allowed: an absolute "
                  "path that ends in .sock, at most 103 bytes"},
        FlagFault{"SocketWithoutName",
                  {"--socket=/run/.sock"},
                  "--socket: \"/run/.sock\" does not end in a name with .sock; allowed: an "
                  "absolute path that ends in .sock, at most 103 bytes"},
        FlagFault{"SocketTooLong",
                  {"--socket=/" + std::string(98, 'x') + ".sock"},
                  "--socket: \"/" + std::string(98, 'x') +
                      ".sock\" has 104 bytes; allowed: an absolute path that ends in .sock, at "
                      "most 103 bytes"},
        FlagFault{"SocketWithControlCharacter",
                  {"--socket=/run/a\nb.sock"},
                  "--socket: \"/run/a\\nb.sock\" contains a control character; allowed: an "
                  "absolute path that ends in .sock, at most 103 bytes"},
        FlagFault{"LogFileRelative",
                  {"--log_file=x.log"},
                  "--log_file: \"x.log\" is not the absolute path of a file; allowed: an absolute "
                  "path of a file, or empty"},
        FlagFault{"Contradiction",
                  {"--staging_bytes=8MiB", "--quota_arena_bytes_per_user=4MiB"},
                  "staging_bytes: 8MiB exceeds quota_arena_bytes_per_user (4MiB), so no "
                  "session could open: lower the one or raise the other"},
        FlagFault{"TooManyLaneBytes",
                  {"--engine_lanes=8", "--engine_chunk_bytes=16MiB"},
                  "engine_chunk_bytes: 8 engine_lanes of 16MiB exceed 64MiB: lower "
                  "engine_chunk_bytes or engine_lanes"},
        FlagFault{"PlainText",
                  {"--peer_listen=10.0.0.1"},
                  "peer_listen: other machines reach 10.0.0.1, and there is no TLS. Set "
                  "peer_tls_certificate, peer_tls_key and peer_tls_ca (deploy/peer-keys makes "
                  "them), or peer_plain_text if everyone on that network may join any user's jobs"},
        FlagFault{"NodeName",
                  {"--node_name=a,b"},
                  "--node_name: \"a,b\" has more than 64 bytes, a comma, or a character that is "
                  "not printable ASCII; allowed: at most 64 printable characters without a comma, "
                  "or empty"},
        FlagFault{"Coordinators",
                  {"--peer_coordinators=node7, 10.0.0.0/33"},
                  "--peer_coordinators: '10.0.0.0/33' is not a host, *.domain or network, with or "
                  "without a port; allowed: hosts, *.domains or networks, separated by commas; or "
                  "empty"}),
    [](const ::testing::TestParamInfo<FlagFault>& info) { return info.param.name; });

TEST(FlagFaultTest, PeerPortThatOthersReachNeedsTlsOrAWord) {
  EXPECT_TRUE(Load({"--peer_listen=node7", "--peer_plain_text=true"}).ok());
  EXPECT_TRUE(Load({"--peer_listen=node7", "--peer_tls_certificate=/c"}).ok());
  for (const char* const loopback : {"127.0.0.1", "[::1]:7417", "localhost"}) {
    EXPECT_TRUE(Load({absl::StrCat("--peer_listen=", loopback)}).ok()) << loopback;
  }
  for (const char* const reachable : {"node7", "0.0.0.0:7417", "[::]", "192.0.2.1"}) {
    EXPECT_FALSE(Load({absl::StrCat("--peer_listen=", reachable)}).ok()) << reachable;
  }
}

TEST(FlagFaultTest, LongestSocketPathIsAllowed) {
  EXPECT_TRUE(Load({"--socket=/" + std::string(97, 'x') + ".sock"}).ok());
}

// ---- Faults of the file ----

struct FileFault {
  std::string name;
  std::string text;
  std::string fault;
};

class FileFaultTest : public ::testing::TestWithParam<FileFault> {};

TEST_P(FileFaultTest, NamesTheLine) {
  EXPECT_THAT(FileFaults(GetParam().text), ElementsAre(GetParam().fault));
}

INSTANTIATE_TEST_SUITE_P(
    All, FileFaultTest,
    ::testing::Values(
        FileFault{"Unknown", "# comment\n\npeer_socket: \":7417\"\n",
                  "FILE:3: unknown field \"peer_socket\"; gradsyncd --help lists the fields"},
        FileFault{"Misspelled", "reduce_thread: 2",
                  "FILE:1: unknown field \"reduce_thread\"; did you mean reduce_threads?"},
        FileFault{"UnknownMessage", "lease: \"1s\"\nquotas {\n  sessions: 3\n  jobs: 2\n}\n",
                  "FILE:2: unknown field \"quotas\"; gradsyncd --help lists the fields"},
        FileFault{"Twice", "lease: \"1s\"\nreduce_threads: 1\nlease: \"2s\"\n",
                  "FILE:3: lease: already given in line 1"},
        FileFault{"WithoutColon", "reduce_threads: 1\nlease \"1s\"\n",
                  "FILE:2: lease: Expected \":\", found \"\"1s\"\"; write lease: \"1m\""},
        FileFault{"WithoutQuotes", "\nlease: 30s\n",
                  "FILE:2: lease: its value needs quotes; write lease: \"1m\""},
        FileFault{"StringForNumber", "reduce_threads: \"2\"",
                  "FILE:1: reduce_threads: Expected integer, got: \"2\"; write reduce_threads: 2"},
        FileFault{"NegativeNumber", "reduce_threads: -2",
                  "FILE:1: reduce_threads: Expected integer, got: -; write reduce_threads: 2"},
        FileFault{"NumberOver64Bits", "reduce_threads: 18446744073709551616",
                  "FILE:1: reduce_threads: Integer out of range (18446744073709551616); write "
                  "reduce_threads: 2"},
        FileFault{"BadBool", "require_token: yes",
                  "FILE:1: require_token: Invalid value for boolean field \"require_token\". "
                  "Value: \"yes\"; write require_token: true"},
        FileFault{"OutOfRange", "\treduce_threads:\n 999\n",
                  "FILE:1: reduce_threads: 999 is out of range; allowed: 0 to 256"},
        FileFault{"BadDuration", "lease: \"1s\" step_timeout: \"soon\"\n",
                  "FILE:1: step_timeout: \"soon\" is not a duration: whole numbers with ms, s, m "
                  "or h, such as 30s or 1h30m; allowed: 100ms to 24h"},
        FileFault{"MessageForString", "lease {\n  seconds: 3\n}",
                  "FILE:1: lease: Expected \":\", found \"{\"; write lease: \"1m\""},
        FileFault{"UnterminatedString", "reduce_threads: 1\nlease: \"1s\nlog_level: \"info\"\n",
                  "FILE:2: String literals cannot cross line boundaries."},
        FileFault{"NulCharacter", std::string("reduce_threads: 1\nlease: \"1\\0s\"\n"),
                  "FILE:2: lease: \"1\\x00s\" is not a duration: whole numbers with ms, s, m or h, "
                  "such as 30s or 1h30m; allowed: 100ms to 1h"},
        FileFault{"StrayBracket", "reduce_threads: 1\n}\n",
                  "FILE:2: reduce_threads: Expected identifier, got: }; write reduce_threads: 2"}),
    [](const ::testing::TestParamInfo<FileFault>& info) { return info.param.name; });

TEST(FileTest, EmptyFileMeansDefaults) {
  EXPECT_THAT(FileFaults(""), IsEmpty());
  EXPECT_THAT(FileFaults("# nothing\n\n"), IsEmpty());
}

TEST(FileTest, ReadsAllFormsOfTextFormat) {
  auto options =
      Load({"--config=" + Write("lease: '2s', reduce_threads: 0x3; # comment\n"
                                "\tsocket:\t\"/a/\"\n\t\"b.sock\"\trequire_token:true")});
  ASSERT_TRUE(options.ok()) << options.status();
  EXPECT_EQ(options->lease, absl::Seconds(2));
  EXPECT_EQ(options->reduce_threads, 3u);
  EXPECT_EQ(options->socket, "/a/b.sock");
  EXPECT_TRUE(options->require_token);
}

// Every file is read or refused, and each fault names a line of the file.
TEST(FileTest, MutatedFilesAreReadOrRefused) {
  std::ifstream file("deploy/gradsyncd.textproto");
  const std::string example((std::istreambuf_iterator<char>(file)), {});
  ASSERT_GT(example.size(), 1000u);
  constexpr char kBytes[] = "\0\t\n\r \"'#:;,{}[]<>-\\/0.9ax\x7f\x80\xc3\xff";
  std::mt19937 random(1);
  const auto below = [&random](std::size_t n) { return random() % n; };
  int read = 0;
  for (int i = 0; i < 5000; ++i) {
    std::string text = example.substr(0, below(4) == 0 ? below(example.size()) : example.size());
    for (std::size_t changes = below(6); changes > 0 && !text.empty(); --changes) {
      const std::size_t at = below(text.size());
      const char byte = kBytes[below(sizeof(kBytes) - 1)];
      switch (below(3)) {
        case 0:
          text[at] = byte;
          break;
        case 1:
          text.insert(at, 1, byte);
          break;
        default:
          text.erase(at, 1 + below(30));
      }
    }
    const auto lines = static_cast<int>(std::count(text.begin(), text.end(), '\n')) + 1;
    const Settings settings = ParseConfig("FILE", text);
    read += settings.faults.empty() ? 1 : 0;
    for (const Fault& fault : settings.faults) {
      EXPECT_THAT(fault.message, ::testing::StartsWith("FILE:"));
      EXPECT_GE(fault.place, 0);
      EXPECT_LT(fault.place, lines) << text;
    }
  }
  EXPECT_GT(read, 500);   // most changes are in comments
  EXPECT_LT(read, 4500);  // others are not
}

TEST(FaultsTest, ListsAllFaults) {
  const std::string path = Write(
      "lease: 30s\n"
      "log_level: \"loud\"\n"
      "metrics_port: 9090\n"
      "reduce_threads: 999\n"
      "reduce_threads: 1\n"
      "socket: \"/x.sock\n"
      "staging_bytes: \"1GB\"\n"
      "require_token: true\n");
  const auto faults = FlagFaults({"--lease=0s", "--config=" + path, "--colour", "x",
                                  "--quota_jobs_per_user=many", "--require_token=maybe"});
  const auto at = [&path](int line) { return absl::StrCat(path, ":", line, ": "); };
  EXPECT_THAT(
      faults,
      ElementsAre(
          at(1) + "lease: its value needs quotes; write lease: \"1m\"",
          at(2) +
              "log_level: \"loud\" is not one of the choices; allowed: debug, info, warning, error",
          at(3) + "unknown field \"metrics_port\"; gradsyncd --help lists the fields",
          at(4) + "reduce_threads: 999 is out of range; allowed: 0 to 256",
          at(5) + "reduce_threads: already given in line 4",
          at(6) + "String literals cannot cross line boundaries.",
          at(7) + "staging_bytes: \"1GB\" is not a size: a whole number and B, KiB, MiB, GiB or "
                  "TiB, such as 32MiB; allowed: 4KiB to 1GiB, a multiple of 4KiB",
          "--lease: 0s is out of range; allowed: 100ms to 1h",
          "--colour: unknown flag; --help lists all", "\"x\": not a flag; flags are --NAME=VALUE",
          "--quota_jobs_per_user: \"many\" is not a whole number; allowed: 1 to 65536",
          "--require_token: \"maybe\" is neither true nor false; allowed: true or false"));
}

TEST(FaultsTest, ValidateListsAllFaults) {
  Options options;
  options.socket = "relative.sock";
  options.socket_mode = 0777;
  options.lease = absl::InfiniteDuration();
  options.quota_jobs_per_user = 0;
  options.log_level = static_cast<LogLevel>(9);
  EXPECT_THAT(
      Faults(Validate(options)),
      ElementsAre(
          "socket: \"relative.sock\" is not an absolute path; allowed: an absolute path that ends "
          "in .sock, at most 103 bytes",
          "socket_mode: 511 is not one of the choices; allowed: 0600, 0660, 0666",
          "lease: inf is out of range; allowed: 100ms to 1h",
          "quota_jobs_per_user: 0 is out of range; allowed: 1 to 65536",
          "log_level: 9 is not one of the choices; allowed: debug, info, warning, error"));
}

// ---- Help ----

TEST(HelpTest, ShowsEveryOptionIn80Columns) {
  const char* argv[] = {"gradsyncd", "--nonsense", "--help"};
  const auto help = HelpOrVersion(3, argv);
  ASSERT_TRUE(help.has_value());
  const std::string words = absl::StrReplaceAll(*help, {{"\n      ", " "}});  // not wrapped
  for (const OptionEntry& option : OptionTable()) {
    const std::string name(option.name);
    EXPECT_THAT(*help, HasSubstr(absl::StrCat("\n  --", name, "=")));
    const std::string value = option.format(Options());
    EXPECT_THAT(words, HasSubstr(absl::StrCat("Allowed: ", option.allowed,
                                              ". Default: ", value.empty() ? "(empty)" : value,
                                              ". Example: --", name, "=", option.example)));
  }
  for (absl::string_view line : absl::StrSplit(*help, '\n')) {
    EXPECT_LE(line.size(), 80u) << line;
    EXPECT_FALSE(absl::EndsWith(line, " ")) << line;
  }
}

TEST(HelpTest, ShowsTheVersion) {
  const char* argv[] = {"gradsyncd", "--version"};
  EXPECT_EQ(HelpOrVersion(2, argv), absl::StrCat("gradsyncd ", kVersion, "\n"));
}

TEST(ChecksOnlyTest, IsAFlagAtAnyPlace) {
  const char* argv[] = {"gradsyncd", "--lease=3s", "--check"};
  EXPECT_TRUE(ChecksOnly(3, argv));
  EXPECT_FALSE(ChecksOnly(2, argv));
  EXPECT_FALSE(ChecksOnly(1, argv));
  const auto options = LoadOptions(3, argv);
  ASSERT_TRUE(options.ok()) << options.status();
  EXPECT_EQ(options->lease, absl::Seconds(3));
}

TEST(HelpTest, IsEmptyForOtherArguments) {
  const char* argv[] = {"gradsyncd", "--lease=3s"};
  EXPECT_EQ(HelpOrVersion(2, argv), std::nullopt);
}

}  // namespace
}  // namespace gradsync::daemon
