#include "daemon/job/bucket_reductions.h"

#include <atomic>
#include <limits>
#include <random>
#include <utility>

namespace gradsync::daemon {
namespace {

// A number that is unique among all layouts of this daemon, whatever their jobs. Workers of other
// nodes may outlive this daemon process and see the numbers of the next one, so each process begins
// at a random number.
std::uint64_t NextLayout() {
  static std::atomic<std::uint64_t> last{std::uint64_t{std::random_device{}()} << 30};
  return ++last;
}

constexpr GradientStats kNotMeasured{std::numeric_limits<double>::quiet_NaN(), 0};

}  // namespace

BucketReductions::BucketReductions(const LayoutPlan& plan, const LayoutAgreement& agreement,
                                   const JobTerms& terms, const Membership& members,
                                   LayoutChannel* layout, OnReduced reduced)
    : plan_(plan),
      agreement_(agreement),
      terms_(terms),
      members_(members),
      layout_(layout),
      reduced_(std::move(reduced)) {
  const std::uint64_t number = NextLayout();
  for (std::size_t i = 0; i < plan_.buckets.size(); ++i) {
    auto bucket = std::make_unique<Bucket>();
    ReduceOperation& operation = bucket->operation;
    operation.dtype = plan_.buckets[i].dtype;
    operation.count = plan_.buckets[i].count;
    const ReduceOp op = OpOf(i);
    operation.op = op == ReduceOp::kAverage ? ReduceOp::kSum : op;
    operation.user = terms_.user;
    operation.flow = terms_.flow;
    operation.measure = !IsOrderFree(op, operation.dtype);
    operation.channel = agreement_.channel();
    operation.bucket = static_cast<std::uint32_t>(i);
    if (on_gpu()) {
      auto& device = operation.work.emplace<DeviceReduction>();
      device.layout = number;
      device.offset = plan_.buckets[i].offset;
      device.nccl = terms_.options.nccl;
      device.step_buckets = static_cast<std::uint32_t>(plan_.buckets.size());
    }
    operation.done = [this, raw = bucket.get(), i](const ReduceTimes& times) {
      // Signals before taking the lock, because trainers wait for this.
      if (raw->operation.failure.ok()) {
        for (SemaphorePage* semaphores : raw->semaphores) {
          // The GPU has already written the words.
          if (on_gpu()) {
            semaphores->WakeDone(i);
          } else {
            semaphores->SignalDone(i, raw->operation.number);
          }
        }
      }
      reduced_(layout_, i, times, raw->operation.failure);
    };
    buckets_.push_back(std::move(bucket));
  }
}

void BucketReductions::Rebind() {
  for (const auto& bucket : buckets_) bucket->bound = false;
}

void BucketReductions::Bind(std::size_t index, const RunningStep& step) {
  const std::uint32_t divisor =
      terms_.options.divide_by_world ? members_.world_size() : members_.StepRanks();
  Bucket& bucket = *buckets_[index];
  bucket.operation.scale = OpOf(index) == ReduceOp::kAverage ? 1.0 / divisor : 1.0;
  bucket.operation.ranks.clear();
  bucket.semaphores.clear();
  if (on_gpu()) bucket.operation.device().arenas.clear();
  HostBuffers buffers;
  for (std::uint32_t rank = 0; rank < members_.world_size(); ++rank) {
    if (!members_.IsAwaited(rank)) continue;
    const RankMemory& memory = *agreement_.memory({rank, step.ReadySession(index, rank)});
    bucket.operation.ranks.push_back(rank);
    if (memory.semaphores != nullptr) bucket.semaphores.push_back(memory.semaphores.get());
    if (on_gpu()) {
      bucket.operation.device().arenas.push_back(memory.gpu.get());
    } else {
      buffers.push_back(memory.data == nullptr ? nullptr
                                               : memory.data + plan_.buckets[index].offset);
    }
  }
  if (!on_gpu()) bucket.operation.SetBuffers(buffers);
  bucket.bound = true;
}

ReduceOperation* BucketReductions::Prepare(std::size_t bucket, const RunningStep& step) {
  if (!buckets_[bucket]->bound) Bind(bucket, step);
  ReduceOperation& operation = buckets_[bucket]->operation;
  operation.number = step.number();
  operation.failure = absl::OkStatus();
  if (on_gpu()) {
    operation.device().is_void = false;
    operation.device().verdict_offset = plan_.VerdictOffset(step.number());
  }
  return &operation;
}

std::vector<GradientStats> BucketReductions::Stats() const {
  std::vector<GradientStats> stats;
  stats.reserve(buckets_.size());
  for (std::size_t i = 0; i < buckets_.size(); ++i) {
    const ReduceOperation& operation = buckets_[i]->operation;
    const GradientStats unmeasured = HasBuffers(i) ? GradientStats{} : kNotMeasured;
    stats.push_back(operation.measure ? operation.stats : unmeasured);
  }
  return stats;
}

std::optional<GivenUpStep> BucketReductions::GiveUp(std::uint64_t step) {
  if (given_up_ == step) return std::nullopt;
  given_up_ = step;
  GivenUpStep given_up{buckets_.front()->operation.device().layout, step, {}};
  for (std::uint32_t rank = 0; rank < members_.world_size(); ++rank) {
    const RankMemory* const memory = agreement_.memory(rank);
    if (memory != nullptr) given_up.arenas.push_back(memory->gpu);
  }
  return given_up;
}

}  // namespace gradsync::daemon
