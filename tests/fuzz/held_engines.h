// Engines between nodes whose exchanges a fuzzer finishes, one by one.

#ifndef TESTS_FUZZ_HELD_ENGINES_H_
#define TESTS_FUZZ_HELD_ENGINES_H_

#include <condition_variable>
#include <cstddef>
#include <cstdint>
#include <functional>
#include <mutex>
#include <utility>
#include <vector>

#include "absl/status/status.h"
#include "daemon/base/executor.h"
#include "daemon/peer/engine_epoch.h"

namespace gradsync::daemon {

// An executor that runs its work when the fuzzer says so. Not thread-safe.
class HeldExecutor final : public Executor {
 public:
  void Run(std::function<void()> work) override { queue_.push_back(std::move(work)); }
  bool empty() const { return queue_.empty(); }
  void RunAll();

 private:
  std::vector<std::function<void()>> queue_;
};

// A NodeExchange makes its engine on a thread of its own. After Await() that thread has ended, so
// that the fuzzer's thread does everything. Outlives its engines.
class HeldEngines {
 public:
  EngineMaker Maker();
  // Waits until the threads of `exchanges` exchanges have ended, counted from the beginning.
  void Await(std::uint64_t exchanges);

  // Exchanges and broadcasts that wait.
  std::size_t held();
  // Submissions so far.
  std::uint64_t submitted();
  // Finishes one. OK: the sum is this node's own, as if the other nodes added zeros. A broadcast
  // brings the letter 'b'.
  void Finish(std::size_t which, const absl::Status& status);
  void FinishAll(const absl::Status& status);
  // The newest engine reports that it has failed.
  void FailNewest(const absl::Status& why);

 private:
  class HeldEngine;
  struct Held {
    HeldEngine* engine = nullptr;
    Exchange* exchange = nullptr;  // null: a broadcast
    std::vector<std::byte*> buffers;
    std::size_t bytes = 0;
    std::function<void(const absl::Status&)> done;
  };

  void Add(Held held);
  // Finishes what one engine holds.
  void Drop(const HeldEngine* engine);
  static void Carry(const Held& held, const absl::Status& status);

  std::mutex mutex_;
  std::condition_variable changed_;
  std::uint64_t ended_ = 0;  // threads
  std::uint64_t submitted_ = 0;
  std::vector<Held> held_;
  std::function<void(const absl::Status&)> newest_failed_;
};

}  // namespace gradsync::daemon

#endif  // TESTS_FUZZ_HELD_ENGINES_H_
