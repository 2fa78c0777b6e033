// What runs when: streams, the hardware queues that they share, and the order between operations.
//
// A context has a few hardware queues (CUDA_DEVICE_MAX_CONNECTIONS, 8 by default), each a thread
// that runs what is at its head; streams are dealt to them in the order of creation. So streams
// beyond that number share a queue, and a parked stream holds up its neighbours there. Every
// operation starts late by a random time.
//
// Whatever conflicts in memory must be ordered by streams and events: an operation that touches
// memory of another one that is still pending and not ordered before it is noted in the journal as
// a race. Work that is done already is no race (the order may have come through another process).
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

// What is at work on one device: its queues and streams.
class Timeline {
 private:
  friend class Scheduler;
  struct Queue {
    std::deque<std::shared_ptr<Operation>> operations;
    CondVar filled;
    std::mt19937_64 delays;
  };
  std::vector<std::unique_ptr<Queue>> queues_;
  std::size_t streams_made_ = 0;
  std::set<struct Stream*> streams_;  // those that still exist
  std::vector<std::shared_ptr<Operation>> pending_;
};

// A CUstream. Its members belong to the scheduler.
struct Stream {
  Timeline* timeline = nullptr;
  std::size_t queue = 0;
  bool blocking = true;  // ordered with the legacy default stream
  bool legacy = false;   // the default stream itself
  bool capturing = false;
  std::shared_ptr<Operation> last;
};

class Scheduler {
 public:
  Scheduler(const StateFolder& folder, ProcessFault* fault) : folder_(folder), fault_(fault) {}

  // `queues` threads from now on.
  void Start(Timeline* timeline, std::size_t queues);
  Stream* MakeStream(Timeline* timeline, bool blocking, bool legacy);
  // What is enqueued still runs.
  void ForgetStream(Stream* stream);

  // Enqueues `operation` behind what is on the stream and behind those in operation->after.
  // A capturing stream takes it for the graph: it never runs.
  void Enqueue(Stream* stream, std::shared_ptr<Operation> operation);

  bool Capturing(const Stream& stream);
  void SetCapturing(Stream* stream, bool capturing);
  std::shared_ptr<Operation> LastOf(const Stream& stream);
  bool Done(const Operation& operation);
  std::uint64_t DoneNs(const Operation& operation);

  // These return when it is so, or when the process has its sticky error.
  void AwaitDone(const std::shared_ptr<Operation>& operation);
  void AwaitIdle(const Timeline& timeline);
  // What blocks on a real machine while a stream of the context is parked or a kernel spins:
  // `call` says who is blocked, in the journal.
  void AwaitNothing(Operation::Kind kind, const Timeline& timeline, const std::string& call);

  // Notes `call` in the journal if something pending will still touch that memory.
  void NoteUse(const Timeline& timeline, CUdeviceptr address, std::size_t bytes,
               const std::string& call);

 private:
  void Run(Timeline* timeline, Timeline::Queue* queue);
  void NoteRacesLocked(const Timeline& timeline, const Operation& added)
      ABSL_EXCLUSIVE_LOCKS_REQUIRED(mutex_);

  const StateFolder& folder_;
  ProcessFault* const fault_;
  Mutex mutex_;
  CondVar done_;  // an operation is done
};

}  // namespace gradsync::fakes

#endif  // TESTS_FAKES_CUDA_SCHEDULER_H_
