// Gives memory that the daemon has freed back to the system. By itself, the allocator keeps free
// memory that lies below memory in use. After a burst of large messages, that can be nearly all of
// it.

#ifndef DAEMON_BASE_HEAP_TRIMMER_H_
#define DAEMON_BASE_HEAP_TRIMMER_H_

#include <atomic>
#include <cstdint>

#include "daemon/base/executor.h"

namespace gradsync::daemon {

// One thread calls Tick() and TickUnused(). An executor trims, because trimming can take
// milliseconds.
class HeapTrimmer {
 public:
  // Trims only if the daemon has more memory of its own than this.
  static constexpr std::uint64_t kSmallBytes = std::uint64_t{48} << 20;

  // `executor` outlives this object, and has run everything queued before this object is destroyed.
  explicit HeapTrimmer(Executor* executor) : executor_(executor) {}

  // Trims, unless the daemon is small. It does so every 5 s while trimming frees memory or memory
  // grows, otherwise less and less often, down to every 5 min. After a burst of a minute, the
  // memory goes back within about a minute.
  void Tick(std::uint64_t now_ns);
  // Call it instead of Tick() while nobody uses the daemon. Trims once, unless the daemon is small,
  // so that the last users' memory goes back, too. True: call it again, because the trim
  // has not ended.
  bool TickUnused(std::uint64_t now_ns);

 private:
  void BeginTrim(std::uint64_t now_ns);
  void Trim();

  Executor* const executor_;
  std::uint64_t next_ns_ = 0;
  std::uint64_t trimmed_ns_ = 0;
  bool owed_ = true;                          // no trim has begun since the last use
  std::atomic<std::uint64_t> pause_ns_{0};    // until the next trim
  std::atomic<std::uint64_t> left_bytes_{0};  // after the last trim
  std::atomic<bool> trimming_{false};
};

// The bytes of this process's memory that belong to no file and are not shared; 0: unknown.
std::uint64_t AnonymousMemoryBytes();

}  // namespace gradsync::daemon

#endif  // DAEMON_BASE_HEAP_TRIMMER_H_
