// The nodes are processes, which are killed or stopped.

#include <fcntl.h>
#include <gtest/gtest.h>
#include <signal.h>
#include <unistd.h>

#include <cstdint>
#include <memory>
#include <string>
#include <vector>

#include "absl/strings/match.h"
#include "absl/strings/numbers.h"
#include "absl/strings/str_cat.h"
#include "absl/strings/str_split.h"
#include "tests/kit/child_process.h"
#include "tests/kit/deadline.h"
#include "tests/kit/temporary_directory.h"
#include "tests/kit/wake_up_delay.h"

namespace gradsync::daemon {
namespace {

constexpr std::uint64_t kDeathBoundNs = 1'000'000'000ull * kScale;

struct Failure {
  std::string code, reason, node, message;
  std::uint64_t at_ns = 0;
};

class Node {
 public:
  Node(const std::string& store, int node, int nodes, int silence_ms, std::size_t bucket_bytes) {
    int input[2], output[2];
    EXPECT_EQ(pipe2(input, O_CLOEXEC), 0);
    EXPECT_EQ(pipe2(output, O_CLOEXEC), 0);
    const Descriptor child_input(input[0]), child_output(output[1]);
    input_ = Descriptor(input[1]);
    output_ = std::make_unique<LineReader>(Descriptor(output[0]));
    ChildOptions options;
    options.arguments = {"tests/engine/engine_node", store,       absl::StrCat(node),
                         absl::StrCat(nodes),        "127.0.0.1", absl::StrCat(silence_ms),
                         absl::StrCat(bucket_bytes)};
    options.input = child_input.get();
    options.output = child_output.get();
    process_ = std::make_unique<ChildProcess>(options);
  }

  std::string Line() { return output_->Next(kPatienceMs).value_or("nothing"); }
  void Go() const { ASSERT_EQ(write(input_.get(), "go\n", 3), 3); }

  // Skips the lines before the failure.
  Failure Fails() {
    for (;;) {
      const std::string line = Line();
      if (line == "moving") continue;
      const std::vector<std::string> words = absl::StrSplit(line, absl::MaxSplits(' ', 5));
      Failure failure;
      if (words.size() < 5 || !absl::SimpleAtoi(words[4], &failure.at_ns)) {
        ADD_FAILURE() << line;
        return failure;
      }
      failure.code = words[1];
      failure.reason = words[2];
      failure.node = words[3];
      failure.message = words.size() > 5 ? words[5] : "";
      return failure;
    }
  }

  ChildProcess& process() { return *process_; }

 private:
  Descriptor input_;
  std::unique_ptr<LineReader> output_;
  std::unique_ptr<ChildProcess> process_;
};

class PeerDeath : public testing::Test {
 protected:
  void Connect(int nodes, int silence_ms, std::size_t bucket_bytes) {
    for (int node = 0; node < nodes; ++node) {
      nodes_.push_back(
          std::make_unique<Node>(store_.path(), node, nodes, silence_ms, bucket_bytes));
    }
    for (auto& node : nodes_) ASSERT_EQ(node->Line(), "connected");
  }
  void Move() {
    for (auto& node : nodes_) node->Go();
    for (auto& node : nodes_) ASSERT_EQ(node->Line(), "moving");
  }

  void ExpectLost(Node* node, const std::string& lost, std::uint64_t since_ns) {
    const Failure failure = node->Fails();
    EXPECT_EQ(failure.code, "UNAVAILABLE") << failure.message;
    EXPECT_EQ(failure.reason, "ENGINE_PEER_LOST") << failure.message;
    EXPECT_EQ(failure.node, lost) << failure.message;
    EXPECT_LT(failure.at_ns - since_ns, FairBoundNs(kDeathBoundNs, since_ns)) << failure.message;
  }

  const TemporaryDirectory store_;
  std::vector<std::unique_ptr<Node>> nodes_;
};

TEST_F(PeerDeath, KilledNodeIsNamedWithinASecondDuringTraffic) {
  Connect(3, 10'000, 8 << 20);
  Move();
  const std::uint64_t killed_ns = nodes_[1]->process().Kill();
  ExpectLost(nodes_[0].get(), "node-1", killed_ns);
  ExpectLost(nodes_[2].get(), "node-1", killed_ns);
}

TEST_F(PeerDeath, KilledNodeIsNamedByTheWaitingNode) {
  Connect(2, 10'000, 1 << 20);
  nodes_[0]->Go();
  const std::uint64_t killed_ns = nodes_[1]->process().Kill();
  ExpectLost(nodes_[0].get(), "node-1", killed_ns);
}

TEST_F(PeerDeath, ExchangeAfterANodesDeathFailsAtOnce) {
  Connect(2, 10'000, 1 << 20);
  nodes_[1]->process().Kill();
  nodes_[0]->Go();
  ExpectLost(nodes_[0].get(), "node-1", NowNs());
}

TEST_F(PeerDeath, StoppedNodeIsNamedWithinTheSilenceLimit) {
  constexpr int kSilenceMs = 3000 * kScale;  // the other nodes are never silent for as long
  Connect(3, kSilenceMs, 8 << 20);
  Move();
  const std::uint64_t stopped_ns = NowNs();
  nodes_[2]->process().Signal(SIGSTOP);
  for (const int node : {0, 1}) {
    const Failure failure = nodes_[node]->Fails();
    EXPECT_EQ(failure.code, "DEADLINE_EXCEEDED") << failure.message;
    EXPECT_EQ(failure.reason, "ENGINE_TIMEOUT") << failure.message;
    EXPECT_EQ(failure.node, "node-2") << failure.message;
    // The node sends a message every tenth of the limit; a busy machine may delay the last one.
    EXPECT_GT(failure.at_ns, stopped_ns + kSilenceMs * 250'000ull);
    EXPECT_LT(failure.at_ns - stopped_ns,
              FairBoundNs(kSilenceMs * 1'000'000ull + kDeathBoundNs / 2, stopped_ns));
  }
  // When the stopped node continues, it learns that it was lost.
  nodes_[2]->process().Signal(SIGCONT);
  const Failure failure = nodes_[2]->Fails();
  EXPECT_EQ(failure.reason, "ENGINE_TIMEOUT") << failure.message;
  EXPECT_EQ(failure.node, "node-2") << failure.message;
}

}  // namespace
}  // namespace gradsync::daemon
