// The memory that the daemon shares with an engine process: the engine's statistics, and the chunks
// that its lanes exchange with other nodes.

#ifndef DAEMON_WORKER_ENGINE_MEMORY_H_
#define DAEMON_WORKER_ENGINE_MEMORY_H_

#include <array>
#include <atomic>
#include <cstddef>
#include <cstdint>

#include "absl/status/statusor.h"
#include "daemon/engine/engine.h"
#include "daemon/engine/engine_settings.h"

namespace gradsync::daemon {

// How much of the node's memory an engine takes: the memory that the daemon shares with its
// process, and an estimate, a little too high, of the process's own memory. `settings` and `nodes`
// must have passed ValidateEngine().
std::uint64_t EngineBytes(const EngineSettings& settings, std::uint32_t nodes);

// Maps a file of Bytes(): a page of statistics, then the memory of each lane (lane_memory.h). Does
// not own the file. Move-only. The engine process writes the statistics, the daemon reads them.
// Both write to the lanes' memory, but never at the same time: a request of lane_socket.h hands a
// chunk to the daemon, and the answer hands it back. The process may be broken, so the daemon
// trusts nothing that it reads here.
class EngineMemory {
 public:
  static constexpr std::size_t kPageBytes = 4096;
  static constexpr std::size_t Bytes(int lanes, std::size_t lane_bytes) {
    return kPageBytes + static_cast<std::size_t>(lanes) * lane_bytes;
  }

  static absl::StatusOr<EngineMemory> Map(int fd, int lanes, std::size_t lane_bytes);
  ~EngineMemory();
  EngineMemory(EngineMemory&& other) noexcept;
  EngineMemory& operator=(EngineMemory&&) = delete;

  std::byte* lanes() const { return address_ + kPageBytes; }
  std::byte* lane(std::size_t index) const { return lanes() + index * lane_bytes_; }
  std::size_t lane_bytes() const { return lane_bytes_; }

  void Write(const EngineStatistics& statistics) const;
  EngineStatistics Read() const;

 private:
  struct Lane {
    std::atomic<std::uint64_t> bytes_sent;
    std::atomic<std::uint64_t> bytes_received;
    std::atomic<std::uint64_t> busy_ns;
    std::atomic<std::uint64_t> chunks;
  };
  struct Page {
    std::atomic<std::uint64_t> exchanges;
    std::array<Lane, EngineSettings::kMaxLanes> lanes;
  };
  static_assert(sizeof(Page) <= kPageBytes);
  static_assert(std::atomic<std::uint64_t>::is_always_lock_free);

  EngineMemory(std::byte* address, int lanes, std::size_t lane_bytes)
      : address_(address), lane_count_(lanes), lane_bytes_(lane_bytes) {}
  Page* page() const { return reinterpret_cast<Page*>(address_); }

  std::byte* address_;  // null after a move
  int lane_count_;
  std::size_t lane_bytes_;
};

}  // namespace gradsync::daemon

#endif  // DAEMON_WORKER_ENGINE_MEMORY_H_
