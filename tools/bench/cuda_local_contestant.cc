#include <cstdint>
#include <utility>
#include <vector>

#include "absl/types/span.h"
#include "daemon/reduce/cuda_combine.h"
#include "daemon/reduce/cuda_kernels.h"
#include "daemon/reduce/gpu_staging.h"
#include "daemon/reduce/gradient_stats.h"
#include "tools/bench/cuda_contestants.h"
#include "tools/bench/cuda_rank.h"

namespace gradsync::bench {
namespace {

class CudaLocalContestant : public Contestant {
 public:
  explicit CudaLocalContestant(const ContestantOptions& options) : options_(options) {}

  absl::Status Connect() override {
    absl::StatusOr<std::unique_ptr<CudaRank>> gpu = CudaRank::Open(options_);
    if (!gpu.ok()) return gpu.status();
    gpu_ = *std::move(gpu);
    return works() ? Load() : absl::OkStatus();
  }

  absl::Status SetUp(std::size_t bytes) override {
    bytes_ = bytes;
    absl::Status status = gpu_->AllocateHost(bytes_);
    if (!status.ok() || !works()) return status;
    for (std::uint32_t i = 0; i < options_.ranks / options_.gpus; ++i) {
      absl::StatusOr<CUdeviceptr> buffer = gpu_->AllocateDevice(bytes_);
      if (!buffer.ok()) return buffer.status();
      buffers_.push_back(*buffer);
    }
    absl::StatusOr<CUdeviceptr> staging =
        gpu_->AllocateDevice(daemon::StagingBytes(options_.dtype, count()));
    if (!staging.ok()) return staging.status();
    staging_ = *staging;
    return absl::OkStatus();
  }

  std::byte* buffer() override { return gpu_->host(); }
  bool averages() const override { return false; }

  absl::Status Upload() override {
    for (const CUdeviceptr buffer : buffers_) {
      absl::Status status = gpu_->Upload(buffer);
      if (!status.ok()) return status;
    }
    return absl::OkStatus();
  }

  absl::Status AllReduce(Turn* turn) override {
    if (!works()) return absl::OkStatus();
    absl::Status status = gpu_->Start();
    if (status.ok()) status = Enqueue();
    if (!status.ok()) return status;
    absl::StatusOr<std::int64_t> gpu_ns = gpu_->StopNs();
    if (!gpu_ns.ok()) return gpu_ns.status();
    turn->own_ns = *gpu_ns;
    return absl::OkStatus();
  }

  absl::Status TearDown() override {
    buffers_.clear();
    gpu_->FreeDevice();
    return absl::OkStatus();
  }

 protected:
  virtual absl::Status Load() { return absl::OkStatus(); }
  virtual absl::Status Enqueue() = 0;

  // A job of several GPUs sums in staging.
  bool staged() const { return options_.gpus > 1; }

  CudaRank& gpu() { return *gpu_; }
  absl::Span<const CUdeviceptr> buffers() const { return buffers_; }
  CUdeviceptr staging() const { return staging_; }
  DataType dtype() const { return options_.dtype; }
  std::size_t bytes() const { return bytes_; }
  std::size_t count() const { return bytes_ / ItemSize(options_.dtype); }

 private:
  bool works() const { return options_.rank == 0; }

  const ContestantOptions options_;
  std::unique_ptr<CudaRank> gpu_;
  std::size_t bytes_ = 0;
  std::vector<CUdeviceptr> buffers_;
  CUdeviceptr staging_ = 0;
};

class CudaRooflineContestant final : public CudaLocalContestant {
 public:
  using CudaLocalContestant::CudaLocalContestant;

 protected:
  absl::Status Enqueue() override {
    for (const CUdeviceptr buffer : buffers()) {
      absl::Status status = Copy(staging(), buffer);
      if (!status.ok()) return status;
    }
    return staged() ? Copy(buffers()[0], staging()) : absl::OkStatus();
  }

 private:
  absl::Status Copy(CUdeviceptr to, CUdeviceptr from) {
    return gpu().driver().cuMemcpyAsync(to, from, bytes(), gpu().stream());
  }
};

class CudaKernelsContestant final : public CudaLocalContestant {
 public:
  using CudaLocalContestant::CudaLocalContestant;

  absl::Status SetUp(std::size_t bytes) override {
    absl::Status status = CudaLocalContestant::SetUp(bytes);
    if (!status.ok() || buffers().empty()) return status;
    absl::StatusOr<CUdeviceptr> stats = gpu().AllocateDevice(
        daemon::kMaxCudaBlocks * sizeof(daemon::GradientStats) + sizeof(float));
    if (!stats.ok()) return stats.status();
    stats_ = *stats;
    return absl::OkStatus();
  }

 protected:
  absl::Status Load() override {
    absl::StatusOr<std::unique_ptr<daemon::CudaCombine>> combine =
        daemon::CudaCombine::Load(&gpu().driver(), gpu().device().handle);
    if (!combine.ok()) return combine.status();
    combine_ = *std::move(combine);
    return absl::OkStatus();
  }

  absl::Status Enqueue() override {
    const double scale = 1.0 / static_cast<double>(buffers().size());
    daemon::CudaOutput output;
    output.destinations = buffers();
    output.stats = stats_;
    output.void_flag = stats_ + daemon::kMaxCudaBlocks * sizeof(daemon::GradientStats);
    if (!staged()) {
      return combine_->Average(gpu().stream(), dtype(), count(), scale, 0, output);
    }
    const daemon::CudaStaging sum{staging(), dtype()};
    absl::Status status = combine_->Combine(gpu().stream(), dtype(), buffers(), count(), 0, sum);
    if (!status.ok()) return status;
    return combine_->WriteBack(gpu().stream(), dtype(), sum, count(), scale, output);
  }

 private:
  std::unique_ptr<daemon::CudaCombine> combine_;
  CUdeviceptr stats_ = 0;
};

}  // namespace

std::unique_ptr<Contestant> MakeCudaKernelsContestant(const ContestantOptions& options) {
  return std::make_unique<CudaKernelsContestant>(options);
}

std::unique_ptr<Contestant> MakeCudaRooflineContestant(const ContestantOptions& options) {
  return std::make_unique<CudaRooflineContestant>(options);
}

}  // namespace gradsync::bench
