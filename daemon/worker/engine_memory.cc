#include "daemon/worker/engine_memory.h"

#include <sys/mman.h>

#include <cerrno>
#include <utility>

#include "absl/status/status.h"
#include "daemon/engine/lane_memory.h"

namespace gradsync::daemon {
namespace {

// Heap, stacks, the buffers of its connections, and what it changes in pages of the program.
constexpr std::uint64_t kProcessBytes = std::uint64_t{8} << 20;

}  // namespace

std::uint64_t EngineBytes(const EngineSettings& settings, std::uint32_t nodes) {
  return EngineMemory::Bytes(settings.lanes, LaneBytes(settings.chunk_bytes, nodes)) +
         kProcessBytes;
}

absl::StatusOr<EngineMemory> EngineMemory::Map(int fd, int lanes, std::size_t lane_bytes) {
  void* const address =
      mmap(nullptr, Bytes(lanes, lane_bytes), PROT_READ | PROT_WRITE, MAP_SHARED, fd, 0);
  if (address == MAP_FAILED) return absl::ErrnoToStatus(errno, "mapping an engine's memory");
  return EngineMemory(static_cast<std::byte*>(address), lanes, lane_bytes);
}

EngineMemory::EngineMemory(EngineMemory&& other) noexcept
    : address_(std::exchange(other.address_, nullptr)),
      lane_count_(other.lane_count_),
      lane_bytes_(other.lane_bytes_) {}

EngineMemory::~EngineMemory() {
  if (address_ != nullptr) munmap(address_, Bytes(lane_count_, lane_bytes_));
}

void EngineMemory::Write(const EngineStatistics& statistics) const {
  page()->exchanges.store(statistics.exchanges, std::memory_order_relaxed);
  for (std::size_t i = 0; i < statistics.lanes.size(); ++i) {
    Lane& lane = page()->lanes[i];
    lane.bytes_sent.store(statistics.lanes[i].bytes_sent, std::memory_order_relaxed);
    lane.bytes_received.store(statistics.lanes[i].bytes_received, std::memory_order_relaxed);
    lane.busy_ns.store(statistics.lanes[i].busy_ns, std::memory_order_relaxed);
    lane.chunks.store(statistics.lanes[i].chunks, std::memory_order_relaxed);
  }
}

EngineStatistics EngineMemory::Read() const {
  EngineStatistics statistics;
  statistics.exchanges = page()->exchanges.load(std::memory_order_relaxed);
  for (int i = 0; i < lane_count_; ++i) {
    const Lane& lane = page()->lanes[static_cast<std::size_t>(i)];
    statistics.lanes.push_back({lane.bytes_sent.load(std::memory_order_relaxed),
                                lane.bytes_received.load(std::memory_order_relaxed),
                                lane.busy_ns.load(std::memory_order_relaxed),
                                lane.chunks.load(std::memory_order_relaxed)});
  }
  return statistics;
}

}  // namespace gradsync::daemon
