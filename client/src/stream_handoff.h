// Handing buckets over in the order of a GPU's streams instead of the host's.

#ifndef CLIENT_SRC_STREAM_HANDOFF_H_
#define CLIENT_SRC_STREAM_HANDOFF_H_

#include <cstddef>
#include <cstdint>

#include "absl/status/status.h"
#include "absl/types/span.h"

namespace gradsync::client {

// Bytes from an arena's start.
struct ByteSpan {
  std::uint64_t offset = 0;
  std::uint64_t bytes = 0;
};

// What a layout on a GPU puts on the trainer's streams. Streams are CUstream handles; null is the
// legacy default stream. Nothing waits for the GPU, but the driver may block a call while the
// stream's queue is full, which it can be behind a parked wait: so no lock that the session's
// thread takes is held over a call, since that thread releases parked streams.
//
// Thread-compatible. Destroyed when nothing can park on its words any more; waits for what streams
// still have queued, since that touches memory which is about to go.
class StreamHandoff {
 public:
  virtual ~StreamHandoff() = default;

  // Enqueues, on the first of `streams` and behind all that is on any of them: `zeros` become
  // zeros, and the ready words of `buckets` show `step`. The first call for a step also makes its
  // verdict void until the daemon says otherwise.
  //   INVALID_ARGUMENT     MALFORMED: no stream; BAD_STREAM.
  //   FAILED_PRECONDITION  CAPTURING: a stream is being captured into a graph, which would replay
  //                        this step's number; nothing was enqueued.
  //   UNAVAILABLE          GPU_FAULT.
  virtual absl::Status EnqueueReady(std::uint64_t step, absl::Span<const std::size_t> buckets,
                                    absl::Span<const ByteSpan> zeros,
                                    absl::Span<void* const> streams) = 0;

  // Enqueues that `stream` goes on when the done words of `buckets`, which were made ready, show
  // `step`. Statuses: those of EnqueueReady.
  virtual absl::Status EnqueueWait(std::uint64_t step, absl::Span<const std::size_t> buckets,
                                   void* stream) = 0;
};

}  // namespace gradsync::client

#endif  // CLIENT_SRC_STREAM_HANDOFF_H_
