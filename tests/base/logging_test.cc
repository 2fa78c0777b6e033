#include "daemon/base/logging.h"

#include <stdlib.h>
#include <sys/stat.h>
#include <unistd.h>

#include <fstream>
#include <string>
#include <thread>
#include <vector>

#include "absl/strings/str_cat.h"
#include "daemon/base/tenant.h"
#include "gmock/gmock.h"
#include "gtest/gtest.h"
#include "tests/kit/manual_clock.h"

namespace gradsync::daemon {
namespace {

using ::testing::AllOf;
using ::testing::ElementsAre;
using ::testing::EndsWith;
using ::testing::HasSubstr;
using ::testing::MatchesRegex;
using ::testing::SizeIs;

class LoggingTest : public ::testing::Test {
 protected:
  LoggingTest() {
    const auto* test = ::testing::UnitTest::GetInstance()->current_test_info();
    options_.file = absl::StrCat(::testing::TempDir(), "/", test->name(), ".log");
    unlink(options_.file.c_str());
    static ManualClock* const clock = new ManualClock;  // outlives the last line
    clock_ = clock;
    options_.clock = clock;
  }
  ~LoggingTest() override { EXPECT_TRUE(InitLogging({}).ok()); }

  std::vector<std::string> Lines() const {
    std::ifstream file(options_.file);
    std::vector<std::string> lines;
    for (std::string line; std::getline(file, line);) lines.push_back(line);
    return lines;
  }

  LogOptions options_;
  ManualClock* clock_;
};

TEST_F(LoggingTest, WritesLinesAtOnce) {
  ASSERT_TRUE(InitLogging(options_).ok());
  Log(LogLevel::kInfo, "rank lost", {{"job", "x"}, {"rank", 1u}, {"step", 7}});
  EXPECT_THAT(Lines(),
              ElementsAre(MatchesRegex("20[0-9-]+T[0-9:.]+Z INFO rank lost job=x rank=1 step=7")));
  Log(LogLevel::kError, "second");
  EXPECT_THAT(Lines(), ElementsAre(HasSubstr("INFO"), EndsWith("ERROR second")));
}

TEST_F(LoggingTest, WritesPatternCharactersAsTheyAre) {
  ASSERT_TRUE(InitLogging(options_).ok());
  Log(LogLevel::kInfo, "100 %d {} %v", {{"k", "%n{0}"}});
  EXPECT_THAT(Lines(), ElementsAre(EndsWith("INFO 100 %d {} %v k=%n{0}")));
}

TEST_F(LoggingTest, DropsLinesBelowTheLevel) {
  options_.level = LogLevel::kWarning;
  ASSERT_TRUE(InitLogging(options_).ok());
  Log(LogLevel::kDebug, "a");
  Log(LogLevel::kInfo, "b");
  LogLimited(LogLevel::kInfo, "b");
  Log(LogLevel::kWarning, "c");
  Log(LogLevel::kError, "d");
  EXPECT_THAT(Lines(), ElementsAre(EndsWith("WARNING c"), EndsWith("ERROR d")));
}

TEST_F(LoggingTest, AppendsToTheFile) {
  std::ofstream(options_.file) << "before\n";
  ASSERT_TRUE(InitLogging(options_).ok());
  Log(LogLevel::kInfo, "after");
  EXPECT_THAT(Lines(), ElementsAre("before", EndsWith("INFO after")));
}

TEST_F(LoggingTest, WritesJson) {
  options_.format = LogFormat::kJson;
  ASSERT_TRUE(InitLogging(options_).ok());
  Log(LogLevel::kInfo, "rank lost", {{"rank", 1}});
  EXPECT_THAT(Lines(), ElementsAre(MatchesRegex(R"(\{"time":"[0-9TZ:.-]+","level":"info",)"
                                                R"("message":"rank lost","rank":1\})")));
}

TEST_F(LoggingTest, UnusableFileChangesNothing) {
  ASSERT_TRUE(InitLogging(options_).ok());
  LogOptions bad = options_;
  bad.file = ::testing::TempDir();
  const absl::Status is_folder = InitLogging(bad);
  EXPECT_EQ(is_folder.code(), absl::StatusCode::kInvalidArgument);
  EXPECT_THAT(std::string(is_folder.message()),
              AllOf(HasSubstr("cannot be appended to"), HasSubstr("Is a directory")));
  bad.file = absl::StrCat(::testing::TempDir(), "/misspelled/x.log");
  const absl::Status no_folder = InitLogging(bad);
  EXPECT_EQ(no_folder.code(), absl::StatusCode::kInvalidArgument);
  EXPECT_THAT(std::string(no_folder.message()), HasSubstr("/misspelled/\" does not exist"));
  Log(LogLevel::kInfo, "still here");
  EXPECT_THAT(Lines(), ElementsAre(EndsWith("still here")));
}

TEST_F(LoggingTest, CheckOfAFileFailsAsTheStartOfTheLogDoes) {
  for (const std::string& file :
       {::testing::TempDir(), absl::StrCat(::testing::TempDir(), "/misspelled/x.log")}) {
    LogOptions bad = options_;
    bad.file = file;
    EXPECT_FALSE(CheckLogFile(file).ok());
    EXPECT_EQ(CheckLogFile(file), InitLogging(bad));
  }
}

TEST_F(LoggingTest, CheckOfAFileMakesNone) {
  const std::string file = absl::StrCat(::testing::TempDir(), "/not_there.log");
  EXPECT_TRUE(CheckLogFile(file).ok());
  EXPECT_FALSE(std::ifstream(file).good());
  EXPECT_TRUE(CheckLogFile("").ok());
}

TEST_F(LoggingTest, CountOfSuppressedLinesIsWritten) {
  ASSERT_TRUE(InitLogging(options_).ok());
  for (int i = 0; i < kLimitedLinesPerSecond + 5; ++i) {
    LogLimited(LogLevel::kWarning, "refused", {{"uid", 1000}, {"pid", i}});
  }
  EXPECT_THAT(Lines(), SizeIs(kLimitedLinesPerSecond));
  Log(LogLevel::kInfo, "refused");  // never limited
  EXPECT_THAT(Lines(), SizeIs(kLimitedLinesPerSecond + 1));
  clock_->Advance(1'000'000'000);
  Log(LogLevel::kInfo, "another");
  const auto lines = Lines();
  ASSERT_THAT(lines, SizeIs(kLimitedLinesPerSecond + 3));
  EXPECT_THAT(lines[kLimitedLinesPerSecond + 1],
              EndsWith("WARNING suppressed lines message=refused count=5 uid=1000"));
  EXPECT_THAT(lines[kLimitedLinesPerSecond + 2], EndsWith("INFO another"));
}

TEST_F(LoggingTest, LimitHoldsForEachUserInAllPods) {
  ASSERT_TRUE(InitLogging(options_).ok());
  const Tenant in_pod(1000, *PodId::Parse("6f1e0c4a-93d2-4a57-8f0e-1b2c3d4e5f60"));
  for (int i = 0; i < kLimitedLinesPerSecond; ++i) {
    LogLimited(LogLevel::kWarning, "refused", {{"uid", 1000}});
  }
  LogLimited(LogLevel::kWarning, "refused", {{"uid", in_pod}});
  LogLimited(LogLevel::kWarning, "refused", {{"uid", Tenant(1001)}});
  EXPECT_THAT(Lines(), SizeIs(kLimitedLinesPerSecond + 1));
  EXPECT_THAT(Lines().back(), EndsWith("refused uid=1001"));
  FlushLogging();
  EXPECT_THAT(Lines().back(), EndsWith("count=1 uid=1000"));
}

// A caller of the peer port may name any user.
TEST_F(LoggingTest, LimitByAddressHoldsWhateverUserALineNames) {
  ASSERT_TRUE(InitLogging(options_).ok());
  for (int uid = 0; uid < kLimitedLinesPerSecond + 5; ++uid) {
    LogLimitedByAddress(LogLevel::kWarning, "refused", {{"uid", uid}, {"address", "10.0.0.1"}});
  }
  LogLimitedByAddress(LogLevel::kWarning, "refused", {{"uid", 0}, {"address", "10.0.0.2"}});
  LogLimited(LogLevel::kWarning, "refused", {{"uid", 0}, {"address", "10.0.0.1"}});
  EXPECT_THAT(Lines(), SizeIs(kLimitedLinesPerSecond + 2));
  FlushLogging();
  EXPECT_THAT(Lines().back(), EndsWith("message=refused count=5 address=10.0.0.1"));
}

TEST_F(LoggingTest, FlushWritesTheRemainingCounts) {
  ASSERT_TRUE(InitLogging(options_).ok());
  for (int i = 0; i < kLimitedLinesPerSecond + 2; ++i) LogLimited(LogLevel::kInfo, "refused");
  FlushLogging();
  EXPECT_THAT(Lines().back(), EndsWith("suppressed lines message=refused count=2"));
  FlushLogging();
  EXPECT_THAT(Lines(), SizeIs(kLimitedLinesPerSecond + 1));
}

TEST_F(LoggingTest, LinesOfThreadsDoNotMix) {
  ASSERT_TRUE(InitLogging(options_).ok());
  constexpr int kThreads = 8;
  constexpr int kLines = 200;
  const std::string value(300, 'x');
  std::vector<std::thread> threads;
  for (int t = 0; t < kThreads; ++t) {
    threads.emplace_back([&value] {
      for (int i = 0; i < kLines; ++i) Log(LogLevel::kInfo, "line", {{"k", value}, {"end", 1}});
    });
  }
  for (std::thread& thread : threads) thread.join();
  const auto lines = Lines();
  EXPECT_THAT(lines, SizeIs(kThreads * kLines));
  for (const std::string& line : lines) {
    EXPECT_THAT(line, EndsWith("Z INFO line k=" + value + " end=1"));
  }
}

TEST_F(LoggingTest, WritesToStderrByDefault) {
  ASSERT_TRUE(InitLogging({}).ok());
  ::testing::internal::CaptureStderr();
  Log(LogLevel::kInfo, "hello");
  EXPECT_THAT(::testing::internal::GetCapturedStderr(), MatchesRegex("20[^ ]+Z INFO hello\n"));
}

// journald reads a line's level from its prefix. Lines that go elsewhere have no prefix.
TEST_F(LoggingTest, WritesLevelPrefixesForTheJournalOnly) {
  ::testing::internal::CaptureStderr();
  struct stat status;
  ASSERT_EQ(fstat(STDERR_FILENO, &status), 0);
  setenv("JOURNAL_STREAM", absl::StrCat(status.st_dev, ":", status.st_ino).c_str(), 1);
  const absl::Status to_journal = InitLogging({});
  Log(LogLevel::kError, "a");
  Log(LogLevel::kDebug, "too low");
  Log(LogLevel::kWarning, "b");
  setenv("JOURNAL_STREAM", "1:2", 1);
  const absl::Status to_other = InitLogging({});
  Log(LogLevel::kInfo, "c");
  unsetenv("JOURNAL_STREAM");
  const std::string written = ::testing::internal::GetCapturedStderr();
  EXPECT_TRUE(to_journal.ok());
  EXPECT_TRUE(to_other.ok());
  EXPECT_THAT(written,
              MatchesRegex("<3>20[^ ]+Z ERROR a\n<4>20[^ ]+Z WARNING b\n20[^ ]+Z INFO c\n"));
}

}  // namespace
}  // namespace gradsync::daemon
