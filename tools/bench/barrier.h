// A barrier of threads or processes. Waiting parties sleep in the kernel: one that spins would take
// the core from the implementation that is being measured.

#ifndef TOOLS_BENCH_BARRIER_H_
#define TOOLS_BENCH_BARRIER_H_

#include <atomic>
#include <cstdint>

namespace gradsync::bench {

// Lives in zeroed memory; any thread of any process that maps it may use it. After Wait() a party
// sees what the others wrote before it.
class Barrier {
 public:
  // Returns once `parties` have called it. The last one to arrive goes on without sleeping.
  void Wait(std::uint32_t parties);
  // True while all other parties wait.
  bool OthersWait(std::uint32_t parties) const {
    return arrived_.load(std::memory_order_acquire) + 1 == parties;
  }

 private:
  std::atomic<std::uint32_t> arrived_{0};
  std::atomic<std::uint32_t> round_{0};
};

static_assert(std::atomic<std::uint32_t>::is_always_lock_free);

}  // namespace gradsync::bench

#endif  // TOOLS_BENCH_BARRIER_H_
