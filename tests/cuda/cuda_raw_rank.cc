#include "tests/cuda/cuda_raw_rank.h"

namespace gradsync {

using fault::RawSession;
using fault::RawStatus;

bool CudaRawRank::Open(std::uint32_t rank, std::uint32_t world_size,
                       std::uint64_t step_timeout_ms) {
  v1::SessionRequest request = RawSession::OpenRequest(rank, world_size, "job");
  if (step_timeout_ms > 0) {
    request.mutable_open_session()->mutable_options()->set_step_timeout_ms(step_timeout_ms);
  }
  return session_.Send(request) && session_.Await(v1::SessionResponse::kSessionOpened).has_value();
}

bool CudaRawRank::RequestLayout(const std::string& device, std::size_t buckets,
                                std::uint64_t count) {
  v1::SessionRequest request = RawSession::LayoutRequest(buckets, count);
  request.mutable_register_layout()->set_device(device);
  return session_.Send(request);
}

bool CudaRawRank::AwaitAssignment() {
  const auto response = session_.Await(v1::SessionResponse::kLayoutAssigned);
  if (!response.has_value()) return false;
  assigned_ = response->layout_assigned();
  return true;
}

bool CudaRawRank::ClaimMemory() {
  // There is no memory to populate: the CPU cannot access a GPU's memory.
  arena_ = session_.Map(assigned_, side_socket_, /*populate=*/false);
  return arena_ != nullptr;
}

bool CudaRawRank::AwaitLayoutReady() {
  return session_.Await(v1::SessionResponse::kLayoutReady).has_value();
}

bool CudaRawRank::Join(std::uint32_t rank, std::uint32_t world_size, const std::string& device,
                       std::size_t buckets, std::uint64_t count, std::uint64_t step_timeout_ms) {
  return Open(rank, world_size, step_timeout_ms) && RequestLayout(device, buckets, count) &&
         AwaitAssignment() && ClaimMemory() && SayMapped() && AwaitLayoutReady();
}

std::optional<RawStatus> CudaRawRank::AwaitRefusal() {
  const auto response = session_.Await(v1::SessionResponse::kOperationFailed);
  if (!response.has_value()) return std::nullopt;
  return fault::RawStatusOf(response->operation_failed().status());
}

std::optional<RawStatus> CudaRawRank::AwaitStep() {
  const auto response = session_.Await(v1::SessionResponse::kStepDone);
  if (!response.has_value()) return std::nullopt;
  return fault::RawStatusOf(response->step_done().status());
}

SemaphorePageHeader& CudaRawRank::header() {
  return *reinterpret_cast<SemaphorePageHeader*>(session_.semaphores()->data());
}

BucketSemaphore& CudaRawRank::semaphore(std::size_t bucket) {
  return reinterpret_cast<BucketSemaphore*>(session_.semaphores()->data() +
                                            sizeof(SemaphorePageHeader))[bucket];
}

}  // namespace gradsync
