// Hands buckets over in the order of a GPU's streams.

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
// legacy default stream.
//
// No call waits for the GPU. But the driver may block a call while a stream's queue is full. If the
// stream waits, its queue stays full until the session's thread releases the wait. So the caller
// must hold no lock that the session's thread takes.
//
// Thread-compatible. Owned by its DeviceSteps. Destroy it when no stream can begin to wait any
// more. The destructor waits for the streams' queued work, because that work touches memory that is
// unmapped next.
class StreamHandoff {
 public:
  virtual ~StreamHandoff() = default;

  // Enqueues on the first of `streams`, behind all work that is on any of them: fills `zeros` with
  // zeros, and writes `step` to the ready words of `buckets`. The first call for a step also sets
  // its device verdict to void, until the daemon sets it to complete.
  //   INVALID_ARGUMENT     MALFORMED: no stream. BAD_STREAM.
  //   FAILED_PRECONDITION  CAPTURING: a stream is being captured into a graph, which would replay
  //                        this step's number. Nothing was enqueued.
  //   UNAVAILABLE          GPU_FAULT.
  virtual absl::Status EnqueueReady(std::uint64_t step, absl::Span<const std::size_t> buckets,
                                    absl::Span<const ByteSpan> zeros,
                                    absl::Span<void* const> streams) = 0;

  // Makes `stream` wait until the done words of `buckets` show `step`. The buckets' ready words
  // were enqueued before. Statuses: those of EnqueueReady.
  virtual absl::Status EnqueueWait(std::uint64_t step, absl::Span<const std::size_t> buckets,
                                   void* stream) = 0;
};

}  // namespace gradsync::client

#endif  // CLIENT_SRC_STREAM_HANDOFF_H_
