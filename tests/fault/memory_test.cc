// A user who wants the daemon's memory gets little of it, and another user's job goes on. Runs
// outside Bazel's sandbox: inside it root cannot become another user.

#include <sys/stat.h>
#include <unistd.h>

#include <algorithm>
#include <iostream>
#include <memory>
#include <optional>
#include <string>
#include <utility>
#include <vector>

#include "daemon/base/heap_trimmer.h"
#include "daemon/job/collective_order.h"
#include "gmock/gmock.h"
#include "gtest/gtest.h"
#include "proto/gradsync/limits.h"
#include "tests/fault/trainer.h"
#include "tests/kit/child_process.h"
#include "tests/kit/deadline.h"
#include "tests/kit/pipe.h"
#include "tests/kit/process_memory.h"
#include "tests/kit/wake_up_delay.h"

namespace gradsync::fault {
namespace {

constexpr std::uint64_t kMiB = std::uint64_t{1} << 20;
// Far above what a busy machine does to a step, and below what the attacks did.
constexpr std::uint64_t kLongestStepNs = 2'000'000'000ull * kScale;

// Runs memory_attacker. The destructor ends it: a refusal by the daemon is no failure.
class Attacker {
 public:
  Attacker(const TestDaemon& daemon, const std::vector<std::string>& attack) {
    Pipe in, out;
    ChildOptions child;
    child.arguments = {"tests/fault/memory_attacker", daemon.socket()};
    child.arguments.insert(child.arguments.end(), attack.begin(), attack.end());
    child.input = in.read.get();
    child.output = out.write.get();
    process_ = std::make_unique<ChildProcess>(child);
    input_ = std::move(in.write);
    output_ = std::make_unique<LineReader>(std::move(out.read));
  }
  ~Attacker() {
    input_.Close();
    EXPECT_EQ(process_->Wait(kPatienceMs), 0) << "the attacker's wait status";
  }
  // What it says of its first round, or nothing if it says that not within `patience_ms`. Then it
  // goes on.
  std::optional<std::string> Report(int patience_ms) {
    const auto line = output_->Next(patience_ms);
    return line == "READY" ? std::nullopt : line;
  }

 private:
  Descriptor input_;
  std::unique_ptr<LineReader> output_;
  std::unique_ptr<ChildProcess> process_;
};

class MemoryTest : public testing::Test {
 protected:
  static constexpr std::uint64_t kQuota = 64 * kMiB;
  void SetUp() override {
    if (geteuid() != 0) GTEST_SKIP() << "only root can become another user";
    ASSERT_EQ(chmod(daemon_.directory().path().c_str(), 0755), 0);
    for (const std::string& socket : {daemon_.socket(), daemon_.side_socket()}) {
      ASSERT_EQ(chown(socket.c_str(), 0, 12345), 0);
    }
    innocent_ = JoinedTrainers(daemon_, 2);
    ExpectAll(innocent_, "register buckets=4 count=10000");
    for (int i = 0; i < 50; ++i) Step();
    idle_ns_ = Take();
    before_ = Resident();
  }
  // The attackers have ended. HeapTrimmer gives what they took back to the system, within about ten
  // seconds after so short an attack.
  void TearDown() override {
    // A sanitizer keeps freed memory.
    if (before_ == 0 || kScale != 1 || HasFatalFailure()) return;
    EXPECT_TRUE(daemon_.AwaitStatus([this](const auto&) {
      Step();
      return Resident() < before_ + daemon::HeapTrimmer::kSmallBytes;
    })) << "memory does not go back to the system: "
        << before_ / kMiB << " MiB before, " << Peak() / kMiB << " MiB at most, "
        << Resident() / kMiB << " MiB now";
  }

  // One step of the innocent job.
  void Step() {
    for (const Reply& reply : DoAll(innocent_, "step")) {
      ASSERT_TRUE(reply.ok()) << reply;
      steps_ns_.push_back(reply.end_ns - reply.start_ns);
    }
  }
  // The innocent job goes on until the attacker reports. Returns the report.
  std::string Attack(Attacker* attacker) {
    std::optional<std::string> report;
    const std::uint64_t since_ns = NowNs();
    for (const std::uint64_t end_ns = NowNs() + 1'000'000ull * kPatienceMs;
         !report.has_value() && NowNs() < end_ns && !HasFatalFailure();) {
      Step();
      report = attacker->Report(/*patience_ms=*/1);
    }
    EXPECT_TRUE(report.has_value()) << "the attacker reports nothing";
    const auto steps = Take();
    if (steps.empty()) return "no step";
    EXPECT_LT(steps.back(), FairBoundNs(kLongestStepNs, since_ns));
    std::cout << "steps: p50 " << Us(idle_ns_, 50) << " us idle, " << Us(steps, 50)
              << " us under attack, p99 " << Us(steps, 99) << " us, longest " << Us(steps, 100)
              << " us; memory: " << before_ / kMiB << " MiB before, peak " << Peak() / kMiB
              << " MiB, " << Resident() / kMiB << " MiB under attack; " << report.value_or("")
              << std::endl;
    return report.value_or("");
  }

  std::uint64_t Peak() const { return MemoryBytes(daemon_.pid(), "VmHWM"); }
  std::uint64_t Resident() const { return MemoryBytes(daemon_.pid(), "VmRSS"); }
  std::uint64_t Cost() const { return Peak() - before_; }
  // What the attack has cost at most. A sanitizer keeps freed memory, so its figures mean nothing.
  void ExpectCostBelow(std::uint64_t bytes) const {
    if (kScale == 1) {
      EXPECT_LT(Cost(), bytes);
    }
  }

  // What the daemon charges the attacker.
  std::uint64_t Charged() const {
    const v1::GetStatusResponse status = daemon_.Status();
    for (const v1::UserMemory& user : status.users()) {
      if (user.uid() == 12345) return user.control_bytes();
    }
    return 0;
  }

  TestDaemon daemon_{{"--quota_control_bytes_per_user=64MiB", "--peer_listen=127.0.0.1:0"}};

 private:
  // The times of the steps since the last call, in order.
  std::vector<std::uint64_t> Take() {
    std::vector<std::uint64_t> steps;
    steps.swap(steps_ns_);
    std::sort(steps.begin(), steps.end());
    return steps;
  }
  static std::uint64_t Us(const std::vector<std::uint64_t>& steps, std::size_t percent) {
    return steps.empty() ? 0 : steps[(steps.size() - 1) * percent / 100] / 1000;
  }

  Trainers innocent_;
  std::vector<std::uint64_t> steps_ns_;
  std::vector<std::uint64_t> idle_ns_;
  std::uint64_t before_ = 0;
};

// 8 calls have ended, with RESOURCE_EXHAUSTED: their messages are too large, or gRPC would hold too
// much for the user. On a busy machine the daemon may end a connection before that, because it has
// read for long and no message has come: UNAVAILABLE.
testing::Matcher<std::string> AreAllRefused() {
  return testing::AnyOf(testing::StartsWith("8 8 "), testing::StartsWith("8 14 "));
}

// 16 MiB were 608 MiB in the daemon.
TEST_F(MemoryTest, FirstMessagesAreSmall) {
  Attacker attacker(daemon_, {"messages", "8", std::to_string(16 * kMiB)});
  EXPECT_THAT(Attack(&attacker), AreAllRefused());
  ExpectCostBelow(200 * kMiB);
}

// gRPC would hold them whole before it looks at their length.
TEST_F(MemoryTest, MessagesThatAreFarTooLongAreNotHeld) {
  Attacker attacker(daemon_, {"messages", "8", std::to_string(256 * kMiB)});
  EXPECT_THAT(Attack(&attacker), AreAllRefused());
  ExpectCostBelow(200 * kMiB);
}

TEST_F(MemoryTest, StreamsWithoutASessionAreFew) {
  Attacker attacker(daemon_, {"streams", "600"});
  EXPECT_THAT(Attack(&attacker), testing::HasSubstr("quota_sessions_per_user"));
  ExpectCostBelow(64 * kMiB);
}

// ---- What the daemon keeps for a user. More would fit the bounds of each message and session.

class ChargedLayouts : public MemoryTest {
 protected:
  // The attack's layouts are refused when the quota is used up. When it ends, its memory is free.
  void ExpectCharged(const std::vector<std::string>& attack) {
    {
      Attacker attacker(daemon_, attack);
      EXPECT_THAT(Attack(&attacker), testing::HasSubstr("quota_control_bytes_per_user"));
      EXPECT_LE(Charged(), kQuota);
      EXPECT_GT(Charged(), kQuota / 2);
      ExpectCostBelow(kQuota + 64 * kMiB);
    }
    EXPECT_TRUE(daemon_.AwaitStatus([this](const auto&) { return Charged() < kQuota / 4; }))
        << "a session that has ended costs little";
  }
};

// 200 MiB of names.
TEST_F(ChargedLayouts, HaveLongNames) { ExpectCharged({"layouts", "8", "8", "5000"}); }

// A job that may have ranks on other nodes: rank 0 alone makes the daemon keep something for each
// rank and bucket. 400 MiB.
TEST_F(ChargedLayouts, HaveManyBucketsAndRanks) {
  ExpectCharged({"buckets", "8", "4", "4096", "32", daemon_.Status().peer_address()});
}

// As many buckets as a timeline of 64 steps takes the most memory for, 2 MiB. 200 MiB.
TEST_F(ChargedLayouts, HaveTimelines) { ExpectCharged({"buckets", "8", "8", "1365", "1"}); }

TEST_F(MemoryTest, UnreadMessagesAreCharged) {
  // Each session may leave 64 MiB unread.
  Attacker attacker(daemon_, {"unread", "4"});
  EXPECT_THAT(Attack(&attacker), testing::StartsWith("4 "));
  EXPECT_TRUE(daemon_.AwaitStatus([this](const auto&) {
    Step();
    return daemon_.Log().find("quota_control_bytes_per_user") != std::string::npos;
  })) << "a session is disconnected";
  EXPECT_LE(Charged(), kQuota);
  ExpectCostBelow(kQuota + 64 * kMiB);
}

// One rank begins what the other never does.
TEST_F(MemoryTest, CollectivesThatOthersHaveNotBegunAreCharged) {
  Attacker attacker(daemon_, {"collectives", "64"});
  EXPECT_THAT(Attack(&attacker), testing::StartsWith("0 "));
  EXPECT_GT(Charged(), 64 * daemon::CollectiveOrder::kKept * kMaxCollectiveBytes);
  EXPECT_LE(Charged(), kQuota);
  // The sessions go on, so gRPC may hold 64 KiB of each, as bytes and as messages. That is not
  // charged, and not kept.
  constexpr std::uint64_t kInFlight = 64 * 2 * (kMiB / 16);
  ExpectCostBelow(Charged() + 12 * kMiB + kInFlight);
  if (kScale == 1) {
    EXPECT_GT(Cost(), 16 * kMiB) << "the daemon has kept them";
  }
}

TEST_F(MemoryTest, UnreadAnswersAreFew) {
  // An answer repeats its question, which has 60 KB: 100 MiB with both.
  Attacker attacker(daemon_, {"reflection", "600"});
  EXPECT_THAT(Attack(&attacker), testing::StartsWith("600 "));
  ExpectCostBelow(64 * kMiB);
}

TEST_F(MemoryTest, EndedJobsAreKeptAsSummaries) {
  {
    // A job of these layouts takes 11 MiB, and 16 that have ended are shown.
    Attacker attacker(daemon_, {"jobs", "20", "2"});
    EXPECT_THAT(Attack(&attacker), testing::StartsWith("0 "));
  }
  EXPECT_TRUE(daemon_.AwaitStatus([this](const auto&) { return Charged() < 10 * kMiB; }));
  ExpectCostBelow(kQuota + 64 * kMiB);
}

}  // namespace
}  // namespace gradsync::fault
