#include "daemon/peer/node_exchange.h"

#include <algorithm>
#include <cstring>
#include <utility>

#include "absl/strings/str_cat.h"
#include "daemon/base/error.h"
#include "daemon/base/thread.h"
#include "daemon/reduce/combine.h"
#include "daemon/reduce/combine_order_free.h"

namespace gradsync::daemon {

// One launch in flight. Kept and used again.
struct NodeExchange::Running {
  explicit Running(NodeExchange* owner) {
    exchange.gather = [this](std::size_t first, std::size_t count, std::byte* sum) {
      const std::size_t offset = first * ItemSize(work.dtype);
      std::vector<const std::byte*> from;
      from.reserve(work.buffers.size());
      for (const std::byte* buffer : work.buffers) from.push_back(buffer + offset);
      if (IsOrderFree(work.op, work.dtype)) {
        CombineOrderFree(work.op, work.dtype, from, count, {&sum, 1});
      } else {
        SumInto(work.dtype, from, count, sum);
      }
    };
    exchange.scatter = [this](std::size_t first, std::size_t count, const std::byte* sum) {
      if (work.buffers.empty()) return;
      const std::size_t offset = first * ItemSize(work.dtype);
      std::vector<std::byte*> to;
      to.reserve(work.buffers.size());
      for (std::byte* buffer : work.buffers) to.push_back(buffer + offset);
      if (IsOrderFree(work.op, work.dtype)) {
        for (std::byte* buffer : to) std::memcpy(buffer, sum, count * ItemSize(work.dtype));
        return;
      }
      GradientStats stats;
      ScaleInto(work.dtype, sum, count, work.scale, to, work.measure ? &stats : nullptr);
      MutexLock lock(&mutex);
      parts.emplace_back(first, stats);
    };
    exchange.done = [this, owner](const absl::Status& status) { owner->Finished(this, status); };
  }

  // Adds up the chunks in their order, whatever order they arrived in. Frees their parts: a large
  // bucket has many, and this object may serve small ones from now on.
  GradientStats TakeStats() {
    std::vector<std::pair<std::size_t, GradientStats>> taken;
    {
      MutexLock lock(&mutex);
      taken.swap(parts);
    }
    std::sort(taken.begin(), taken.end(),
              [](const auto& a, const auto& b) { return a.first < b.first; });
    GradientStats stats;
    for (const auto& [first, part] : taken) {
      stats.sum_of_squares += part.sum_of_squares;
      stats.non_finite += part.non_finite;
    }
    return stats;
  }

  NodeWork work;
  Exchange exchange;
  std::vector<std::byte> scratch;  // for a broadcast, on a node without ranks
  Mutex mutex;
  std::vector<std::pair<std::size_t, GradientStats>> parts ABSL_GUARDED_BY(mutex);
};

NodeExchange::NodeExchange(std::string node, Connect connect,
                           std::function<void(const absl::Status&)> failed)
    : node_(std::move(node)) {
  auto thread =
      StartThread([this, connect = std::move(connect), failed = std::move(failed)]() mutable {
        Run(std::move(connect), failed);
      });
  if (thread.ok()) {
    thread_ = *std::move(thread);
  } else {
    MutexLock lock(&mutex_);
    failure_ = NamingNode(thread.status());
  }
}

NodeExchange::~NodeExchange() {
  Abort(absl::CancelledError("the exchange is closed"));
  if (thread_.joinable()) thread_.join();
  std::unique_ptr<Engine> engine;
  {
    MutexLock lock(&mutex_);
    engine = std::move(engine_);
  }
  engine.reset();  // waits for what is pending
}

absl::Status NodeExchange::NamingNode(const absl::Status& why) const {
  if (!absl::IsResourceExhausted(why)) return why;
  return MakeError(why.code(), Reason(DetailsOf(why).reason),
                   absl::StrCat("node ", node_, ": ", why.message()), {{field::kNode, node_}});
}

void NodeExchange::Run(Connect connect, const std::function<void(const absl::Status&)>& failed) {
  auto engine = connect();
  connect = nullptr;
  if (!engine.ok()) {
    const absl::Status why = NamingNode(engine.status());
    Abort(why);
    failed(why);
    return;
  }
  MutexLock lock(&mutex_);
  engine_ = *std::move(engine);
  if (!failure_.ok()) engine_->Abort(failure_);
  for (auto& running : early_) StartLocked(std::move(running));
  early_.clear();
}

absl::Status NodeExchange::Submit(NodeWork work) {
  MutexLock lock(&mutex_);
  if (!failure_.ok()) return failure_;
  std::unique_ptr<Running> running;
  if (!spare_.empty()) {
    running = std::move(spare_.back());
    spare_.pop_back();
  } else {
    running = std::make_unique<Running>(this);
  }
  running->work = std::move(work);
  if (engine_ == nullptr) {
    early_.push_back(std::move(running));
  } else {
    StartLocked(std::move(running));
  }
  return absl::OkStatus();
}

void NodeExchange::StartLocked(std::unique_ptr<Running> given) {
  Running* const running = given.release();  // Finished() owns it again
  const NodeWork& work = running->work;
  if (work.root_node < 0) {
    running->exchange.dtype = work.dtype;
    running->exchange.count = work.count;
    running->exchange.op = work.op;
    running->exchange.exact = work.exact;
    running->exchange.buffers = work.buffers.size();
    engine_->Submit(&running->exchange);
    return;
  }
  std::vector<std::byte*> buffers = work.buffers;
  if (buffers.empty()) {
    running->scratch.resize(work.count);
    buffers.push_back(running->scratch.data());
  }
  engine_->Broadcast(std::move(buffers), work.count, static_cast<std::uint32_t>(work.root_node),
                     [this, running](const absl::Status& status) { Finished(running, status); });
}

void NodeExchange::Finished(Running* running, const absl::Status& status) {
  const GradientStats stats = running->TakeStats();
  auto done = std::move(running->work.done);
  std::vector<std::byte>().swap(running->scratch);  // large, and seldom needed again
  running->work = NodeWork{};
  {
    MutexLock lock(&mutex_);
    spare_.emplace_back(running);
    if (!status.ok() && failure_.ok()) failure_ = status;
  }
  done(status, stats);
}

void NodeExchange::Abort(const absl::Status& why) {
  std::vector<std::unique_ptr<Running>> early;
  {
    MutexLock lock(&mutex_);
    if (failure_.ok()) failure_ = why;
    if (engine_ != nullptr) engine_->Abort(why);
    early.swap(early_);
  }
  for (auto& running : early) running->work.done(why, GradientStats{});
}

std::optional<EngineStatistics> NodeExchange::Statistics() const {
  MutexLock lock(&mutex_);
  if (engine_ == nullptr) return std::nullopt;
  return engine_->Statistics();
}

absl::Status NodeExchange::failure() const {
  MutexLock lock(&mutex_);
  return failure_;
}

}  // namespace gradsync::daemon
