#include "daemon/worker/cuda_launch_queue.h"

#include <algorithm>
#include <utility>

#include "daemon/base/clock.h"

namespace gradsync {

CudaLaunchQueue::CudaLaunchQueue(const CudaContext* context, const CudaCombine* combine,
                                 CudaStagingPool* staging)
    : context_(context), driver_(context->driver()), combine_(combine), staging_(staging) {}

CudaLaunchQueue::~CudaLaunchQueue() = default;

void CudaLaunchQueue::Submit(CudaLaunch launch) { waiting_.push_back(std::move(launch)); }

void CudaLaunchQueue::Remove(const CudaSessionMemory* rank) {
  for (CudaLaunch& launch : waiting_) {
    const auto gone = std::remove_if(launch.ranks.begin(), launch.ranks.end(),
                                     [&](const auto& other) { return other.get() == rank; });
    launch.void_contributions += static_cast<std::uint32_t>(launch.ranks.end() - gone);
    launch.ranks.erase(gone, launch.ranks.end());
  }
}

bool CudaLaunchQueue::Touches(const CudaSessionMemory* rank) const {
  return std::any_of(under_way_.begin(), under_way_.end(), [&](const UnderWay& one) {
    return std::any_of(one.launch.ranks.begin(), one.launch.ranks.end(),
                       [&](const auto& other) { return other.get() == rank; });
  });
}

absl::Status CudaLaunchQueue::Advance(std::vector<CudaLaunchResult>* finished) {
  while (!under_way_.empty()) {
    const UnderWay& oldest = under_way_.front();
    const auto over = Finished(oldest);
    if (!over.ok()) return over.status();
    if (!*over) break;
    finished->push_back(ResultOf(oldest));
    oldest.piece->free = true;
    under_way_.pop_front();
  }
  while (!paused_ && !waiting_.empty() && Ready(waiting_.front())) {
    CudaStagingPiece* const piece = staging_->Take();
    if (piece == nullptr) break;
    CudaLaunch& launch = waiting_.front();
    // Once void, void to its end: the last bucket's sum is the verdict.
    ChannelStep& channel = channels_[launch.channel];
    if (channel.step != launch.step) channel = {launch.step, false};
    channel.is_void = channel.is_void || launch.void_contributions > 0;
    if (channel.is_void && launch.void_contributions == 0) launch.void_contributions = 1;
    const std::uint64_t now_ns = MonotonicNowNs();
    if (const absl::Status status = Begin(launch, *piece); !status.ok()) return status;
    under_way_.push_back({std::move(launch), piece, now_ns});
    waiting_.pop_front();
  }
  return absl::OkStatus();
}

bool CudaLaunchQueue::Ready(const CudaLaunch& launch) {
  return std::all_of(launch.ranks.begin(), launch.ranks.end(), [&](const auto& rank) {
    return rank->semaphores->Ready(launch.bucket, launch.step);
  });
}

absl::Status CudaLaunchQueue::Begin(const CudaLaunch& launch, const CudaStagingPiece& piece) {
  std::vector<CUdeviceptr> buffers;
  for (const auto& rank : launch.ranks) buffers.push_back(rank->arena->address() + launch.offset);
  const CudaStaging staging{piece.address, launch.staging_dtype};
  const CUdeviceptr void_flag = piece.report_address + offsetof(CudaBucketReport, void_flag);
  piece.report->void_flag = 0;

  absl::Status status = combine_->Combine(context_->combine_stream(), launch.dtype, buffers,
                                          launch.count, launch.void_contributions, staging);
  if (status.ok()) status = driver_->cuEventRecord(piece.combined, context_->combine_stream());
  CUevent summed = piece.combined;
  if (collective_ != nullptr) {
    CUstream const stream = context_->collective_stream();
    if (status.ok()) status = driver_->cuStreamWaitEvent(stream, piece.combined, 0);
    if (status.ok()) status = collective_->AllReduce(staging, launch.count + 1, stream);
    if (status.ok()) status = driver_->cuEventRecord(piece.collected, stream);
    summed = piece.collected;
  }
  CUstream const stream = context_->write_back_stream();
  if (status.ok()) status = driver_->cuStreamWaitEvent(stream, summed, 0);
  if (status.ok()) {
    status = combine_->WriteBack(
        stream, launch.dtype, staging, launch.count, launch.scale, buffers,
        launch.measure ? piece.report_address + offsetof(CudaBucketReport, numbers) : 0, void_flag);
  }
  for (const auto& rank : launch.ranks) {
    if (status.ok() && launch.last) {
      status = driver_->cuMemcpyAsync(rank->arena->address() + launch.verdict_offset, void_flag,
                                      sizeof(float), stream);
    }
  }
  for (const auto& rank : launch.ranks) {
    if (status.ok()) {
      status = driver_->cuStreamWriteValue64(stream, rank->semaphores->DoneAddress(launch.bucket),
                                             launch.step, CU_STREAM_WRITE_VALUE_DEFAULT);
    }
  }
  if (status.ok()) status = driver_->cuEventRecord(piece.written, stream);
  return status;
}

absl::StatusOr<bool> CudaLaunchQueue::Finished(const UnderWay& oldest) const {
  const CUresult result = driver_->cuEventQuery.Result(oldest.piece->written);
  if (result == CUDA_ERROR_NOT_READY) return false;
  if (result != CUDA_SUCCESS) return driver_->StatusOf(result, "cuEventQuery");
  return true;
}

CudaLaunchResult CudaLaunchQueue::ResultOf(const UnderWay& oldest) const {
  CudaLaunchResult result;
  result.id = oldest.launch.id;
  result.ready_ns = oldest.ready_ns;
  result.finish_ns = MonotonicNowNs();
  result.void_step = oldest.piece->report->void_flag != 0;
  if (oldest.launch.measure) {
    const std::uint32_t blocks = combine_->Blocks(oldest.launch.dtype, oldest.launch.count);
    for (std::uint32_t block = 0; block < blocks; ++block) {
      result.numbers.sum_of_squares += oldest.piece->report->numbers[block].sum_of_squares;
      result.numbers.non_finite += oldest.piece->report->numbers[block].non_finite;
    }
  }
  return result;
}

}  // namespace gradsync
