// A worker on a fake GPU, in a process of its own, and the trainers whose buckets it averages. The
// test is daemon and trainers at once: it gives the calls, and has the arenas mapped through the
// same fake.

#ifndef TESTS_WORKER_CUDA_WORKER_FIXTURE_H_
#define TESTS_WORKER_CUDA_WORKER_FIXTURE_H_

#include <cuda.h>
#include <sys/types.h>

#include <cstddef>
#include <cstdint>
#include <memory>
#include <string>
#include <vector>

#include "absl/status/status.h"
#include "absl/status/statusor.h"
#include "daemon/arena/semaphore_page.h"
#include "daemon/worker/worker.pb.h"
#include "daemon/worker/worker_process.h"
#include "proto/gradsync/shared_memory.h"
#include "tests/engine/event.h"
#include "tests/fakes/cuda_process.h"
#include "tests/fakes/isolated_test.h"

namespace gradsync {

inline constexpr char kFakeCuda[] = "tests/fakes/cuda/libcuda.so.1";
inline constexpr char kFakeNccl[] = "tests/fakes/nccl/libnccl.so.2";

// A reply to come.
class PendingReply {
 public:
  // What has come within the test's patience.
  absl::StatusOr<worker::Reply> Get();
  bool ComesWithin(std::chrono::milliseconds patience) { return event_.Wait(patience).has_value(); }

 private:
  friend class CudaWorkerFixture;
  Event event_;
  absl::StatusOr<WorkerProcess::Reply> reply_ = absl::UnknownError("none");
};

// One rank's memory of one layout, with its own stream.
class FakeTrainer {
 public:
  FakeTrainer(int gpu, std::uint64_t arena, std::shared_ptr<SemaphorePage> page, UniqueFd memory,
              std::size_t bytes);

  std::uint64_t arena() const { return arena_; }
  CUdeviceptr address() const { return mapped_.address; }

  // Enqueued on the stream: gradients, then the ready word. Returns at once.
  void MarkReady(std::size_t bucket, std::uint64_t step, std::size_t offset,
                 const std::vector<float>& gradients);
  void WriteBytes(std::size_t offset, const std::vector<std::uint8_t>& bytes);
  void WriteReady(std::size_t bucket, std::uint64_t step);
  // Enqueued on the stream: nothing after it runs before the bucket is done.
  void WaitDone(std::size_t bucket, std::uint64_t step);
  // On the host; false when the test's patience is over.
  bool Released();
  std::vector<float> Floats(std::size_t offset, std::size_t count);
  std::vector<std::uint8_t> Bytes(std::size_t offset, std::size_t count);
  // As a client releases its streams when its daemon is gone.
  void Poison(std::size_t bucket, std::uint64_t step);
  void Unmap();

 private:
  BucketSemaphore* Semaphore(std::size_t bucket) const;
  CUdeviceptr SemaphoreAddress(std::size_t bucket, std::size_t member) const;

  // Makes its GPU's context current in this thread.
  void Enter() const { CUDA_OK(cuCtxSetCurrent(context_)); }

  CUcontext context_;
  const std::uint64_t arena_;
  const std::shared_ptr<SemaphorePage> page_;
  fakes::Mapped mapped_;
  std::byte* words_ = nullptr;
  CUdeviceptr words_address_ = 0;
  CUstream stream_ = nullptr;
  std::vector<std::vector<std::uint8_t>> sources_;  // of copies under way
};

class CudaWorkerFixture {
 public:
  explicit CudaWorkerFixture(WorkerProcessOptions options = {}, int gpu = 0);

  WorkerProcess& process() { return *process_; }
  fakes::FakeMachine& machine() { return machine_; }
  void Stop() { process_.reset(); }
  // How it ended by itself.
  absl::Status Ended() { return ended_.Wait().value_or(absl::UnknownError("it lives")); }

  std::unique_ptr<PendingReply> Send(worker::Call call, std::vector<UniqueFd> descriptors = {});
  absl::StatusOr<worker::Reply> Call(worker::Call call) { return Send(std::move(call))->Get(); }

  // Opens its GPU; fails the test if it cannot be.
  void Open();
  absl::StatusOr<worker::Reply> Start(const std::string& device);

  // An arena with room for `bytes` of buckets and, behind them, the verdict; null and `refused` set
  // if the worker refuses.
  std::unique_ptr<FakeTrainer> AddTrainer(std::size_t bytes, std::size_t buckets,
                                          absl::Status* refused = nullptr);
  // Of the arenas that are added from now on.
  void set_staging_bytes(std::size_t bytes) { staging_bytes_ = bytes; }
  // Whose arenas those are; without it the worker is not told.
  void set_trainer_process(pid_t pid) { trainer_process_ = pid; }
  std::uint64_t last_arena() const { return last_arena_; }
  worker::Reply& last_arena_added() { return last_arena_added_; }

  // A bucket that takes longer hangs.
  static constexpr std::uint64_t kOperationLimitNs = 3'000'000'000;
  static constexpr std::size_t kStagingBytes = std::size_t{4} << 20;

  // Of float32, averaged over the trainers, the only bucket of its step.
  static worker::Launch LaunchOf(const std::vector<FakeTrainer*>& trainers, std::uint64_t step,
                                 std::size_t count);
  std::unique_ptr<PendingReply> Launch(const worker::Launch& launch);
  std::unique_ptr<PendingReply> AwaitReady(const std::vector<FakeTrainer*>& trainers,
                                           std::uint64_t step, std::uint32_t bucket);
  std::unique_ptr<PendingReply> Remove(const FakeTrainer& trainer) {
    return Remove(trainer.arena());
  }
  std::unique_ptr<PendingReply> Remove(std::uint64_t arena);
  // Has been through its loop once more since.
  void Ping();
  worker::Pong Memory();

  // Of the communicator that it will be rank 0 of.
  std::string NewNcclId();
  std::unique_ptr<PendingReply> Connect(const std::string& id, std::uint32_t rank,
                                        std::uint32_t ranks,
                                        std::chrono::nanoseconds limit = kPatience);
  absl::Status Disconnect();

 private:
  fakes::FakeMachine machine_;
  const int gpu_;
  Event ended_;
  std::size_t staging_bytes_ = kStagingBytes;
  pid_t trainer_process_ = 0;
  std::uint64_t last_arena_ = 0;
  worker::Reply last_arena_added_;
  std::unique_ptr<WorkerProcess> process_;
};

}  // namespace gradsync

#endif  // TESTS_WORKER_CUDA_WORKER_FIXTURE_H_
