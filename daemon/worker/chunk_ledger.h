// The exchanges that an engine process has not finished, and the chunks that it has yet to ask for.

#ifndef DAEMON_WORKER_CHUNK_LEDGER_H_
#define DAEMON_WORKER_CHUNK_LEDGER_H_

#include <cstddef>
#include <cstdint>
#include <map>
#include <memory>
#include <optional>

#include "absl/status/status.h"
#include "daemon/engine/engine.h"
#include "daemon/worker/lane_socket.h"

namespace gradsync::daemon {

// Checks every request, because the process may be broken. A chunk that it allows lies within the
// exchange and within the lane's memory.
//
// Not thread-safe: EngineProcess guards it with its mutex. It runs no callbacks.
class ChunkLedger {
 public:
  // `chunk_bytes`: as in EngineSettings. `lane_bytes`: LaneBytes().
  ChunkLedger(std::size_t chunk_bytes, std::size_t lane_bytes)
      : chunk_bytes_(chunk_bytes), lane_bytes_(lane_bytes) {}

  // Begins an exchange and returns its number. The caller owns the exchange, and keeps it until
  // TakeFinished().
  std::uint64_t Add(Exchange* exchange);
  // The same for a broadcast of `exchange->count` bytes. The root gathers, the others scatter.
  std::uint64_t AddBroadcast(std::unique_ptr<Exchange> exchange, bool root);

  // A chunk whose callback runs.
  struct Chunk {
    Exchange* exchange = nullptr;
    std::uint64_t traffic = 0;  // bytes that the callback reads and writes
  };
  // Counts the chunk. Nullopt: the request fits no awaited exchange, or the process has already
  // asked to gather (or to scatter) as many chunks as the exchange has. Checks only how many chunks
  // it has asked for, not which.
  std::optional<Chunk> Begin(const ChunkRequest& request);
  // The callback of a chunk of this exchange has returned.
  void End(std::uint64_t exchange);

  // True if the process has yet to answer the exchange.
  bool Awaits(std::uint64_t exchange) const;
  // True if the process has asked for as many chunks as the exchange has, and no callback runs. The
  // exchange must be known.
  bool IsWhole(std::uint64_t exchange) const;
  // The process has answered, or has ended. Requires Awaits().
  void Answer(std::uint64_t exchange, const absl::Status& status);

  struct Finished {
    Exchange* exchange = nullptr;
    std::unique_ptr<Exchange> owned;  // a broadcast's
    absl::Status status;
  };
  // If the exchange is answered and none of its callbacks runs: returns it, once, and forgets it.
  std::optional<Finished> TakeFinished(std::uint64_t exchange);

 private:
  struct Pending {
    Exchange* exchange = nullptr;
    std::unique_ptr<Exchange> owned;
    std::size_t item_bytes = 0;  // of the work type
    // Chunks that the process has yet to ask for, once each.
    std::size_t gathers_left = 0;
    std::size_t scatters_left = 0;
    int running = 0;  // callbacks
    bool answered = false;
    absl::Status status;
  };

  std::uint64_t Add(Pending pending);
  // The elements of a whole chunk.
  std::size_t ChunkItems(const Pending& pending) const;
  bool Fits(const Pending& pending, const ChunkRequest& request) const;

  const std::size_t chunk_bytes_;
  const std::size_t lane_bytes_;
  std::uint64_t last_ = 0;
  std::map<std::uint64_t, Pending> pending_;
};

}  // namespace gradsync::daemon

#endif  // DAEMON_WORKER_CHUNK_LEDGER_H_
