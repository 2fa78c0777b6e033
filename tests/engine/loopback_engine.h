// An engine without a network: it has one node, so the sum over all nodes is that node's own.

#ifndef TESTS_ENGINE_LOOPBACK_ENGINE_H_
#define TESTS_ENGINE_LOOPBACK_ENGINE_H_

#include <atomic>
#include <cstddef>
#include <cstdint>
#include <functional>
#include <memory>
#include <thread>
#include <vector>

#include "absl/base/thread_annotations.h"
#include "absl/status/status.h"
#include "daemon/base/mutex.h"
#include "daemon/engine/engine.h"
#include "daemon/engine/ring.h"

namespace gradsync::daemon {

// Thread-safe. Runs exchanges in the order of submission, on one thread of its own. The thread
// sleeps while nothing is pending.
class LoopbackEngine final : public Engine {
 public:
  // Small enough that a chunk stays in the L2 cache between gather and scatter.
  static constexpr std::size_t kChunkBytes = std::size_t{256} * 1024;

  LoopbackEngine();
  ~LoopbackEngine() override;
  LoopbackEngine(const LoopbackEngine&) = delete;
  LoopbackEngine& operator=(const LoopbackEngine&) = delete;

  void Submit(Exchange* exchange) override;
  // The only node is root_node 0, so nothing has to be sent.
  void Broadcast(std::vector<std::byte*> buffers, std::size_t bytes, std::uint32_t root_node,
                 std::function<void(const absl::Status&)> done) override;
  void Abort(const absl::Status& why) override;
  EngineStatistics Statistics() const override;

 private:
  struct Pending {
    Exchange* exchange = nullptr;
    bool owned = false;  // true for a broadcast: the engine deletes it
  };

  void Push(const Pending& pending);
  void Run();
  void RunChunks(Exchange* exchange);
  absl::Status failure();

  std::atomic<std::uint64_t> exchanges_{0};
  std::atomic<std::uint64_t> chunks_{0};
  std::atomic<std::uint64_t> busy_ns_{0};
  std::atomic<bool> failed_{false};

  Mutex mutex_;
  CondVar changed_;
  Ring<Pending> queue_ ABSL_GUARDED_BY(mutex_);
  absl::Status failure_ ABSL_GUARDED_BY(mutex_);
  bool stopping_ ABSL_GUARDED_BY(mutex_) = false;

  std::unique_ptr<std::byte[]> memory_;  // only thread_ uses it
  std::byte* chunk_ = nullptr;           // in memory_, aligned
  std::thread thread_;                   // last: it starts after all other members
};

}  // namespace gradsync::daemon

#endif  // TESTS_ENGINE_LOOPBACK_ENGINE_H_
