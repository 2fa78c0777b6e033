// The steps of a layout on a GPU: the calls that take a CUDA stream.

#ifndef CLIENT_SRC_DEVICE_STEPS_H_
#define CLIENT_SRC_DEVICE_STEPS_H_

#include <cstddef>
#include <cstdint>
#include <memory>
#include <optional>
#include <vector>

#include "absl/base/thread_annotations.h"
#include "absl/status/status.h"
#include "absl/synchronization/mutex.h"
#include "absl/types/span.h"
#include "client/include/gradsync/client.h"
#include "client/src/step_client.h"
#include "client/src/stream_handoff.h"

namespace gradsync::client {

// Puts each bucket's hand-off on the trainer's streams after the StepClient has admitted the call,
// and before the StepClient sends the message to the daemon.
//
// Thread-safe. Owned by the Layout. Statuses: those of Layout.
class DeviceSteps {
 public:
  DeviceSteps(std::shared_ptr<StepClient> steps, std::unique_ptr<StreamHandoff> handoff);

  absl::Status MarkReady(std::uint64_t step, std::size_t bucket,
                         absl::Span<const CudaStream> streams) ABSL_LOCKS_EXCLUDED(mutex_);
  absl::Status FinishStep(std::uint64_t step, const std::vector<bool>& used,
                          absl::Span<const CudaStream> streams) ABSL_LOCKS_EXCLUDED(mutex_);
  // `bucket`: nullopt for all.
  absl::Status WaitOnStream(std::uint64_t step, std::optional<std::size_t> bucket,
                            CudaStream stream) ABSL_LOCKS_EXCLUDED(mutex_);

  // Releases the trainer's waiting streams and the GPU. Called on a thread of the trainer when the
  // layout is destroyed; no other call follows.
  void Close() ABSL_LOCKS_EXCLUDED(mutex_);

 private:
  const std::shared_ptr<StepClient> steps_;

  // Held during calls of the driver. Such a call may block behind a stream that waits, until the
  // session's thread releases the stream. That thread never takes this lock. This lock is taken
  // before the StepClient's.
  absl::Mutex mutex_;
  std::unique_ptr<StreamHandoff> handoff_ ABSL_GUARDED_BY(mutex_);  // null after Close
};

}  // namespace gradsync::client

#endif  // CLIENT_SRC_DEVICE_STEPS_H_
