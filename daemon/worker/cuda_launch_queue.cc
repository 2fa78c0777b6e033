#include "daemon/worker/cuda_launch_queue.h"

#include <algorithm>
#include <utility>

#include "absl/strings/str_cat.h"
#include "daemon/base/clock.h"
#include "daemon/base/error.h"
#include "daemon/reduce/gpu_staging.h"

namespace gradsync::daemon {
namespace {

std::vector<CUdeviceptr> BuffersOf(const CudaLaunch& launch) {
  std::vector<CUdeviceptr> buffers;
  for (const auto& rank : launch.ranks) buffers.push_back(rank->arena->address() + launch.offset);
  return buffers;
}

}  // namespace

CudaLaunchQueue::CudaLaunchQueue(const CudaContext* context, const CudaCombine* combine,
                                 CudaStagingPool* staging, std::uint64_t limit_ns)
    : context_(context),
      driver_(context->driver()),
      combine_(combine),
      staging_(staging),
      limit_ns_(limit_ns) {}

CudaLaunchQueue::~CudaLaunchQueue() = default;

void CudaLaunchQueue::SetCommunicator(NcclCommunicator* communicator) {
  communicator_ = communicator;
  staging_->Restart();
}

void CudaLaunchQueue::Submit(CudaLaunch launch) { waiting_.push_back(std::move(launch)); }

void CudaLaunchQueue::Remove(const CudaSessionMemory* rank) {
  for (CudaLaunch& launch : waiting_) {
    const auto removed = std::remove_if(launch.ranks.begin(), launch.ranks.end(),
                                        [&](const auto& other) { return other.get() == rank; });
    launch.void_contributions += static_cast<std::uint32_t>(launch.ranks.end() - removed);
    launch.ranks.erase(removed, launch.ranks.end());
  }
}

void CudaLaunchQueue::GiveUp(std::uint64_t layout, std::uint64_t step) {
  for (CudaLaunch& launch : waiting_) {
    if (launch.layout != layout || launch.step != step) continue;
    launch.void_contributions += static_cast<std::uint32_t>(launch.ranks.size());
    launch.ranks.clear();
    launch.given_up = true;
  }
  // The step has no more buckets, so this is the last chance to forget it.
  const auto begun = layouts_.find(layout);
  if (begun != layouts_.end() && begun->second.step == step) layouts_.erase(begun);
}

bool CudaLaunchQueue::HasRank(const CudaLaunch& launch, const CudaSessionMemory* rank) {
  return std::any_of(launch.ranks.begin(), launch.ranks.end(),
                     [&](const auto& other) { return other.get() == rank; });
}

bool CudaLaunchQueue::Touches(const CudaSessionMemory* rank) const {
  const auto touches = [rank](const UnderWay& one) { return HasRank(one.launch, rank); };
  return std::any_of(combined_.begin(), combined_.end(), touches) ||
         std::any_of(under_way_.begin(), under_way_.end(), touches);
}

bool CudaLaunchQueue::NeedsNoStaging(const CudaLaunch& launch) const {
  return communicator_ == nullptr &&
         CudaCombine::CanAverage(launch.dtype, launch.staging_dtype, launch.ranks.size());
}

std::size_t CudaLaunchQueue::next_staging_bytes() const {
  if (waiting_.empty() || NeedsNoStaging(waiting_.front())) return 0;
  return StagingBytes(waiting_.front().staging_dtype, waiting_.front().count);
}

absl::Status CudaLaunchQueue::Advance(std::vector<CudaLaunchResult>* finished) {
  absl::Status status = FinishOldest(finished);
  if (status.ok()) status = AdvanceSums();
  while (status.ok() && !paused_ && !waiting_.empty() &&
         AllReady(waiting_.front().ranks, waiting_.front().bucket, waiting_.front().step) &&
         staging_->CanTake(next_staging_bytes())) {
    status = BeginNext();
  }
  return status.ok() ? CheckDeadline() : status;
}

absl::Status CudaLaunchQueue::FinishOldest(std::vector<CudaLaunchResult>* finished) {
  while (!under_way_.empty()) {
    const UnderWay& oldest = under_way_.front();
    const CUresult result = driver_->cuEventQuery.Result(oldest.piece->written);
    if (result == CUDA_ERROR_NOT_READY) break;
    if (result != CUDA_SUCCESS) return driver_->StatusOf(result, "cuEventQuery");
    ++advances_;
    finished->push_back(ResultOf(oldest));
    oldest.piece->free = true;
    under_way_.pop_front();
  }
  return absl::OkStatus();
}

absl::Status CudaLaunchQueue::AdvanceSums() {
  if (communicator_ == nullptr || at_rest()) return absl::OkStatus();
  // Also returns errors between the GPUs.
  auto settled = communicator_->Settled();
  while (settled.ok() && *settled && !combined_.empty()) {
    absl::Status status;
    if (!summing_) {
      status = AllReduce(combined_.front());
    } else {
      status = WriteBack(combined_.front());
      under_way_.push_back(std::move(combined_.front()));
      combined_.pop_front();
    }
    if (!status.ok()) return status;
    summing_ = !summing_;
    ++advances_;
    settled = communicator_->Settled();
  }
  return settled.status();
}

absl::Status CudaLaunchQueue::BeginNext() {
  const bool in_place = NeedsNoStaging(waiting_.front());
  CudaStagingPiece* const piece = staging_->Take(next_staging_bytes());
  UnderWay next{std::move(waiting_.front()), piece, MonotonicNowNs()};
  waiting_.pop_front();
  ++advances_;
  if (!next.launch.given_up) NoteBegun(&next);

  absl::Status status = in_place ? Average(next) : Combine(next);
  if (!status.ok()) return status;
  if (communicator_ != nullptr) {
    combined_.push_back(std::move(next));
    return AdvanceSums();
  }
  if (!in_place) status = WriteBack(next);
  under_way_.push_back(std::move(next));
  return status;
}

void CudaLaunchQueue::NoteBegun(UnderWay* one) {
  CudaLaunch& launch = one->launch;
  // Once void, the step stays void to its last bucket, whose sum is the verdict.
  LayoutStep& layout = layouts_[launch.layout];
  if (layout.step != launch.step) layout = {launch.step, 0, false};
  layout.is_void = layout.is_void || launch.void_contributions > 0;
  if (layout.is_void && launch.void_contributions == 0) launch.void_contributions = 1;
  one->last = ++layout.begun == launch.step_buckets;
  if (one->last) layouts_.erase(launch.layout);
}

absl::Status CudaLaunchQueue::Combine(const UnderWay& one) {
  const CudaLaunch& launch = one.launch;
  CUstream stream = context_->combine_stream();
  const absl::Status status =
      combine_->Combine(stream, launch.dtype, BuffersOf(launch), launch.count,
                        launch.void_contributions, {one.piece->address, launch.staging_dtype});
  return status.ok() ? driver_->cuEventRecord(one.piece->combined, stream) : status;
}

absl::Status CudaLaunchQueue::AllReduce(const UnderWay& one) {
  CUstream stream = context_->collective_stream();
  const absl::Status status = driver_->cuStreamWaitEvent(stream, one.piece->combined, 0);
  if (!status.ok()) return status;
  return communicator_->AllReduce(one.piece->address, one.launch.staging_dtype,
                                  one.launch.count + 1, stream);
}

absl::Status CudaLaunchQueue::Average(const UnderWay& one) {
  const CudaLaunch& launch = one.launch;
  const std::vector<CUdeviceptr> buffers = BuffersOf(launch);
  const absl::Status status =
      combine_->Average(context_->write_back_stream(), launch.dtype, launch.count, launch.scale,
                        launch.void_contributions, OutputOf(one, buffers));
  return status.ok() ? Announce(one) : status;
}

absl::Status CudaLaunchQueue::WriteBack(const UnderWay& one) {
  const CudaLaunch& launch = one.launch;
  const CudaStagingPiece& piece = *one.piece;
  CUevent summed = piece.combined;
  absl::Status status;
  if (communicator_ != nullptr) {
    summed = piece.collected;
    status = driver_->cuEventRecord(summed, context_->collective_stream());
  }
  CUstream stream = context_->write_back_stream();
  if (status.ok()) status = driver_->cuStreamWaitEvent(stream, summed, 0);
  const std::vector<CUdeviceptr> buffers = BuffersOf(launch);
  if (status.ok()) {
    status = combine_->WriteBack(stream, launch.dtype, {piece.address, launch.staging_dtype},
                                 launch.count, launch.scale, OutputOf(one, buffers));
  }
  return status.ok() ? Announce(one) : status;
}

CudaOutput CudaLaunchQueue::OutputOf(const UnderWay& one, const std::vector<CUdeviceptr>& buffers) {
  const CUdeviceptr report = one.piece->report_address;
  CudaOutput output;
  output.destinations = buffers;
  if (one.last) {
    output.verdict_distance = static_cast<std::int64_t>(one.launch.verdict_offset) -
                              static_cast<std::int64_t>(one.launch.offset);
  }
  if (one.launch.measure) output.stats = report + offsetof(CudaBucketReport, stats);
  output.void_flag = report + offsetof(CudaBucketReport, void_flag);
  return output;
}

absl::Status CudaLaunchQueue::Announce(const UnderWay& one) {
  CUstream stream = context_->write_back_stream();
  for (const auto& rank : one.launch.ranks) {
    const absl::Status status =
        driver_->cuStreamWriteValue64(stream, rank->semaphores->DoneAddress(one.launch.bucket),
                                      one.launch.step, CU_STREAM_WRITE_VALUE_DEFAULT);
    if (!status.ok()) return status;
  }
  return driver_->cuEventRecord(one.piece->written, stream);
}

absl::Status CudaLaunchQueue::CheckDeadline() const {
  if (at_rest()) return absl::OkStatus();
  const UnderWay& oldest = under_way_.empty() ? combined_.front() : under_way_.front();
  const std::uint64_t since_ns = MonotonicNowNs() - oldest.ready_ns;
  if (since_ns < limit_ns_) return absl::OkStatus();
  return MakeError(
      absl::StatusCode::kDeadlineExceeded, reason::kGpuTimeout,
      absl::StrCat("bucket ", oldest.launch.bucket, " of step ", oldest.launch.step,
                   " has been on the GPU for ", since_ns / 1'000'000'000, " s: ",
                   communicator_ != nullptr
                       ? "another GPU of the job has not joined its all-reduce, or hangs"
                       : "the GPU hangs"),
      {{field::kStep, oldest.launch.step}, {field::kBucket, oldest.launch.bucket}});
}

CudaLaunchResult CudaLaunchQueue::ResultOf(const UnderWay& oldest) const {
  CudaLaunchResult result;
  result.id = oldest.launch.id;
  result.ready_ns = oldest.ready_ns;
  result.finish_ns = MonotonicNowNs();
  result.void_step = oldest.piece->report->void_flag != 0;
  if (oldest.launch.measure) {
    const std::uint32_t blocks =
        combine_->Blocks(oldest.launch.dtype, oldest.launch.staging_dtype, oldest.launch.count);
    for (std::uint32_t block = 0; block < blocks; ++block) {
      result.stats.sum_of_squares += oldest.piece->report->stats[block].sum_of_squares;
      result.stats.non_finite += oldest.piece->report->stats[block].non_finite;
    }
  }
  return result;
}

}  // namespace gradsync::daemon
