#include "tests/fakes/cuda/scheduler.h"

#include <time.h>

#include <algorithm>
#include <chrono>
#include <functional>
#include <thread>
#include <utility>

namespace gradsync::fakes {
namespace {

std::uint64_t NowNs() {
  timespec now{};
  clock_gettime(CLOCK_MONOTONIC, &now);
  return static_cast<std::uint64_t>(now.tv_sec) * 1'000'000'000u +
         static_cast<std::uint64_t>(now.tv_nsec);
}

bool Conflict(const Access& one, const Access& other) {
  return (one.write || other.write) && one.address < other.address + other.bytes &&
         other.address < one.address + one.bytes;
}

bool Conflict(const Operation& one, const Operation& other) {
  for (const Access& mine : one.accesses) {
    for (const Access& theirs : other.accesses) {
      if (Conflict(mine, theirs)) return true;
    }
  }
  return false;
}

}  // namespace

void Scheduler::Start(Timeline* timeline, std::size_t queues) {
  daemon::MutexLock lock(&mutex_);
  while (timeline->queues_.size() < queues) {
    auto queue = std::make_unique<Timeline::Queue>();
    queue->delays.seed(folder_.machine().seed + timeline->queues_.size());
    std::thread(&Scheduler::Run, this, timeline, queue.get()).detach();
    timeline->queues_.push_back(std::move(queue));
  }
}

Stream* Scheduler::MakeStream(Timeline* timeline, bool blocking, bool legacy) {
  daemon::MutexLock lock(&mutex_);
  auto stream = std::make_unique<Stream>();
  stream->timeline = timeline;
  stream->queue = timeline->streams_made_++ % timeline->queues_.size();
  stream->blocking = blocking;
  stream->legacy = legacy;
  timeline->streams_.insert(stream.get());
  return stream.release();
}

void Scheduler::ForgetStream(Stream* stream) {
  daemon::MutexLock lock(&mutex_);
  stream->timeline->streams_.erase(stream);
  delete stream;
}

void Scheduler::Enqueue(Stream* stream, std::shared_ptr<Operation> operation) {
  daemon::MutexLock lock(&mutex_);
  if (stream->capture != CU_STREAM_CAPTURE_STATUS_NONE) {
    operation->done = true;
    return;
  }
  if (stream->last != nullptr) operation->after.push_back(stream->last);
  for (const Stream* other : stream->timeline->streams_) {
    // The legacy default stream and all blocking streams wait for each other.
    const bool ordered = (stream->legacy && other->blocking) || (stream->blocking && other->legacy);
    if (ordered && other->last != nullptr) operation->after.push_back(other->last);
  }
  auto& after = operation->after;
  after.erase(std::remove_if(after.begin(), after.end(), [](const auto& one) { return one->done; }),
              after.end());
  NoteRacesLocked(*stream->timeline, *operation);
  stream->timeline->pending_.push_back(operation);
  Timeline::Queue& queue = *stream->timeline->queues_[stream->queue];
  queue.operations.push_back(operation);
  queue.filled.NotifyOne();
  stream->last = std::move(operation);
}

void Scheduler::BeginCapture(Stream* stream) {
  daemon::MutexLock lock(&mutex_);
  stream->capture = CU_STREAM_CAPTURE_STATUS_ACTIVE;
}

CUstreamCaptureStatus Scheduler::CaptureOf(const Stream& stream) {
  daemon::MutexLock lock(&mutex_);
  return stream.capture;
}

bool Scheduler::Capturing(const Stream& stream) {
  return CaptureOf(stream) != CU_STREAM_CAPTURE_STATUS_NONE;
}

CUstreamCaptureStatus Scheduler::EndCapture(Stream* stream) {
  daemon::MutexLock lock(&mutex_);
  return std::exchange(stream->capture, CU_STREAM_CAPTURE_STATUS_NONE);
}

bool Scheduler::InvalidateCaptures(const Timeline& timeline) {
  daemon::MutexLock lock(&mutex_);
  bool found = false;
  for (Stream* stream : timeline.streams_) {
    if (stream->capture == CU_STREAM_CAPTURE_STATUS_NONE) continue;
    stream->capture = CU_STREAM_CAPTURE_STATUS_INVALIDATED;
    found = true;
  }
  return found;
}

std::shared_ptr<Operation> Scheduler::LastOf(const Stream& stream) {
  daemon::MutexLock lock(&mutex_);
  return stream.last;
}

bool Scheduler::Done(const Operation& operation) {
  daemon::MutexLock lock(&mutex_);
  return operation.done;
}

std::uint64_t Scheduler::DoneNs(const Operation& operation) {
  daemon::MutexLock lock(&mutex_);
  return operation.done_ns;
}

void Scheduler::AwaitDone(const std::shared_ptr<Operation>& operation) {
  daemon::MutexLock lock(&mutex_);
  while (operation != nullptr && !operation->done) done_.Wait(&mutex_);
}

void Scheduler::AwaitIdle(const Timeline& timeline) {
  daemon::MutexLock lock(&mutex_);
  // Waits only for operations that are enqueued now.
  const std::vector<std::shared_ptr<Operation>> pending = timeline.pending_;
  for (const auto& operation : pending) {
    while (!operation->done) done_.Wait(&mutex_);
  }
}

void Scheduler::AwaitNothing(Operation::Kind kind, const Timeline& timeline,
                             const std::string& call) {
  daemon::MutexLock lock(&mutex_);
  const auto blocks = [kind](const auto& operation) { return operation->kind == kind; };
  bool noted = false;
  while (std::any_of(timeline.pending_.begin(), timeline.pending_.end(), blocks)) {
    if (!noted) {
      folder_.Note(kBlocked,
                   call + (kind == Operation::Kind::kWordWait ? " behind a parked stream"
                                                              : " behind a spinning collective"));
      noted = true;
    }
    done_.Wait(&mutex_);
  }
}

void Scheduler::NoteUse(const Timeline& timeline, CUdeviceptr address, std::size_t bytes,
                        const std::string& call) {
  daemon::MutexLock lock(&mutex_);
  const Access touched{address, bytes, true};
  for (const auto& operation : timeline.pending_) {
    for (const Access& access : operation->accesses) {
      if (!Conflict(touched, access)) continue;
      folder_.Note(kViolation, call + " of memory that " + operation->name + " will still touch");
      return;
    }
  }
}

void Scheduler::Run(Timeline* timeline, Timeline::Queue* queue) {
  const int max_delay_us = folder_.machine().max_delay_us;
  for (;;) {
    std::shared_ptr<Operation> operation;
    int delay_us = 0;
    {
      daemon::MutexLock lock(&mutex_);
      while (queue->operations.empty()) queue->filled.Wait(&mutex_);
      operation = queue->operations.front();
      for (const auto& earlier : operation->after) {
        while (!earlier->done) done_.Wait(&mutex_);
      }
      if (max_delay_us > 0) {
        delay_us = std::uniform_int_distribution<int>(0, max_delay_us)(queue->delays);
      }
    }
    // The random delay exposes code that relies on how long work takes.
    if (delay_us > 0) std::this_thread::sleep_for(std::chrono::microseconds(delay_us));
    if (operation->work != nullptr && fault_->Get() == CUDA_SUCCESS) {
      const CUresult error = operation->work();
      if (error != CUDA_SUCCESS) fault_->Set(error, operation->name);
    }
    // Destroys what `work` holds, without the lock. No other thread reads `work`.
    operation->work = nullptr;
    daemon::MutexLock lock(&mutex_);
    operation->done = true;
    operation->done_ns = NowNs();
    operation->after.clear();
    queue->operations.pop_front();
    auto& pending = timeline->pending_;
    pending.erase(std::find(pending.begin(), pending.end(), operation));
    done_.NotifyAll();
  }
}

void Scheduler::NoteRacesLocked(const Timeline& timeline, const Operation& added) {
  if (added.accesses.empty()) return;
  // Finds all operations before `added`, and whether a word that it waits for may order more.
  std::set<const Operation*> before;
  bool outside_order = false;
  std::function<void(const Operation&)> visit = [&](const Operation& operation) {
    for (const auto& earlier : operation.after) {
      if (!before.insert(earlier.get()).second) continue;
      outside_order |= earlier->kind == Operation::Kind::kWordWait && !earlier->done;
      visit(*earlier);
    }
  };
  visit(added);
  if (outside_order) return;
  for (const auto& other : timeline.pending_) {
    if (before.count(other.get()) == 0 && Conflict(added, *other)) {
      folder_.Note(kViolation, "race: " + added.name + " is not ordered after " + other->name +
                                   ", which is pending on the same memory");
    }
  }
}

}  // namespace gradsync::fakes
