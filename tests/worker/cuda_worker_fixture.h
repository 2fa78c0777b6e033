// A worker on a fake GPU, in a process of its own, and the trainers whose buckets it averages. The
// test plays both the daemon, which calls the worker, and the trainers, which map the arenas.

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

namespace gradsync::daemon {

inline constexpr char kFakeCuda[] = "tests/fakes/cuda/libcuda.so.1";
inline constexpr char kFakeNccl[] = "tests/fakes/nccl/libnccl.so.2";

// The future reply to a call.
class PendingReply {
 public:
  // The reply, or an error after the test's patience.
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

  // Enqueues the gradients and then the ready word. Returns at once.
  void MarkReady(std::size_t bucket, std::uint64_t step, std::size_t offset,
                 const std::vector<float>& gradients);
  void WriteBytes(std::size_t offset, const std::vector<std::uint8_t>& bytes);
  void WriteReady(std::size_t bucket, std::uint64_t step);
  // Enqueues a wait: later operations of the stream run after the bucket is done.
  void WaitDone(std::size_t bucket, std::uint64_t step);
  // Waits on the host until the stream is done. False if the test's patience ends first.
  bool Released();
  std::vector<float> Floats(std::size_t offset, std::size_t count);
  std::vector<std::uint8_t> Bytes(std::size_t offset, std::size_t count);
  // Releases the streams as a client does when its daemon is lost.
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
  std::vector<std::vector<std::uint8_t>> sources_;  // of copies that may not be done
};

class CudaWorkerFixture {
 public:
  explicit CudaWorkerFixture(WorkerProcessOptions options = {}, int gpu = 0);

  WorkerProcess& process() { return *process_; }
  fakes::FakeMachine& machine() { return machine_; }
  void Stop() { process_.reset(); }
  // Waits until the worker ends by itself. Returns why it ended.
  absl::Status Ended() { return ended_.Wait().value_or(absl::UnknownError("it lives")); }

  std::unique_ptr<PendingReply> Send(worker::Call call, std::vector<UniqueFd> descriptors = {});
  absl::StatusOr<worker::Reply> Call(worker::Call call) { return Send(std::move(call))->Get(); }

  // Has the worker open its GPU. Fails the test on an error.
  void Open();
  absl::StatusOr<worker::Reply> Start(const std::string& device);

  // Adds an arena for `bytes` of buckets and, behind them, the verdict. If the worker refuses,
  // returns null and sets `refused`.
  std::unique_ptr<FakeTrainer> AddTrainer(std::size_t bytes, std::size_t buckets,
                                          absl::Status* refused = nullptr);
  // Applies to the arenas that are added from now on.
  void set_staging_bytes(std::size_t bytes) { staging_bytes_ = bytes; }
  // Sets the process that owns those arenas. Without it the worker does not know the owner.
  void set_trainer_process(pid_t pid) { trainer_process_ = pid; }
  std::uint64_t last_arena() const { return last_arena_; }
  worker::Reply& last_arena_added() { return last_arena_added_; }

  // A bucket that takes longer counts as hung.
  static constexpr std::uint64_t kOperationLimitNs = 3'000'000'000;
  static constexpr std::size_t kStagingBytes = std::size_t{4} << 20;

  // A launch of the only bucket of a step: float32, averaged over the trainers.
  static worker::Launch LaunchOf(const std::vector<FakeTrainer*>& trainers, std::uint64_t step,
                                 std::size_t count);
  std::unique_ptr<PendingReply> Launch(const worker::Launch& launch);
  std::unique_ptr<PendingReply> AwaitReady(const std::vector<FakeTrainer*>& trainers,
                                           std::uint64_t step, std::uint32_t bucket);
  std::unique_ptr<PendingReply> Remove(const FakeTrainer& trainer) {
    return Remove(trainer.arena());
  }
  std::unique_ptr<PendingReply> Remove(std::uint64_t arena);
  // Returns after the worker has run its loop once more.
  void Ping();
  worker::Pong Memory();

  // An id for a communicator in which the worker is rank 0.
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

}  // namespace gradsync::daemon

#endif  // TESTS_WORKER_CUDA_WORKER_FIXTURE_H_
