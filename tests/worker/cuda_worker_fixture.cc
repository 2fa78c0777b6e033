#include "tests/worker/cuda_worker_fixture.h"

#include <fcntl.h>
#include <sys/mman.h>
#include <sys/syscall.h>
#include <unistd.h>

#include <cstddef>
#include <cstring>
#include <utility>

#include "proto/gradsync/data_type.h"

namespace gradsync::daemon {
namespace {

std::size_t RoundUp(std::size_t bytes, std::size_t unit) {
  return (bytes + unit - 1) / unit * unit;
}

fakes::Mapped Import(UniqueFd memory, std::size_t bytes, int gpu) {
  CUmemGenericAllocationHandle handle = 0;
  CUDA_OK(cuMemImportFromShareableHandle(
      &handle, reinterpret_cast<void*>(static_cast<std::uintptr_t>(memory.get())),
      CU_MEM_HANDLE_TYPE_POSIX_FILE_DESCRIPTOR));
  return fakes::MapHandle(handle, bytes, gpu);
}

}  // namespace

absl::StatusOr<worker::Reply> PendingReply::Get() {
  if (!event_.Wait().has_value()) return absl::DeadlineExceededError("no reply");
  if (!reply_.ok()) return reply_.status();
  return reply_->message;
}

FakeTrainer::FakeTrainer(int gpu, std::uint64_t arena, std::shared_ptr<SemaphorePage> page,
                         UniqueFd memory, std::size_t bytes)
    : context_(fakes::EnterContext(gpu)),
      arena_(arena),
      page_(std::move(page)),
      mapped_(Import(std::move(memory), bytes, gpu)),
      stream_(fakes::MakeStream()) {
  words_ = static_cast<std::byte*>(
      mmap(nullptr, page_->bytes(), PROT_READ | PROT_WRITE, MAP_SHARED, page_->fd(), 0));
  CUDA_OK(cuMemHostRegister(words_, page_->bytes(), CU_MEMHOSTREGISTER_DEVICEMAP));
  CUDA_OK(cuMemHostGetDevicePointer(&words_address_, words_, 0));
}

BucketSemaphore* FakeTrainer::Semaphore(std::size_t bucket) const {
  return reinterpret_cast<BucketSemaphore*>(words_ + sizeof(SemaphorePageHeader)) + bucket;
}

CUdeviceptr FakeTrainer::SemaphoreAddress(std::size_t bucket, std::size_t member) const {
  return words_address_ + sizeof(SemaphorePageHeader) + bucket * sizeof(BucketSemaphore) + member;
}

void FakeTrainer::MarkReady(std::size_t bucket, std::uint64_t step, std::size_t offset,
                            const std::vector<float>& gradients) {
  std::vector<std::uint8_t> bytes(gradients.size() * sizeof(float));
  std::memcpy(bytes.data(), gradients.data(), bytes.size());
  WriteBytes(offset, bytes);
  WriteReady(bucket, step);
}

void FakeTrainer::WriteBytes(std::size_t offset, const std::vector<std::uint8_t>& bytes) {
  Enter();
  sources_.push_back(bytes);
  CUDA_OK(
      cuMemcpyHtoDAsync(mapped_.address + offset, sources_.back().data(), bytes.size(), stream_));
}

void FakeTrainer::WriteReady(std::size_t bucket, std::uint64_t step) {
  Enter();
  CUDA_OK(cuStreamWriteValue64(stream_, SemaphoreAddress(bucket, offsetof(BucketSemaphore, ready)),
                               step, CU_STREAM_WRITE_VALUE_DEFAULT));
}

void FakeTrainer::WaitDone(std::size_t bucket, std::uint64_t step) {
  Enter();
  CUDA_OK(cuStreamWaitValue64(stream_, SemaphoreAddress(bucket, offsetof(BucketSemaphore, done)),
                              step, CU_STREAM_WAIT_VALUE_GEQ));
}

bool FakeTrainer::Released() {
  Enter();
  const auto end = std::chrono::steady_clock::now() + kPatience;
  CUresult result;
  do {
    result = cuStreamQuery(stream_);
    sched_yield();
  } while (result == CUDA_ERROR_NOT_READY && std::chrono::steady_clock::now() < end);
  return result == CUDA_SUCCESS;
}

std::vector<std::uint8_t> FakeTrainer::Bytes(std::size_t offset, std::size_t count) {
  Enter();
  std::vector<std::uint8_t> bytes(count);
  CUDA_OK(cuMemcpyDtoHAsync(bytes.data(), mapped_.address + offset, count, stream_));
  CUDA_OK(cuStreamSynchronize(stream_));
  return bytes;
}

std::vector<float> FakeTrainer::Floats(std::size_t offset, std::size_t count) {
  const std::vector<std::uint8_t> bytes = Bytes(offset, count * sizeof(float));
  std::vector<float> values(count);
  std::memcpy(values.data(), bytes.data(), bytes.size());
  return values;
}

void FakeTrainer::Poison(std::size_t bucket, std::uint64_t step) {
  Semaphore(bucket)->done.store(kPoison + step);
}

void FakeTrainer::Unmap() {
  Enter();
  CUDA_OK(cuStreamSynchronize(stream_));
  fakes::Unmap(mapped_);
  CUDA_OK(cuMemRelease(mapped_.handle));
}

CudaWorkerFixture::CudaWorkerFixture(WorkerProcessOptions options, int gpu) : gpu_(gpu) {
  fakes::EnterContext(gpu);
  options.program = "daemon/gradsyncd";
  auto process =
      WorkerProcess::Start(options, [this](const absl::Status& why) { ended_.Set(why); });
  EXPECT_TRUE(process.ok()) << process.status();
  process_ = *std::move(process);
}

std::unique_ptr<PendingReply> CudaWorkerFixture::Send(worker::Call call,
                                                      std::vector<UniqueFd> descriptors) {
  auto pending = std::make_unique<PendingReply>();
  process_->Call(std::move(call), std::move(descriptors), [&pending = *pending](auto reply) {
    pending.reply_ = std::move(reply);
    pending.event_.Set();
  });
  return pending;
}

absl::StatusOr<worker::Reply> CudaWorkerFixture::Start(const std::string& device) {
  worker::Call call;
  call.mutable_start()->set_cuda_library(kFakeCuda);
  call.mutable_start()->set_nccl_library(kFakeNccl);
  call.mutable_start()->set_device(device);
  call.mutable_start()->set_operation_limit_ns(kOperationLimitNs);
  call.mutable_start()->set_user(geteuid());
  return Call(std::move(call));
}

void CudaWorkerFixture::Open() {
  const auto started = Start(fakes::GpuUuid(gpu_));
  ASSERT_TRUE(started.ok()) << started.status();
}

std::unique_ptr<FakeTrainer> CudaWorkerFixture::AddTrainer(std::size_t bytes, std::size_t buckets,
                                                           absl::Status* refused) {
  auto page = SemaphorePage::Create(buckets);
  EXPECT_TRUE(page.ok());
  const std::uint64_t arena = ++last_arena_;
  worker::Call call;
  call.mutable_add_arena()->set_arena(arena);
  call.mutable_add_arena()->set_bytes(RoundUp(bytes, alignof(float)) + sizeof(float));
  call.mutable_add_arena()->set_buckets(static_cast<std::uint32_t>(buckets));
  call.mutable_add_arena()->set_staging_bytes(staging_bytes_);
  std::vector<UniqueFd> descriptors;
  descriptors.emplace_back(fcntl((*page)->fd(), F_DUPFD_CLOEXEC, 0));
  if (trainer_process_ != 0) {
    descriptors.emplace_back(static_cast<int>(syscall(SYS_pidfd_open, trainer_process_, 0)));
  }
  auto pending = Send(std::move(call), std::move(descriptors));
  const auto added = pending->Get();
  if (refused != nullptr) *refused = added.status();
  if (!added.ok()) {
    EXPECT_NE(refused, nullptr) << added.status();
    return nullptr;
  }
  last_arena_added_ = *added;
  if (pending->reply_->descriptors.empty()) return nullptr;  // legacy IPC
  return std::make_unique<FakeTrainer>(
      gpu_, arena, *page, std::move(pending->reply_->descriptors[0]), added->arena_added().bytes());
}

worker::Launch CudaWorkerFixture::LaunchOf(const std::vector<FakeTrainer*>& trainers,
                                           std::uint64_t step, std::size_t count) {
  worker::Launch launch;
  launch.set_layout(1);
  launch.set_step(step);
  launch.set_data_type(static_cast<std::uint32_t>(DataType::kFloat32));
  launch.set_staging_data_type(static_cast<std::uint32_t>(DataType::kFloat32));
  launch.set_count(count);
  launch.set_scale(1.0 / static_cast<double>(trainers.size()));
  for (const FakeTrainer* trainer : trainers) launch.add_arenas(trainer->arena());
  launch.set_measure(true);
  launch.set_step_buckets(1);
  launch.set_verdict_offset(count * sizeof(float));
  return launch;
}

std::unique_ptr<PendingReply> CudaWorkerFixture::Launch(const worker::Launch& launch) {
  worker::Call call;
  *call.mutable_launch() = launch;
  return Send(std::move(call));
}

std::unique_ptr<PendingReply> CudaWorkerFixture::AwaitReady(
    const std::vector<FakeTrainer*>& trainers, std::uint64_t step, std::uint32_t bucket) {
  worker::Call call;
  worker::AwaitReady* const await = call.mutable_await_ready();
  await->set_layout(1);
  await->set_step(step);
  await->set_bucket(bucket);
  for (const FakeTrainer* trainer : trainers) await->add_arenas(trainer->arena());
  return Send(std::move(call));
}

std::unique_ptr<PendingReply> CudaWorkerFixture::Remove(std::uint64_t arena) {
  worker::Call call;
  call.mutable_remove_arena()->set_arena(arena);
  return Send(std::move(call));
}

void CudaWorkerFixture::Ping() {
  worker::Call call;
  call.mutable_ping();
  EXPECT_TRUE(Call(std::move(call)).ok());
}

worker::Pong CudaWorkerFixture::Memory() {
  worker::Call call;
  call.mutable_ping()->set_memory(true);
  const auto reply = Call(std::move(call));
  EXPECT_TRUE(reply.ok()) << reply.status();
  return reply.ok() ? reply->pong() : worker::Pong();
}

std::string CudaWorkerFixture::NewNcclId() {
  worker::Call call;
  call.mutable_new_nccl_id();
  const auto reply = Call(std::move(call));
  EXPECT_TRUE(reply.ok()) << reply.status();
  return reply.ok() ? reply->nccl_id().unique_id() : "";
}

std::unique_ptr<PendingReply> CudaWorkerFixture::Connect(const std::string& id, std::uint32_t rank,
                                                         std::uint32_t ranks,
                                                         std::chrono::nanoseconds limit) {
  worker::Call call;
  call.mutable_connect()->set_unique_id(id);
  call.mutable_connect()->set_rank(rank);
  call.mutable_connect()->set_ranks(ranks);
  call.mutable_connect()->set_limit_ns(static_cast<std::uint64_t>(limit.count()));
  return Send(std::move(call));
}

absl::Status CudaWorkerFixture::Disconnect() {
  worker::Call call;
  call.mutable_disconnect();
  return Call(std::move(call)).status();
}

}  // namespace gradsync::daemon
