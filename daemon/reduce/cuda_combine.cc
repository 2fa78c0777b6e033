#include "daemon/reduce/cuda_combine.h"

#include <algorithm>
#include <string>
#include <utility>

#include "absl/strings/str_cat.h"
#include "daemon/reduce/cuda_kernels.h"
#include "daemon/reduce/gpu_staging.h"

namespace gradsync::daemon {
namespace {

// A multiprocessor holds 2048 threads.
constexpr std::uint32_t kBlocksPerMultiprocessor = 2048 / kCudaBlockThreads;
constexpr std::size_t kVectorBytes = 16;

constexpr std::pair<DataType, const char*> kNames[] = {
    {DataType::kFloat32, "f32"},
    {DataType::kFloat64, "f64"},
    {DataType::kFloat16, "f16"},
    {DataType::kBfloat16, "bf16"},
};

void* Pointer(CUdeviceptr address) { return reinterpret_cast<void*>(address); }

// The part of `output` for destinations [first, first + kMaxCudaBuffers).
AverageOutput OutputFrom(const CudaOutput& output, std::size_t first) {
  AverageOutput part{};
  for (const CUdeviceptr destination : output.destinations.subspan(first, kMaxCudaBuffers)) {
    part.destinations[part.destination_count++] = Pointer(destination);
  }
  part.writes_verdict = output.verdict_distance.has_value() ? 1 : 0;
  part.verdict_distance = output.verdict_distance.value_or(0);
  // Every launch writes the same elements, so only one of them measures.
  part.stats = first == 0 ? static_cast<GradientStats*>(Pointer(output.stats)) : nullptr;
  part.void_flag = static_cast<float*>(Pointer(output.void_flag));
  return part;
}

}  // namespace

absl::StatusOr<std::unique_ptr<CudaCombine>> CudaCombine::Load(const CudaDriver* driver,
                                                               CUdevice device) {
  int multiprocessors = 0;
  if (const absl::Status status = driver->cuDeviceGetAttribute(
          &multiprocessors, CU_DEVICE_ATTRIBUTE_MULTIPROCESSOR_COUNT, device);
      !status.ok()) {
    return status;
  }
  const auto wanted = static_cast<std::uint32_t>(multiprocessors) * kBlocksPerMultiprocessor;
  auto combine = std::unique_ptr<CudaCombine>(
      new CudaCombine(driver, std::clamp<std::uint32_t>(wanted, 1, kMaxCudaBlocks)));
  if (const absl::Status status = combine->LoadKernels(); !status.ok()) return status;
  return combine;
}

CudaCombine::CudaCombine(const CudaDriver* driver, std::uint32_t max_blocks)
    : driver_(driver), max_blocks_(max_blocks) {}

CudaCombine::~CudaCombine() {
  if (module_ != nullptr) driver_->cuModuleUnload.Result(module_);
}

absl::Status CudaCombine::LoadKernels() {
  absl::Status status = driver_->cuModuleLoadData(&module_, gradsync_cuda_fatbin);
  const auto load = [&](const std::string& name, CUfunction* kernel) {
    if (status.ok()) status = driver_->cuModuleGetFunction(kernel, module_, name.c_str());
    if (status.ok()) status = driver_->cuFuncLoad(*kernel);
  };
  for (const auto& [dtype, type] : kNames) {
    load(absl::StrCat("gradsync_average_", type), &average_[static_cast<std::size_t>(dtype)]);
    for (const auto& [staging, staging_type] : kNames) {
      if (!CanBeStagedAs(dtype, staging)) continue;
      Kernels& kernels =
          kernels_[static_cast<std::size_t>(dtype)][static_cast<std::size_t>(staging)];
      const std::string types = absl::StrCat(type, "_", staging_type);
      load(absl::StrCat("gradsync_combine_", types), &kernels.combine);
      load(absl::StrCat("gradsync_write_back_", types), &kernels.write_back);
    }
  }
  return status;
}

const CudaCombine::Kernels& CudaCombine::KernelsOf(DataType dtype, DataType staging) const {
  return kernels_[static_cast<std::size_t>(dtype)][static_cast<std::size_t>(staging)];
}

std::uint32_t CudaCombine::Blocks(DataType dtype, DataType staging, std::size_t count) const {
  const std::size_t per_block =
      kCudaBlockThreads * (kVectorBytes / std::min(ItemSize(dtype), ItemSize(staging)));
  const std::size_t blocks = (count + per_block - 1) / per_block;
  return static_cast<std::uint32_t>(std::clamp<std::size_t>(blocks, 1, max_blocks_));
}

absl::Status CudaCombine::Launch(CUfunction kernel, std::uint32_t blocks, CUstream stream,
                                 void* arguments) const {
  void* parameters[] = {arguments};
  return driver_->cuLaunchKernel(kernel, blocks, 1, 1, kCudaBlockThreads, 1, 1, 0, stream,
                                 parameters, nullptr);
}

absl::Status CudaCombine::Combine(CUstream stream, DataType dtype,
                                  absl::Span<const CUdeviceptr> sources, std::size_t count,
                                  std::uint32_t void_contributions,
                                  const CudaStaging& staging) const {
  const Kernels& kernels = KernelsOf(dtype, staging.dtype);
  const std::uint32_t blocks = Blocks(dtype, staging.dtype, count);
  std::size_t taken = 0;
  do {
    CombineArguments arguments{};
    while (taken < sources.size() && arguments.source_count < kMaxCudaBuffers) {
      arguments.sources[arguments.source_count++] = Pointer(sources[taken++]);
    }
    arguments.staging = Pointer(staging.address);
    arguments.count = count;
    arguments.accumulate = taken > kMaxCudaBuffers ? 1 : 0;
    arguments.void_contributions = void_contributions;
    const absl::Status status = Launch(kernels.combine, blocks, stream, &arguments);
    if (!status.ok()) return status;
  } while (taken < sources.size());
  return absl::OkStatus();
}

absl::Status CudaCombine::WriteBack(CUstream stream, DataType dtype, const CudaStaging& staging,
                                    std::size_t count, double scale,
                                    const CudaOutput& output) const {
  const Kernels& kernels = KernelsOf(dtype, staging.dtype);
  const std::uint32_t blocks = Blocks(dtype, staging.dtype, count);
  std::size_t given = 0;
  do {
    WriteBackArguments arguments{};
    arguments.staging = Pointer(staging.address);
    arguments.count = count;
    arguments.scale = scale;
    arguments.output = OutputFrom(output, given);
    given += arguments.output.destination_count;
    const absl::Status status = Launch(kernels.write_back, blocks, stream, &arguments);
    if (!status.ok()) return status;
  } while (given < output.destinations.size());
  return absl::OkStatus();
}

bool CudaCombine::CanAverage(DataType dtype, DataType staging, std::size_t destinations) {
  const bool rounds_twice = ItemSize(staging) == 2;
  return !rounds_twice && CanBeStagedAs(dtype, staging) && destinations <= kMaxCudaBuffers;
}

absl::Status CudaCombine::Average(CUstream stream, DataType dtype, std::size_t count, double scale,
                                  std::uint32_t void_contributions,
                                  const CudaOutput& output) const {
  AverageArguments arguments{};
  arguments.count = count;
  arguments.scale = scale;
  arguments.output = OutputFrom(output, 0);
  arguments.void_contributions = void_contributions;
  return Launch(average_[static_cast<std::size_t>(dtype)], Blocks(dtype, dtype, count), stream,
                &arguments);
}

}  // namespace gradsync::daemon
