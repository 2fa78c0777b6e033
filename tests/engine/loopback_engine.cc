#include "tests/engine/loopback_engine.h"

#include <algorithm>
#include <cstring>
#include <utility>

#include "daemon/base/clock.h"
#include "daemon/base/error.h"

namespace gradsync::daemon {
namespace {

constexpr std::size_t kAlignment = 64;

std::byte* Aligned(std::byte* at) {
  const auto address = reinterpret_cast<std::uintptr_t>(at);
  return at + ((kAlignment - address % kAlignment) % kAlignment);
}

}  // namespace

LoopbackEngine::LoopbackEngine()
    : memory_(new std::byte[kChunkBytes + kAlignment]),
      chunk_(Aligned(memory_.get())),
      thread_([this] { Run(); }) {}

LoopbackEngine::~LoopbackEngine() {
  Abort(MakeError(absl::StatusCode::kCancelled, reason::kEngineClosed, "the engine was destroyed"));
  {
    MutexLock lock(&mutex_);
    stopping_ = true;
  }
  changed_.NotifyOne();
  thread_.join();
}

void LoopbackEngine::Submit(Exchange* exchange) { Push({exchange, false}); }

void LoopbackEngine::Broadcast(std::vector<std::byte*> buffers, std::size_t bytes,
                               std::uint32_t root_node,
                               std::function<void(const absl::Status&)> done) {
  auto* exchange = new Exchange;
  if (root_node == 0) {
    for (std::byte* const buffer : buffers) {
      if (buffer != buffers.front()) std::memcpy(buffer, buffers.front(), bytes);
    }
    exchange->done = std::move(done);
  } else {
    exchange->done = [done = std::move(done)](const absl::Status&) {
      done(absl::InvalidArgumentError("there is one node only"));
    };
  }
  Push({exchange, true});
}

void LoopbackEngine::Push(const Pending& pending) {
  {
    MutexLock lock(&mutex_);
    queue_.Push(pending);
  }
  changed_.NotifyOne();
}

void LoopbackEngine::Abort(const absl::Status& why) {
  MutexLock lock(&mutex_);
  if (!failure_.ok()) return;
  failure_ = why.ok() ? absl::CancelledError("aborted") : why;
  failed_.store(true, std::memory_order_release);
}

absl::Status LoopbackEngine::failure() {
  MutexLock lock(&mutex_);
  return failure_;
}

EngineStatistics LoopbackEngine::Statistics() const {
  EngineStatistics statistics;
  statistics.exchanges = exchanges_.load(std::memory_order_relaxed);
  statistics.lanes.resize(1);
  statistics.lanes[0].chunks = chunks_.load(std::memory_order_relaxed);
  statistics.lanes[0].busy_ns = busy_ns_.load(std::memory_order_relaxed);
  return statistics;
}

void LoopbackEngine::RunChunks(Exchange* exchange) {
  const std::size_t item = ItemSize(WorkType(exchange->dtype));
  if (item == 0) return;
  const std::size_t step = kChunkBytes / item;
  for (std::size_t first = 0; first < exchange->count; first += step) {
    if (failed_.load(std::memory_order_acquire)) return;
    const std::size_t count = std::min(step, exchange->count - first);
    exchange->gather(first, count, chunk_);
    exchange->scatter(first, count, chunk_);
    chunks_.fetch_add(1, std::memory_order_relaxed);
  }
}

void LoopbackEngine::Run() {
  for (;;) {
    Pending pending;
    {
      MutexLock lock(&mutex_);
      while (queue_.empty() && !stopping_) changed_.Wait(&mutex_);
      if (queue_.empty()) return;
      pending = queue_.front();
      queue_.Pop();
    }
    const std::uint64_t start_ns = MonotonicNowNs();
    RunChunks(pending.exchange);
    busy_ns_.fetch_add(MonotonicNowNs() - start_ns, std::memory_order_relaxed);
    exchanges_.fetch_add(1, std::memory_order_relaxed);
    const std::unique_ptr<Exchange> owned(pending.owned ? pending.exchange : nullptr);
    pending.exchange->done(failure());
  }
}

}  // namespace gradsync::daemon
