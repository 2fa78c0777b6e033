#include "client/src/state_reader.h"

#include <pthread.h>

#include <atomic>
#include <csignal>
#include <optional>
#include <string>
#include <system_error>
#include <utility>

#include "absl/base/thread_annotations.h"
#include "absl/strings/str_cat.h"
#include "absl/synchronization/mutex.h"
#include "absl/time/clock.h"
#include "client/src/error.h"
#include "client/src/request_parts.h"
#include "client/src/state_answer.h"
#include "client/src/state_image.h"
#include "client/src/utf8.h"
#include "gradsync/limits.h"
#include "proto/gradsync/v1/gradsync.pb.h"

namespace gradsync::client {
namespace {

// How long a wait that ends waits for a TrainerState that does not return.
constexpr absl::Duration kSourcePatience = absl::Seconds(10);

// The trainer's call that this thread makes, and when the trainer began it.
struct CallOfTrainer {
  const void* reader = nullptr;
  std::uint64_t interruptions = 0;
};
thread_local CallOfTrainer call_of_trainer;

}  // namespace

// Shared by the StateReader and its thread.
class StateReader::Impl {
 public:
  void Open(StateSender* sender, std::uint32_t rank, std::shared_ptr<StagingMemory> staging) {
    absl::MutexLock lock(&mutex_);
    sender_ = sender;
    rank_ = rank;
    staging_ = std::move(staging);
  }

  // The body of the thread. Catches nothing: a source in Python may end the thread.
  void Run() ABSL_LOCKS_EXCLUDED(mutex_);

  void SetSource(std::shared_ptr<TrainerState> source) ABSL_LOCKS_EXCLUDED(mutex_);
  bool serves() const ABSL_LOCKS_EXCLUDED(mutex_) {
    absl::MutexLock lock(&mutex_);
    return source_ != nullptr;
  }

  void FreezeUntilWait() ABSL_LOCKS_EXCLUDED(mutex_) {
    absl::MutexLock lock(&mutex_);
    frozen_ = true;
  }
  Pin Freeze() ABSL_LOCKS_EXCLUDED(mutex_);
  void Thaw(Pin pin, State state) ABSL_LOCKS_EXCLUDED(mutex_);
  void Interrupt() ABSL_LOCKS_EXCLUDED(mutex_);

  Pin BeginOwn() ABSL_LOCKS_EXCLUDED(mutex_) {
    absl::MutexLock lock(&mutex_);
    ++own_readings_;
    return CallWasLeft() ? 0 : ++last_pin_;
  }
  void EndOwn() ABSL_LOCKS_EXCLUDED(mutex_) {
    absl::MutexLock lock(&mutex_);
    --own_readings_;
  }
  bool Interrupted(Pin pin) const ABSL_LOCKS_EXCLUDED(mutex_) {
    absl::MutexLock lock(&mutex_);
    return stopped_ || pin <= interrupted_;
  }

  std::uint64_t interruptions() const ABSL_LOCKS_EXCLUDED(mutex_) {
    absl::MutexLock lock(&mutex_);
    return interruptions_;
  }

  void Ask(std::uint64_t transfer, bool offer) ABSL_LOCKS_EXCLUDED(mutex_);
  void OnChunk(const v1::StateChunk& chunk) ABSL_LOCKS_EXCLUDED(mutex_);
  void OnCancelled(std::uint64_t transfer) ABSL_LOCKS_EXCLUDED(mutex_);
  void OnStepDone() ABSL_LOCKS_EXCLUDED(mutex_);
  void Stop() ABSL_LOCKS_EXCLUDED(mutex_);
  // False: the source has not returned in time, or this is the reader's own thread.
  bool AwaitIdle() ABSL_LOCKS_EXCLUDED(mutex_) {
    absl::MutexLock lock(&mutex_);
    return AwaitIdleLocked();
  }

 private:
  struct Question {
    std::uint64_t transfer = 0;
    bool offer = false;
    bool offered = false;   // StateOffer is sent
    bool digested = false;  // StateDigests is sent
    // Nothing is left to do, unless another question comes.
    bool answered = false;
  };
  struct Chunk {
    std::uint64_t number;
    std::uint64_t bytes;
  };
  // What was done for one transfer. Used by the thread only.
  struct Progress {
    std::uint64_t transfer;
    std::uint64_t version;
    StateImageSource image;  // its memory is valid while it is read
    StateAnswer answer;
  };
  enum class Task { kStop, kOffer, kCopy, kHash, kDigest };

  // The trainer has left the call that this thread makes.
  bool CallWasLeft() const ABSL_SHARED_LOCKS_REQUIRED(mutex_) {
    return call_of_trainer.reader == this && call_of_trainer.interruptions != interruptions_;
  }
  bool HasWork() const ABSL_SHARED_LOCKS_REQUIRED(mutex_) {
    return stopped_ ||
           (frozen_ && source_ != nullptr && question_.has_value() && !question_->answered);
  }
  // Reads the state once, until the question is answered or the reading is cancelled.
  void Read(TrainerState* source) ABSL_LOCKS_EXCLUDED(mutex_);
  // Does the work with the items of the source.
  void Work() ABSL_LOCKS_EXCLUDED(mutex_);
  // Waits for the next thing to do. `chunk`: of kCopy.
  Task Next(Chunk* chunk) ABSL_LOCKS_EXCLUDED(mutex_);
  void Offer() ABSL_LOCKS_EXCLUDED(mutex_);
  void Copy(const Chunk& chunk) ABSL_LOCKS_EXCLUDED(mutex_);
  void SendDigests() ABSL_LOCKS_EXCLUDED(mutex_);
  void Refuse(absl::string_view why) ABSL_LOCKS_EXCLUDED(mutex_);

  // Sets `answered` if nothing is left to do. Whoever sends a message of the answer calls it under
  // the same lock. So the question is answered before the daemon can end the step, and OnStepDone
  // gives the staging memory back.
  void NoteAnswered() ABSL_EXCLUSIVE_LOCKS_REQUIRED(mutex_) {
    const bool copied =
        question_->offered && progress_->answer.copied() == progress_->image.bytes();
    question_->answered = question_->digested && (copied || !question_->offer);
  }
  // The reading in progress must go on with the question that it has.
  bool GoesOn() const ABSL_SHARED_LOCKS_REQUIRED(mutex_) {
    return !cancel_.load() && question_.has_value() && question_->transfer == progress_->transfer &&
           !question_->answered;
  }
  void CancelLocked() ABSL_EXCLUSIVE_LOCKS_REQUIRED(mutex_);
  bool AwaitIdleLocked() ABSL_EXCLUSIVE_LOCKS_REQUIRED(mutex_);
  void ReleaseStagingLocked() ABSL_EXCLUSIVE_LOCKS_REQUIRED(mutex_);
  void RefuseLocked(std::uint64_t transfer, absl::string_view why)
      ABSL_EXCLUSIVE_LOCKS_REQUIRED(mutex_);

  // Used by the thread only.
  std::optional<Progress> progress_;

  // The reading must stop. Written under the lock, and read without it between two pieces.
  std::atomic<bool> cancel_{false};

  mutable absl::Mutex mutex_;
  StateSender* sender_ ABSL_GUARDED_BY(mutex_) = nullptr;  // null after Stop
  std::uint32_t rank_ ABSL_GUARDED_BY(mutex_) = 0;
  std::shared_ptr<StagingMemory> staging_ ABSL_GUARDED_BY(mutex_);
  std::shared_ptr<TrainerState> source_ ABSL_GUARDED_BY(mutex_);
  bool stopped_ ABSL_GUARDED_BY(mutex_) = false;
  std::thread::id thread_ ABSL_GUARDED_BY(mutex_);
  // The state stays as it is.
  bool frozen_ ABSL_GUARDED_BY(mutex_) = false;
  // Counts the times after which the trainer may have changed the state.
  std::uint64_t version_ ABSL_GUARDED_BY(mutex_) = 0;
  Pin last_pin_ ABSL_GUARDED_BY(mutex_) = 0;
  std::size_t pins_ ABSL_GUARDED_BY(mutex_) = 0;  // waits that last
  // Waits with this pin or an earlier one do not count any more.
  Pin interrupted_ ABSL_GUARDED_BY(mutex_) = 0;
  std::uint64_t interruptions_ ABSL_GUARDED_BY(mutex_) = 0;
  // The thread is between the beginning of TrainerState::Read and the end of Done.
  bool reading_ ABSL_GUARDED_BY(mutex_) = false;
  std::uint64_t readings_ ABSL_GUARDED_BY(mutex_) = 0;  // that have begun
  std::size_t own_readings_ ABSL_GUARDED_BY(mutex_) = 0;
  std::optional<Question> question_ ABSL_GUARDED_BY(mutex_);
  // The chunk that the daemon asks for.
  std::optional<Chunk> chunk_ ABSL_GUARDED_BY(mutex_);
  // The staging memory is this reader's. The daemon reads it until the transfer ends.
  bool holds_staging_ ABSL_GUARDED_BY(mutex_) = false;
};

// ---- The thread ---------------------------------------------------------------------------------

void StateReader::Impl::Run() {
  {
    absl::MutexLock lock(&mutex_);
    thread_ = std::this_thread::get_id();
  }
  for (;;) {
    std::shared_ptr<TrainerState> source;
    {
      absl::MutexLock lock(&mutex_);
      mutex_.Await(absl::Condition(this, &Impl::HasWork));
      if (stopped_) return;
      reading_ = true;
      ++readings_;
      cancel_.store(false);
      source = source_;
    }
    Read(source.get());
    source = nullptr;
    absl::MutexLock lock(&mutex_);
    reading_ = false;
  }
}

void StateReader::Impl::Read(TrainerState* source) {
  auto items = source->Read();
  const bool owned = items.ok();  // until Done()
  absl::Status status = owned ? ValidateItems(*items) : items.status();
  if (!status.ok()) {
    Refuse(status.message());
  } else {
    StateImageSource image(*std::move(items));
    bool fits = false;
    {
      absl::MutexLock lock(&mutex_);
      if (!cancel_.load() && question_.has_value()) {
        fits = true;
        if (!progress_.has_value() || progress_->transfer != question_->transfer ||
            progress_->version != version_ || !progress_->image.SameShape(image)) {
          if (question_->offered) {
            RefuseLocked(question_->transfer, "its state changed while it was read");
            fits = false;
          } else {
            progress_.emplace(Progress{question_->transfer, version_, std::move(image), {}});
          }
        } else {
          progress_->image = std::move(image);
        }
      }
    }
    if (fits) Work();
  }
  if (owned) source->Done();
}

void StateReader::Impl::Work() {
  Chunk chunk{};
  for (;;) {
    switch (Next(&chunk)) {
      case Task::kStop:
        return;
      case Task::kOffer:
        Offer();
        break;
      case Task::kCopy:
        Copy(chunk);
        break;
      case Task::kHash:
        progress_->answer.HashPiece(progress_->image);
        break;
      case Task::kDigest:
        SendDigests();
        break;
    }
  }
}

StateReader::Impl::Task StateReader::Impl::Next(Chunk* chunk) {
  absl::MutexLock lock(&mutex_);
  if (!GoesOn()) return Task::kStop;
  if (question_->offer && !question_->offered) return Task::kOffer;
  const auto copies = [&]() ABSL_SHARED_LOCKS_REQUIRED(mutex_) {
    if (chunk_.has_value()) *chunk = *chunk_;
    return chunk_.has_value();
  };
  if (copies()) return Task::kCopy;
  if (!question_->digested) {
    return progress_->answer.hashed(progress_->image) ? Task::kDigest : Task::kHash;
  }
  NoteAnswered();  // the same question may come again
  if (question_->answered) return Task::kStop;
  const auto wakes = [this]() ABSL_SHARED_LOCKS_REQUIRED(mutex_) {
    return chunk_.has_value() || !GoesOn();
  };
  mutex_.Await(absl::Condition(&wakes));
  return GoesOn() && copies() ? Task::kCopy : Task::kStop;
}

void StateReader::Impl::Offer() {
  std::shared_ptr<StagingMemory> staging;
  {
    absl::MutexLock lock(&mutex_);
    if (!holds_staging_) staging = staging_;
  }
  if (staging != nullptr) {
    if (!staging->Acquire(absl::InfiniteFuture(), &cancel_)) return;
    absl::MutexLock lock(&mutex_);
    holds_staging_ = true;
    if (!GoesOn()) {
      ReleaseStagingLocked();
      return;
    }
  }
  const std::uint64_t bytes = progress_->image.bytes();
  if (staging != nullptr) {
    if (auto status = staging->Populate(); !status.ok()) {
      Refuse(status.message());
      return;
    }
  }
  absl::MutexLock lock(&mutex_);
  if (!GoesOn()) return;
  question_->offered = true;
  NoteAnswered();
  v1::SessionRequest request;
  request.mutable_state_offer()->set_transfer(question_->transfer);
  request.mutable_state_offer()->set_bytes(bytes);
  sender_->SendState(std::move(request));
}

void StateReader::Impl::Copy(const Chunk& chunk) {
  StateAnswer& answer = progress_->answer;
  std::shared_ptr<StagingMemory> staging;
  {
    absl::MutexLock lock(&mutex_);
    if (!GoesOn()) return;
    staging = staging_;
    if (chunk.number != answer.next_chunk() || chunk.bytes == 0 || chunk.bytes > staging->size() ||
        chunk.bytes > progress_->image.bytes() - answer.copied()) {
      RefuseLocked(question_->transfer,
                   absl::StrCat("the daemon asked for chunk ", chunk.number, " of ", chunk.bytes,
                                " bytes, which its state does not have"));
      return;
    }
  }
  while (!answer.CopyPiece(progress_->image, chunk.bytes, staging->data())) {
    if (cancel_.load()) return;
  }
  absl::MutexLock lock(&mutex_);
  // An item of this transfer: it was copied, even if the reading is cancelled just now.
  if (!question_.has_value() || question_->transfer != progress_->transfer || stopped_) return;
  chunk_.reset();
  NoteAnswered();
  v1::SessionRequest request;
  request.mutable_state_written()->set_transfer(question_->transfer);
  request.mutable_state_written()->set_chunk(chunk.number);
  sender_->SendState(std::move(request));
}

void StateReader::Impl::SendDigests() {
  v1::SessionRequest request;
  progress_->answer.FillDigests(progress_->image, request.mutable_state_digests());
  absl::MutexLock lock(&mutex_);
  if (!GoesOn()) return;
  question_->digested = true;
  NoteAnswered();
  request.mutable_state_digests()->set_transfer(question_->transfer);
  for (v1::SessionRequest& part : DigestMessages(std::move(request))) {
    sender_->SendState(std::move(part));
  }
}

void StateReader::Impl::Refuse(absl::string_view why) {
  absl::MutexLock lock(&mutex_);
  if (cancel_.load() || !question_.has_value()) return;
  RefuseLocked(question_->transfer, why);
}

void StateReader::Impl::RefuseLocked(std::uint64_t transfer, absl::string_view why) {
  if (question_.has_value()) question_->answered = true;
  chunk_.reset();
  ReleaseStagingLocked();
  if (sender_ == nullptr) return;
  v1::SessionRequest request;
  request.mutable_state_refused()->set_transfer(transfer);
  const std::string text = absl::StrCat("rank ", rank_, ": ", why);
  request.mutable_state_refused()->set_reason(ValidUtf8(text.substr(0, kMaxReasonBytes)));
  sender_->SendState(std::move(request));
}

// ---- The trainer's calls ------------------------------------------------------------------------

void StateReader::Impl::SetSource(std::shared_ptr<TrainerState> source) {
  std::shared_ptr<TrainerState> before;  // destroyed without the lock
  absl::MutexLock lock(&mutex_);
  before = std::exchange(source_, std::move(source));
  if (before != nullptr) {
    CancelLocked();
    AwaitIdleLocked();
    if (source_ == nullptr && question_.has_value() && !question_->answered) {
      RefuseLocked(question_->transfer, "it serves its state no more");
    }
  }
}

StateReader::Pin StateReader::Impl::Freeze() {
  absl::MutexLock lock(&mutex_);
  if (CallWasLeft()) return 0;
  frozen_ = true;
  ++pins_;
  return ++last_pin_;
}

void StateReader::Impl::Thaw(Pin pin, State state) {
  absl::MutexLock lock(&mutex_);
  if (pin <= interrupted_) return;
  --pins_;
  if (state == State::kSame && pins_ > 0) return;
  frozen_ = false;
  if (state == State::kMayChange) ++version_;
  CancelLocked();
  AwaitIdleLocked();
}

void StateReader::Impl::Interrupt() {
  absl::MutexLock lock(&mutex_);
  ++interruptions_;
  interrupted_ = last_pin_;
  pins_ = 0;
  frozen_ = false;
  CancelLocked();
  if (!AwaitIdleLocked()) return;
  const auto none = [this]() ABSL_SHARED_LOCKS_REQUIRED(mutex_) { return own_readings_ == 0; };
  mutex_.AwaitWithTimeout(absl::Condition(&none), kSourcePatience);
}

void StateReader::Impl::CancelLocked() {
  if (!reading_) return;
  cancel_.store(true);
  if (staging_ != nullptr) staging_->Wake();
}

bool StateReader::Impl::AwaitIdleLocked() {
  if (std::this_thread::get_id() == thread_) return false;
  // Another wait may let the next reading begin at once.
  const auto idle = [this, last = readings_]() ABSL_SHARED_LOCKS_REQUIRED(mutex_) {
    return !reading_ || readings_ != last;
  };
  return mutex_.AwaitWithTimeout(absl::Condition(&idle), kSourcePatience);
}

void StateReader::Impl::ReleaseStagingLocked() {
  if (std::exchange(holds_staging_, false)) staging_->Release();
}

// ---- The daemon's messages ----------------------------------------------------------------------

void StateReader::Impl::Ask(std::uint64_t transfer, bool offer) {
  absl::MutexLock lock(&mutex_);
  if (stopped_) return;
  if (source_ == nullptr) {
    RefuseLocked(transfer, "it serves no state; call ServeState before the first step");
    return;
  }
  if (question_.has_value() && question_->transfer == transfer) {
    // The source was lost, and this rank takes its place.
    question_->offer = question_->offer || offer;
    question_->answered = false;
    return;
  }
  CancelLocked();
  ReleaseStagingLocked();
  question_ = Question{transfer, offer};
  chunk_.reset();
}

void StateReader::Impl::OnChunk(const v1::StateChunk& chunk) {
  absl::MutexLock lock(&mutex_);
  if (!question_.has_value() || question_->transfer != chunk.transfer() || !question_->offered ||
      question_->answered) {
    return;
  }
  chunk_ = Chunk{chunk.chunk(), chunk.bytes()};
}

void StateReader::Impl::OnCancelled(std::uint64_t transfer) {
  absl::MutexLock lock(&mutex_);
  if (!question_.has_value() || question_->transfer != transfer) return;
  question_.reset();
  chunk_.reset();
  CancelLocked();
  ReleaseStagingLocked();
}

void StateReader::Impl::OnStepDone() {
  absl::MutexLock lock(&mutex_);
  if (!question_.has_value() || question_->answered) ReleaseStagingLocked();
}

void StateReader::Impl::Stop() {
  absl::MutexLock lock(&mutex_);
  stopped_ = true;
  sender_ = nullptr;
  question_.reset();
  chunk_.reset();
  CancelLocked();
  ReleaseStagingLocked();
}

// ---- The owner's side ---------------------------------------------------------------------------

StateReader::StateReader() : impl_(std::make_shared<Impl>()) {}

StateReader::~StateReader() {
  Stop();
  absl::MutexLock lock(&serve_mutex_);
  if (!thread_.joinable()) return;
  if (impl_->AwaitIdle()) {
    thread_.join();
  } else {
    thread_.detach();
  }
}

void StateReader::Open(StateSender* sender, std::uint32_t rank,
                       std::shared_ptr<StagingMemory> staging) {
  impl_->Open(sender, rank, std::move(staging));
}

absl::Status StateReader::Serve(std::shared_ptr<TrainerState> source) {
  absl::MutexLock lock(&serve_mutex_);
  if (source != nullptr && !thread_.joinable()) {
    // As for the stream's thread: signals are for the trainer's threads.
    sigset_t all, before;
    sigfillset(&all);
    pthread_sigmask(SIG_SETMASK, &all, &before);
    try {
      thread_ = std::thread([impl = impl_] {
        pthread_setname_np(pthread_self(), "gradsync-state");
        impl->Run();
      });
    } catch (const std::system_error&) {
    }
    pthread_sigmask(SIG_SETMASK, &before, nullptr);
    if (!thread_.joinable()) {
      return MakeError(absl::StatusCode::kResourceExhausted, reason::kMemory,
                       "no thread could be started; raise the process limit (ulimit -u)");
    }
  }
  impl_->SetSource(std::move(source));
  return absl::OkStatus();
}

bool StateReader::serves() const { return impl_->serves(); }
void StateReader::FreezeUntilWait() { impl_->FreezeUntilWait(); }
StateReader::Pin StateReader::Freeze() { return impl_->Freeze(); }
void StateReader::Thaw(Pin pin, State state) { impl_->Thaw(pin, state); }
void StateReader::Interrupt() { impl_->Interrupt(); }
std::uint64_t StateReader::interruptions() const { return impl_->interruptions(); }
void StateReader::CallBegan(std::uint64_t interruptions) {
  call_of_trainer = {impl_.get(), interruptions};
}
void StateReader::SendDigests(std::uint64_t transfer) { impl_->Ask(transfer, /*offer=*/false); }

StateReader::OwnReading::OwnReading(StateReader* reader)
    : impl_(reader->impl_), pin_(impl_->BeginOwn()) {}
StateReader::OwnReading::~OwnReading() { impl_->EndOwn(); }
bool StateReader::OwnReading::interrupted() const { return impl_->Interrupted(pin_); }

void StateReader::OnQuestion(const v1::StateQuestion& question) {
  impl_->Ask(question.transfer(), question.offer());
}
void StateReader::OnChunk(const v1::StateChunk& chunk) { impl_->OnChunk(chunk); }
void StateReader::OnCancelled(std::uint64_t transfer) { impl_->OnCancelled(transfer); }
void StateReader::OnStepDone() { impl_->OnStepDone(); }
void StateReader::Stop() { impl_->Stop(); }
void StateReader::AwaitStopped() { impl_->AwaitIdle(); }

}  // namespace gradsync::client
