#include "tests/fuzz/held_engines.h"

#include <algorithm>
#include <cstdlib>
#include <cstring>
#include <iterator>
#include <memory>

#include "daemon/base/thread.h"
#include "daemon/engine/engine.h"
#include "daemon/engine/engine_settings.h"
#include "daemon/peer/node_name.h"
#include "tests/fuzz/check.h"

namespace gradsync::daemon {
namespace {

// The largest sum that is carried out. No rank of a fuzzer has more memory.
constexpr std::size_t kMostBytes = std::size_t{1} << 20;
constexpr std::size_t kAlignment = 64;  // of a sum

struct Free {
  void operator()(std::byte* data) const { std::free(data); }
};

// Calls `end` when its thread ends.
struct AtThreadEnd {
  ~AtThreadEnd() {
    if (end) end();
  }
  std::function<void()> end;
};

}  // namespace

void HeldExecutor::RunAll() {
  while (!queue_.empty()) {
    const std::function<void()> work = std::move(queue_.front());
    queue_.erase(queue_.begin());
    work();
  }
}

class HeldEngines::HeldEngine final : public Engine {
 public:
  explicit HeldEngine(HeldEngines* owner) : owner_(owner) {}
  ~HeldEngine() override { owner_->Drop(this); }

  void Submit(Exchange* exchange) override { owner_->Add({this, exchange, {}, 0, exchange->done}); }
  void Broadcast(std::vector<std::byte*> buffers, std::size_t bytes, std::uint32_t,
                 std::function<void(const absl::Status&)> done) override {
    owner_->Add({this, nullptr, std::move(buffers), bytes, std::move(done)});
  }
  // done() follows when the fuzzer, or the end, comes to it.
  void Abort(const absl::Status&) override {}
  EngineStatistics Statistics() const override { return {}; }

 private:
  HeldEngines* const owner_;
};

EngineMaker HeldEngines::Maker() {
  LeaveNoThreadsToGrpc();  // to look for these takes ten times as long as the rest
  return [this](const EngineSpec& spec) -> absl::StatusOr<std::unique_ptr<Engine>> {
    // Another node may have chosen them. The caller has checked them before it copied them.
    FUZZ_CHECK(spec.node < spec.node_names.size() && spec.node_names.size() <= kMaxEngineNodes);
    FUZZ_CHECK(std::all_of(spec.node_names.begin(), spec.node_names.end(), IsNodeName));
    thread_local AtThreadEnd at_end;
    at_end.end = [this] {
      const std::lock_guard<std::mutex> lock(mutex_);
      ++ended_;
      changed_.notify_all();
    };
    const std::lock_guard<std::mutex> lock(mutex_);
    newest_failed_ = spec.failed;
    return std::make_unique<HeldEngine>(this);
  };
}

void HeldEngines::Await(std::uint64_t exchanges) {
  std::unique_lock<std::mutex> lock(mutex_);
  changed_.wait(lock, [&] { return ended_ >= exchanges; });
}

void HeldEngines::Add(Held held) {
  const std::lock_guard<std::mutex> lock(mutex_);
  ++submitted_;
  held_.push_back(std::move(held));
}

std::size_t HeldEngines::held() {
  const std::lock_guard<std::mutex> lock(mutex_);
  return held_.size();
}

std::uint64_t HeldEngines::submitted() {
  const std::lock_guard<std::mutex> lock(mutex_);
  return submitted_;
}

void HeldEngines::Finish(std::size_t which, const absl::Status& status) {
  Held held;
  {
    const std::lock_guard<std::mutex> lock(mutex_);
    held = std::move(held_[which]);
    held_.erase(held_.begin() + static_cast<std::ptrdiff_t>(which));
  }
  Carry(held, status);
}

void HeldEngines::FinishAll(const absl::Status& status) {
  while (held() > 0) Finish(0, status);
}

void HeldEngines::Drop(const HeldEngine* engine) {
  std::vector<Held> dropped;
  {
    const std::lock_guard<std::mutex> lock(mutex_);
    const auto of_engine = [engine](const Held& held) { return held.engine != engine; };
    const auto first = std::stable_partition(held_.begin(), held_.end(), of_engine);
    dropped.assign(std::make_move_iterator(first), std::make_move_iterator(held_.end()));
    held_.erase(first, held_.end());
  }
  for (const Held& held : dropped) Carry(held, absl::CancelledError("the engine is destroyed"));
}

void HeldEngines::Carry(const Held& held, const absl::Status& status) {
  if (status.ok() && held.exchange != nullptr) {
    const Exchange& exchange = *held.exchange;
    const std::size_t item = ItemSize(WorkType(exchange.dtype, exchange.op));
    if (exchange.count > 0 && exchange.count <= kMostBytes / item) {
      // Sanitizers see what lies behind a sum of whole lines.
      const std::size_t bytes = (exchange.count * item + kAlignment - 1) / kAlignment * kAlignment;
      const std::unique_ptr<std::byte, Free> sum(
          static_cast<std::byte*>(std::aligned_alloc(kAlignment, bytes)));
      FUZZ_CHECK(sum != nullptr);
      exchange.gather(0, exchange.count, sum.get());
      exchange.scatter(0, exchange.count, sum.get());
    }
  } else if (status.ok() && held.bytes > 0) {
    for (std::byte* const buffer : held.buffers) std::memset(buffer, 'b', held.bytes);
  }
  held.done(status);
}

void HeldEngines::FailNewest(const absl::Status& why) {
  std::function<void(const absl::Status&)> failed;
  {
    const std::lock_guard<std::mutex> lock(mutex_);
    failed = newest_failed_;
  }
  if (failed) failed(why);
}

}  // namespace gradsync::daemon
