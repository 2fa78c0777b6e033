// Decides when each operation runs: streams, their shared hardware queues, and the order of
// operations.
//
// A context has a few hardware queues (CUDA_DEVICE_MAX_CONNECTIONS; by default 8, and 2 under MPS).
// Each is a thread that runs the operation at its head. Streams get queues in the order of their
// creation, so streams beyond that number share a queue, and a parked stream delays the other
// streams of its queue. Every operation starts late by a random time.
//
// Streams and events must order operations on the same memory. If an operation uses memory of a
// pending one without such an order, the journal gets a violation. An operation that is done causes
// no violation, since another process may have ordered it.
//
// Thread-safe. Never destroyed: its threads run to the end of the process.

#ifndef TESTS_FAKES_CUDA_SCHEDULER_H_
#define TESTS_FAKES_CUDA_SCHEDULER_H_

#include <cstddef>
#include <cstdint>
#include <deque>
#include <memory>
#include <random>
#include <set>
#include <string>
#include <vector>

#include "daemon/base/mutex.h"
#include "tests/fakes/cuda/operation.h"
#include "tests/fakes/cuda/process_fault.h"
#include "tests/fakes/machine/state_folder.h"

namespace gradsync::fakes {

class Scheduler;

// The queues and streams of one device.
class Timeline {
 private:
  friend class Scheduler;
  struct Queue {
    std::deque<std::shared_ptr<Operation>> operations;
    daemon::CondVar filled;
    std::mt19937_64 delays;
  };
  std::vector<std::unique_ptr<Queue>> queues_;
  std::size_t streams_made_ = 0;
  std::set<struct Stream*> streams_;  // the streams that still exist
  std::vector<std::shared_ptr<Operation>> pending_;
};

// A CUstream. Its members belong to the scheduler.
struct Stream {
  Timeline* timeline = nullptr;
  std::size_t queue = 0;
  bool blocking = true;  // ordered with the legacy default stream
  bool legacy = false;   // the default stream itself
  CUstreamCaptureStatus capture = CU_STREAM_CAPTURE_STATUS_NONE;
  std::shared_ptr<Operation> last;
};

class Scheduler {
 public:
  Scheduler(const StateFolder& folder, ProcessFault* fault) : folder_(folder), fault_(fault) {}

  // From now on the device has `queues` threads.
  void Start(Timeline* timeline, std::size_t queues);
  Stream* MakeStream(Timeline* timeline, bool blocking, bool legacy);
  // Operations that are already enqueued still run.
  void ForgetStream(Stream* stream);

  // Enqueues `operation` behind the stream's operations and those in operation->after. On a
  // capturing stream it becomes part of the graph and never runs.
  void Enqueue(Stream* stream, std::shared_ptr<Operation> operation);

  void BeginCapture(Stream* stream);
  CUstreamCaptureStatus CaptureOf(const Stream& stream);
  bool Capturing(const Stream& stream);
  // Returns whether the capture is whole or was invalidated.
  CUstreamCaptureStatus EndCapture(Stream* stream);
  // Invalidates the captures of all streams. False if there is none.
  bool InvalidateCaptures(const Timeline& timeline);
  std::shared_ptr<Operation> LastOf(const Stream& stream);
  bool Done(const Operation& operation);
  std::uint64_t DoneNs(const Operation& operation);

  // These return when the condition holds, or when the process has its sticky error.
  void AwaitDone(const std::shared_ptr<Operation>& operation);
  void AwaitIdle(const Timeline& timeline);
  // Blocks while a stream of the context is parked or a kernel spins, as `call` does on a real
  // machine. The journal names `call` as blocked.
  void AwaitNothing(Operation::Kind kind, const Timeline& timeline, const std::string& call);

  // Notes a violation by `call` if a pending operation will still use that memory.
  void NoteUse(const Timeline& timeline, CUdeviceptr address, std::size_t bytes,
               const std::string& call);

 private:
  void Run(Timeline* timeline, Timeline::Queue* queue);
  void NoteRacesLocked(const Timeline& timeline, const Operation& added)
      ABSL_EXCLUSIVE_LOCKS_REQUIRED(mutex_);

  const StateFolder& folder_;
  ProcessFault* const fault_;
  daemon::Mutex mutex_;
  daemon::CondVar done_;  // an operation is done
};

}  // namespace gradsync::fakes

#endif  // TESTS_FAKES_CUDA_SCHEDULER_H_
