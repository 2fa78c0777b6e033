// The thread that reads this rank's state of the model. While it reads, a pin keeps the trainer
// from changing the state.

#ifndef CLIENT_SRC_STATE_READER_H_
#define CLIENT_SRC_STATE_READER_H_

#include <cstdint>
#include <memory>
#include <thread>

#include "absl/base/thread_annotations.h"
#include "absl/status/status.h"
#include "absl/synchronization/mutex.h"
#include "client/include/gradsync/client.h"
#include "client/src/staging_memory.h"

namespace gradsync::v1 {
class SessionRequest;
class StateChunk;
class StateQuestion;
}  // namespace gradsync::v1

namespace gradsync::client {

// Sends a message to the daemon; never waits for it.
class StateSender {
 public:
  virtual ~StateSender() = default;
  virtual void SendState(v1::SessionRequest request) = 0;
};

// Answers StateQuestion and StateChunk{write}: it hashes the items of the trainer's TrainerState,
// and writes them into the staging memory. It serves chunks first and hashes while none is asked
// for.
//
// It reads only while the state is frozen: from this rank's EndStep, or from the beginning of a
// wait, until the wait returns to the trainer. A wait gets a pin by Freeze, and gives it back by
// Thaw. Thaw ends the reading, and returns only when nothing reads. So the trainer cannot change
// the state before that. If the trainer waits for the same step again, the reader goes on where it
// stopped.
//
// Thread-safe. A part of the Connection, which calls Stop. The thread owns everything that it uses.
// If a call of the TrainerState never returns, the thread never ends. Under its lock it takes the
// stream's lock, and no lock of a StepClient, of the JobChannel or of the Connection.
class StateReader {
  class Impl;

 public:
  // A pin; 0: none.
  using Pin = std::uint64_t;

  StateReader();
  // Stops.
  ~StateReader();

  // Uses `sender` until Stop, and shares `staging`. Called once, before anything else.
  void Open(StateSender* sender, std::uint32_t rank, std::shared_ptr<StagingMemory> staging);

  // Reads `source` from now on. Null: refuses every question. Returns when nothing reads the
  // previous source any more.
  //   RESOURCE_EXHAUSTED MEMORY: no thread can be started.
  absl::Status Serve(std::shared_ptr<TrainerState> source) ABSL_LOCKS_EXCLUDED(serve_mutex_);
  // Whether there is a source.
  bool serves() const;

  // ---- The trainer's calls

  // The trainer has ended its step: its state stays as it is until a wait returns. Never blocks.
  void FreezeUntilWait();
  // The trainer waits: its state stays as it is until Thaw(pin). Never blocks.
  Pin Freeze();
  enum class State { kSame, kMayChange };
  // The wait returns to the trainer, which may then change the state (`kMayChange`) or must not,
  // since its step still runs (`kSame`). Returns when nothing reads the state, at most about 100 ms
  // later, or after 10 s if the TrainerState itself does not return. With `kSame` the reading goes
  // on while another wait of this rank lasts. Does nothing if Interrupt came after Freeze.
  void Thaw(Pin pin, State state);
  // After Ctrl-C the trainer no longer waits, although its calls have not returned. Takes back all
  // pins, as Thaw(kSame) does. Also waits for every OwnReading.
  void Interrupt();

  // How often Interrupt() was called.
  std::uint64_t interruptions() const;
  // For a helper thread that makes calls for the trainer. `interruptions`: the value of
  // interruptions() when the trainer handed its calls to the helper. If Interrupt() was called
  // after that, these calls pin nothing, because the trainer no longer waits for them.
  void CallBegan(std::uint64_t interruptions);

  // For a call that reads the state itself, on the trainer's thread (CheckInSync).
  class OwnReading {
   public:
    explicit OwnReading(StateReader* reader);
    ~OwnReading();
    OwnReading(const OwnReading&) = delete;
    OwnReading& operator=(const OwnReading&) = delete;

    // The reading must stop: the call was interrupted, or the session has ended.
    bool interrupted() const;

   private:
    const std::shared_ptr<Impl> impl_;
    const Pin pin_;
  };

  // Reads the state and sends its digests for `transfer`, as if the daemon had asked a question.
  // The caller holds a pin.
  void SendDigests(std::uint64_t transfer);

  // ---- The daemon's messages, on the stream's thread

  void OnQuestion(const v1::StateQuestion& question);
  void OnChunk(const v1::StateChunk& chunk);
  void OnCancelled(std::uint64_t transfer);
  // A step is decided. Its transfer, if any, no longer uses the staging memory.
  void OnStepDone();

  // The session has ended: nothing more is read or sent. Never blocks.
  void Stop();
  // After Stop: returns when nothing reads the state; see Thaw.
  void AwaitStopped();

 private:
  const std::shared_ptr<Impl> impl_;
  absl::Mutex serve_mutex_;
  std::thread thread_ ABSL_GUARDED_BY(serve_mutex_);
};

// Pins the state for the time of one wait. The destructor thaws it with `kSame`, or with
// `kMayChange` if MayChange() was called.
class StatePin {
 public:
  explicit StatePin(StateReader* reader) : reader_(*reader), pin_(reader->Freeze()) {}
  ~StatePin() { reader_.Thaw(pin_, state_); }
  StatePin(const StatePin&) = delete;
  StatePin& operator=(const StatePin&) = delete;

  // The wait has an answer, after which the trainer may change the state.
  void MayChange() { state_ = StateReader::State::kMayChange; }
  StateReader::Pin pin() const { return pin_; }

 private:
  StateReader& reader_;
  const StateReader::Pin pin_;
  StateReader::State state_ = StateReader::State::kSame;
};

}  // namespace gradsync::client

#endif  // CLIENT_SRC_STATE_READER_H_
