#include "tools/gradsyncctl/arguments.h"

#include <string>
#include <vector>

#include "gtest/gtest.h"
#include "tools/gradsyncctl/help.h"

namespace gradsync {
namespace {

CtlArguments Parse(const std::vector<std::string>& arguments, const char* variable = nullptr) {
  absl::StatusOr<CtlArguments> parsed = ParseArguments(arguments, variable);
  EXPECT_TRUE(parsed.ok()) << parsed.status();
  return parsed.ok() ? *std::move(parsed) : CtlArguments();
}

// The message of the refusal.
std::string Fault(const std::vector<std::string>& arguments) {
  const absl::StatusOr<CtlArguments> parsed = ParseArguments(arguments, nullptr);
  EXPECT_EQ(parsed.status().code(), absl::StatusCode::kInvalidArgument);
  return std::string(parsed.status().message());
}

TEST(ArgumentsTest, HaveDefaults) {
  const CtlArguments arguments = Parse({"status"});
  EXPECT_EQ(arguments.command, CtlCommand::kStatus);
  EXPECT_EQ(arguments.socket, "/run/gradsync/gradsyncd.sock");
  EXPECT_EQ(arguments.timeout, absl::Seconds(5));
  EXPECT_EQ(arguments.steps, 1u);
  EXPECT_FALSE(arguments.json);
}

TEST(ArgumentsTest, SocketComesFromTheOptionThenTheEnvironment) {
  EXPECT_EQ(Parse({"status"}, "/tmp/env.sock").socket, "/tmp/env.sock");
  EXPECT_EQ(Parse({"status"}, "").socket, "/run/gradsync/gradsyncd.sock");
  EXPECT_EQ(Parse({"status", "--socket", "/tmp/o.sock"}, "/tmp/env.sock").socket, "/tmp/o.sock");
}

TEST(ArgumentsTest, OptionsStandAnywhereInBothForms) {
  const CtlArguments arguments =
      Parse({"--json", "--timeout=0.5", "timeline", "--job", "a=b", "--layout=m", "--steps", "64"});
  EXPECT_EQ(arguments.command, CtlCommand::kTimeline);
  EXPECT_TRUE(arguments.json);
  EXPECT_EQ(arguments.timeout, absl::Milliseconds(500));
  EXPECT_EQ(arguments.job, "a=b");
  EXPECT_EQ(arguments.layout, "m");
  EXPECT_EQ(arguments.steps, 64u);
}

TEST(ArgumentsTest, HelpIgnoresOtherFaults) {
  EXPECT_TRUE(Parse({"--help"}).help);
  EXPECT_TRUE(Parse({"help", "stats"}).help);
  EXPECT_EQ(Parse({"stats", "-h"}).command, CtlCommand::kStats);
  EXPECT_TRUE(Parse({"--version"}).version);
}

TEST(ArgumentsTest, FaultsNameTheWordAndWhatIsExpected) {
  EXPECT_EQ(Fault({}), "no command; the commands are status, stats, timeline, health and doctor");
  EXPECT_EQ(Fault({"stat"}),
            "unknown command 'stat'; the commands are status, stats, timeline, health and doctor");
  EXPECT_EQ(Fault({"status", "stats"}),
            "'stats' is one word too many: one command is expected, and options with '--'");
  EXPECT_EQ(Fault({"status", "--sock=x"}),
            "unknown option '--sock'; the options are --socket, --job, --layout, --steps, "
            "--step, --timeout, --all, --json, --help and --version");
  EXPECT_EQ(Fault({"status", "--json=yes"}), "--json takes no value");
  EXPECT_EQ(Fault({"status", "--socket"}), "--socket needs a value after it");
  EXPECT_EQ(Fault({"status", "--socket="}), "--socket has an empty value");
  EXPECT_EQ(Fault({"status", "--layout", "m"}), "--layout goes with the command timeline only");
  EXPECT_EQ(Fault({"stats", "--steps", "1"}), "--steps goes with the command timeline only");
  EXPECT_EQ(Fault({"stats", "--step", "1"}), "--step goes with the command timeline only");
  EXPECT_EQ(Fault({"timeline", "--step", "1", "--steps", "1"}),
            "--step and --steps do not go together");
  EXPECT_EQ(Fault({"timeline", "--step=0"}), "--step '0' is not a whole number from 1");
  EXPECT_EQ(Fault({"health", "--job", "m"}),
            "--job does not go with health, which asks about the daemon");
}

TEST(ArgumentsTest, NumbersAreStrict) {
  for (const char* timeout : {"0", "-1", "nan", "inf", "5s", "3601", "x"}) {
    EXPECT_EQ(Fault({"status", "--timeout", timeout}),
              std::string("--timeout '") + timeout +
                  "' is not a number of seconds above 0 and up to 3600");
  }
  for (const char* steps : {"0", "65", "-1", "1.5", "one", "4294967297"}) {
    EXPECT_EQ(Fault({"timeline", "--steps", steps}),
              std::string("--steps '") + steps + "' is not a whole number from 1 to 64");
  }
}

TEST(HelpTest, EveryCommandTeaches) {
  for (const CtlCommand command :
       {CtlCommand::kNone, CtlCommand::kStatus, CtlCommand::kStats, CtlCommand::kTimeline,
        CtlCommand::kHealth, CtlCommand::kDoctor}) {
    const std::string text(HelpText(command));
    EXPECT_EQ(text.rfind("Usage: gradsyncctl", 0), 0u);
    EXPECT_NE(text.find("Exit status"), std::string::npos);
    EXPECT_NE(text.find("Examples:"), std::string::npos);
    for (std::size_t begin = 0; begin < text.size();) {
      const std::size_t end = text.find('\n', begin);
      ASSERT_NE(end, std::string::npos);
      EXPECT_LE(end - begin, 100u) << text.substr(begin, end - begin);
      begin = end + 1;
    }
  }
}

}  // namespace
}  // namespace gradsync
