// The product's kernels on the CPU, and how launches fail.

#include <gmock/gmock.h>

#include <cmath>
#include <cstring>
#include <limits>
#include <string>
#include <vector>

#include "daemon/reduce/cuda_kernels.h"
#include "tests/fakes/cuda_process.h"
#include "tests/fakes/isolated_test.h"
#include "tests/reduce/half_reference.h"

namespace gradsync::fakes {
namespace {

using testing::ElementsAre;
using testing::HasSubstr;
using testing::IsEmpty;

constexpr std::uint32_t kFatBinary[4] = {0xBA55ED50};
constexpr std::uint32_t kBlocks = 3;

CUfunction Kernel(const char* name) {
  CUmodule module = nullptr;
  CUfunction function = nullptr;
  CUDA_OK(cuModuleLoadData(&module, kFatBinary));
  CUDA_OK(cuModuleGetFunction(&function, module, name));
  CUDA_OK(cuFuncLoad(function));
  return function;
}

template <typename Arguments>
CUresult Launch(CUfunction function, Arguments arguments, CUstream stream) {
  void* parameters[] = {&arguments};
  return cuLaunchKernel(function, kBlocks, 1, 1, daemon::kCudaBlockThreads, 1, 1, 0, stream,
                        parameters, nullptr);
}

// Device memory that holds `values`.
template <typename T>
void* Device(const std::vector<T>& values, CUstream stream) {
  CUdeviceptr address = 0;
  CUDA_OK(cuMemAlloc(&address, values.size() * sizeof(T)));
  CUDA_OK(cuMemcpyHtoDAsync(address, values.data(), values.size() * sizeof(T), stream));
  CUDA_OK(cuStreamSynchronize(stream));
  return reinterpret_cast<void*>(address);
}

template <typename T>
std::vector<T> Host(const void* from, std::size_t count, CUstream stream) {
  std::vector<T> values(count);
  CUDA_OK(cuMemcpyDtoHAsync(values.data(), reinterpret_cast<CUdeviceptr>(from), count * sizeof(T),
                            stream));
  return values;
}

ISOLATED_TEST(Kernels, CombineAddsInOrderAndCountsVoidContributions, MachineWithGpus(1)) {
  EnterContext();
  CUstream stream = MakeStream();
  daemon::CombineArguments arguments{};
  arguments.sources[0] = Device<float>({1, 2, 3}, stream);
  arguments.sources[1] = Device<float>({10, 20, 30}, stream);
  arguments.staging = Device<float>({100, 100, 100, 100}, stream);
  arguments.count = 3;
  arguments.source_count = 2;
  arguments.void_contributions = 1;
  CUfunction combine = Kernel("gradsync_combine_f32_f32");
  CUDA_OK(Launch(combine, arguments, stream));
  EXPECT_THAT(Host<float>(arguments.staging, 4, stream), ElementsAre(11, 22, 33, 1));
  arguments.accumulate = 1;
  arguments.source_count = 1;
  arguments.void_contributions = 0;
  CUDA_OK(Launch(combine, arguments, stream));
  EXPECT_THAT(Host<float>(arguments.staging, 4, stream), ElementsAre(12, 24, 36, 0));
  EXPECT_THAT(FakeMachine().Violations(), IsEmpty());
}

// 256 + 1 is not a bfloat16, so only a sum in float32 is right.
ISOLATED_TEST(Kernels, SixteenBitTypesAreAddedInFloat32, MachineWithGpus(1)) {
  EnterContext();
  CUstream stream = MakeStream();
  daemon::CombineArguments arguments{};
  arguments.sources[0] = Device<std::uint16_t>({daemon::NearestBfloat16(256)}, stream);
  arguments.sources[1] = Device<std::uint16_t>({daemon::NearestBfloat16(1)}, stream);
  arguments.sources[2] = Device<std::uint16_t>({daemon::NearestBfloat16(1)}, stream);
  arguments.count = 1;
  arguments.source_count = 3;
  arguments.staging = Device<std::uint16_t>({0, 0}, stream);
  CUDA_OK(Launch(Kernel("gradsync_combine_bf16_bf16"), arguments, stream));
  EXPECT_THAT(Host<std::uint16_t>(arguments.staging, 2, stream),
              ElementsAre(daemon::NearestBfloat16(258), 0));
  arguments.staging = Device<float>({0, 0}, stream);
  arguments.source_count = 2;
  CUDA_OK(Launch(Kernel("gradsync_combine_bf16_f32"), arguments, stream));
  EXPECT_THAT(Host<float>(arguments.staging, 2, stream), ElementsAre(257, 0));
}

// 1 + 2^-9 rounds to 1 in bfloat16. If each addition rounded, the sum would stay 1.
ISOLATED_TEST(Kernels, FloatsAreRoundedOnceIntoStagingOfSixteenBits, MachineWithGpus(1)) {
  EnterContext();
  CUstream stream = MakeStream();
  daemon::CombineArguments arguments{};
  arguments.sources[0] = Device<float>({1, 40000}, stream);
  for (arguments.source_count = 1; arguments.source_count < 4; ++arguments.source_count) {
    arguments.sources[arguments.source_count] = Device<float>({0x1p-9f, 20000}, stream);
  }
  arguments.count = 2;
  arguments.void_contributions = 3;
  arguments.staging = Device<std::uint16_t>({0, 0, 0, 9}, stream);
  CUDA_OK(Launch(Kernel("gradsync_combine_f32_bf16"), arguments, stream));
  EXPECT_THAT(Host<std::uint16_t>(arguments.staging, 4, stream),
              ElementsAre(daemon::NearestBfloat16(1 + 0x1p-7), daemon::NearestBfloat16(100000),
                          daemon::NearestBfloat16(3), 9));
  arguments.staging = Device<std::uint16_t>({0, 0, 0, 9}, stream);
  CUDA_OK(Launch(Kernel("gradsync_combine_f32_f16"), arguments, stream));
  const double infinity = std::numeric_limits<double>::infinity();
  EXPECT_THAT(Host<std::uint16_t>(arguments.staging, 4, stream),
              ElementsAre(daemon::NearestFloat16(1 + 3 * 0x1p-9), daemon::NearestFloat16(infinity),
                          daemon::NearestFloat16(3), 9));
}

// A launch adds at most 16 ranks. For further ranks, staging holds a sum that is rounded already.
ISOLATED_TEST(Kernels, MoreFloatsAreAddedToStagingOfSixteenBits, MachineWithGpus(1)) {
  EnterContext();
  CUstream stream = MakeStream();
  daemon::CombineArguments arguments{};
  arguments.sources[0] = Device<float>({256}, stream);
  arguments.source_count = 1;
  arguments.count = 1;
  arguments.staging = Device<std::uint16_t>({9, 9, 9}, stream);
  CUfunction combine = Kernel("gradsync_combine_f32_bf16");
  CUDA_OK(Launch(combine, arguments, stream));
  arguments.sources[0] = arguments.sources[1] = Device<float>({1}, stream);
  arguments.source_count = 2;
  arguments.accumulate = 1;
  arguments.void_contributions = 2;
  CUDA_OK(Launch(combine, arguments, stream));
  EXPECT_THAT(Host<std::uint16_t>(arguments.staging, 3, stream),
              ElementsAre(daemon::NearestBfloat16(258), daemon::NearestBfloat16(2), 9));
  EXPECT_THAT(FakeMachine().Violations(), IsEmpty());
}

ISOLATED_TEST(Kernels, WriteBackWidensStagingOfSixteenBits, MachineWithGpus(1)) {
  EnterContext();
  CUstream stream = MakeStream();
  daemon::WriteBackArguments arguments{};
  const double infinity = std::numeric_limits<double>::infinity();
  arguments.staging =
      Device<std::uint16_t>({daemon::NearestFloat16(1 + 0x1p-10), daemon::NearestFloat16(infinity),
                             daemon::NearestFloat16(0)},
                            stream);
  arguments.output.destinations[0] = Device<float>({0, 0, 7}, stream);
  arguments.output.destination_count = 1;
  arguments.count = 2;
  arguments.scale = 0x1p-10;
  arguments.output.stats = static_cast<daemon::GradientStats*>(
      Device<daemon::GradientStats>(std::vector<daemon::GradientStats>(kBlocks), stream));
  arguments.output.void_flag = static_cast<float*>(Device<float>({0}, stream));
  CUDA_OK(Launch(Kernel("gradsync_write_back_f32_f16"), arguments, stream));
  EXPECT_THAT(Host<float>(arguments.output.destinations[0], 3, stream),
              ElementsAre(0x1p-10f + 0x1p-20f, std::numeric_limits<float>::infinity(), 7));
  EXPECT_EQ(Host<daemon::GradientStats>(arguments.output.stats, 1, stream)[0].non_finite, 1u);
  EXPECT_THAT(Host<float>(arguments.output.void_flag, 1, stream), ElementsAre(0));
}

ISOLATED_TEST(Kernels, WriteBackScalesAndMeasures, MachineWithGpus(1)) {
  EnterContext();
  CUstream stream = MakeStream();
  const float infinity = std::numeric_limits<float>::infinity();
  daemon::WriteBackArguments arguments{};
  arguments.staging = Device<float>({2, 4, infinity, 1}, stream);
  arguments.output.destinations[0] = Device<float>({0, 0, 0}, stream);
  arguments.output.destinations[1] = Device<float>({0, 0, 0}, stream);
  arguments.output.destination_count = 2;
  arguments.count = 2;
  arguments.scale = 0.5;
  arguments.output.stats = static_cast<daemon::GradientStats*>(
      Device<daemon::GradientStats>(std::vector<daemon::GradientStats>(kBlocks), stream));
  arguments.output.void_flag = static_cast<float*>(Device<float>({0}, stream));
  CUfunction write_back = Kernel("gradsync_write_back_f32_f32");
  CUDA_OK(Launch(write_back, arguments, stream));
  for (const void* destination :
       {arguments.output.destinations[0], arguments.output.destinations[1]}) {
    EXPECT_THAT(Host<float>(destination, 3, stream), ElementsAre(1, 2, 0));
  }
  const auto stats = Host<daemon::GradientStats>(arguments.output.stats, kBlocks, stream);
  EXPECT_EQ(stats[0].sum_of_squares, 5);
  EXPECT_EQ(stats[0].non_finite, 0u);
  EXPECT_EQ(stats[1].sum_of_squares, 0);
  // Behind the elements, staging holds the number of void contributions.
  EXPECT_THAT(Host<float>(arguments.output.void_flag, 1, stream), ElementsAre(1));
  arguments.staging = Device<float>({2, 4, 0}, stream);
  CUDA_OK(Launch(write_back, arguments, stream));
  EXPECT_THAT(Host<float>(arguments.output.void_flag, 1, stream), ElementsAre(0));
  arguments.staging = Device<float>({2, 4, infinity, 1}, stream);
  arguments.count = 3;
  CUDA_OK(Launch(write_back, arguments, stream));
  EXPECT_EQ(Host<daemon::GradientStats>(arguments.output.stats, 1, stream)[0].non_finite, 1u);
}

// With the step's last bucket, the kernel writes the verdict beside each destination.
ISOLATED_TEST(Kernels, WriteBackWritesTheVerdict, MachineWithGpus(1)) {
  EnterContext();
  CUstream stream = MakeStream();
  daemon::WriteBackArguments arguments{};
  arguments.count = 2;
  arguments.scale = 1;
  arguments.output.destinations[0] = Device<float>({0, 0, 7, 7}, stream);
  arguments.output.destinations[1] = Device<float>({0, 0, 7, 7}, stream);
  arguments.output.destination_count = 2;
  arguments.output.verdict_distance = 3 * sizeof(float);
  arguments.output.writes_verdict = 1;
  arguments.output.void_flag = static_cast<float*>(Device<float>({9}, stream));
  CUfunction write_back = Kernel("gradsync_write_back_f32_f32");
  for (const float is_void : {1.0f, 0.0f}) {
    arguments.staging = Device<float>({5, 6, 3 * is_void}, stream);
    CUDA_OK(Launch(write_back, arguments, stream));
    for (const void* destination :
         {arguments.output.destinations[0], arguments.output.destinations[1]}) {
      EXPECT_THAT(Host<float>(destination, 4, stream), ElementsAre(5, 6, 7, is_void));
    }
    EXPECT_THAT(Host<float>(arguments.output.void_flag, 1, stream), ElementsAre(is_void));
  }
  EXPECT_THAT(FakeMachine().Violations(), IsEmpty());
}

// Combine and write-back with staging that rounds nothing, in one kernel.
ISOLATED_TEST(Kernels, AverageAddsInOrderScalesAndMeasures, MachineWithGpus(1)) {
  EnterContext();
  CUstream stream = MakeStream();
  daemon::AverageArguments arguments{};
  arguments.output.destinations[0] = Device<float>({0x1p24f, -0.0f, 8, 7}, stream);
  arguments.output.destinations[1] = Device<float>({1, -0.0f, 2, 7}, stream);
  arguments.output.destinations[2] = Device<float>({-0x1p24f, -0.0f, 2, 7}, stream);
  arguments.output.destination_count = 3;
  arguments.output.verdict_distance = 3 * sizeof(float);
  arguments.output.writes_verdict = 1;
  arguments.output.stats = static_cast<daemon::GradientStats*>(
      Device<daemon::GradientStats>(std::vector<daemon::GradientStats>(kBlocks), stream));
  arguments.output.void_flag = static_cast<float*>(Device<float>({9}, stream));
  arguments.count = 3;
  arguments.scale = 0.25;
  CUfunction average = Kernel("gradsync_average_f32");
  CUDA_OK(Launch(average, arguments, stream));
  for (int i = 0; i < 3; ++i) {
    // 2^24 + 1 is no float: in another order the first sum would be 1.
    const auto result = Host<float>(arguments.output.destinations[i], 4, stream);
    EXPECT_THAT(result, ElementsAre(0, -0.0f, 3, 0));
    EXPECT_TRUE(std::signbit(result[1]));
  }
  EXPECT_EQ(Host<daemon::GradientStats>(arguments.output.stats, 1, stream)[0].sum_of_squares, 9);
  EXPECT_THAT(Host<float>(arguments.output.void_flag, 1, stream), ElementsAre(0));
  arguments.void_contributions = 2;
  CUDA_OK(Launch(average, arguments, stream));
  EXPECT_THAT(Host<float>(arguments.output.destinations[1], 4, stream)[3], 1);
  EXPECT_THAT(Host<float>(arguments.output.void_flag, 1, stream), ElementsAre(1));
  EXPECT_THAT(FakeMachine().Violations(), IsEmpty());
}

// 256 + 1 is not a bfloat16, so only a sum in float32 is right.
ISOLATED_TEST(Kernels, AverageAddsSixteenBitTypesInFloat32, MachineWithGpus(1)) {
  EnterContext();
  CUstream stream = MakeStream();
  daemon::AverageArguments arguments{};
  const std::uint16_t one = daemon::NearestBfloat16(1);
  arguments.output.destinations[0] =
      Device<std::uint16_t>({daemon::NearestBfloat16(256), 0, 0, 0, 0, 0, 0, 0}, stream);
  arguments.output.destinations[1] = Device<std::uint16_t>({one, 0, 0, 0, 0, 0, 0, 0}, stream);
  arguments.output.destinations[2] = Device<std::uint16_t>({one, 0, 0, 0, 0, 0, 0, 0}, stream);
  arguments.output.destination_count = 3;
  arguments.output.void_flag = static_cast<float*>(Device<float>({9}, stream));
  arguments.count = 1;
  arguments.scale = 1;
  CUDA_OK(Launch(Kernel("gradsync_average_bf16"), arguments, stream));
  EXPECT_THAT(Host<std::uint16_t>(arguments.output.destinations[2], 1, stream),
              ElementsAre(daemon::NearestBfloat16(258)));
}

ISOLATED_TEST(Launch, UnalignedAccessIsSticky, MachineWithGpus(1)) {
  EnterContext();
  CUstream stream = MakeStream();
  daemon::CombineArguments arguments{};
  char* const staging = static_cast<char*>(Device<float>(std::vector<float>(8), stream));
  arguments.staging = staging + sizeof(float);
  arguments.count = 1;
  CUDA_OK(Launch(Kernel("gradsync_combine_f32_f32"), arguments, stream));
  EXPECT_EQ(cuStreamSynchronize(stream), CUDA_ERROR_MISALIGNED_ADDRESS);
  EXPECT_EQ(cuCtxSynchronize(), CUDA_ERROR_MISALIGNED_ADDRESS);
}

ISOLATED_TEST(Launch, AccessBeyondABufferIsIllegal, MachineWithGpus(1)) {
  EnterContext();
  CUstream stream = MakeStream();
  const Mapped mapped = MakeMapped(2 * kMebibyte);
  daemon::CombineArguments arguments{};
  arguments.staging = reinterpret_cast<void*>(mapped.address);
  // Staging needs one element more.
  arguments.count = mapped.bytes / sizeof(float);
  CUDA_OK(Launch(Kernel("gradsync_combine_f32_f32"), arguments, stream));
  EXPECT_EQ(cuStreamSynchronize(stream), CUDA_ERROR_ILLEGAL_ADDRESS);
}

ISOLATED_TEST(Launch, AccessToHostMemoryIsIllegal, MachineWithGpus(1)) {
  EnterContext();
  CUstream stream = MakeStream();
  alignas(16) float host[4] = {};
  daemon::CombineArguments arguments{};
  arguments.staging = host;
  arguments.count = 1;
  CUDA_OK(Launch(Kernel("gradsync_combine_f32_f32"), arguments, stream));
  EXPECT_EQ(cuStreamSynchronize(stream), CUDA_ERROR_ILLEGAL_ADDRESS);
}

ISOLATED_TEST(Launch, RequiresAnImageAKernelAndAModule, MachineWithGpus(1)) {
  EnterContext();
  const char text[] = "no image at all";
  CUmodule module = nullptr;
  CUfunction function = nullptr;
  EXPECT_EQ(cuModuleLoadData(&module, text), CUDA_ERROR_INVALID_IMAGE);
  CUDA_OK(cuModuleLoadData(&module, kFatBinary));
  EXPECT_EQ(cuModuleGetFunction(&function, module, "no_kernel"), CUDA_ERROR_NOT_FOUND);
  CUDA_OK(cuModuleGetFunction(&function, module, "gradsync_combine_f32_f32"));
  CUDA_OK(cuModuleUnload(module));
  EXPECT_EQ(Launch(function, daemon::CombineArguments{}, MakeStream()), CUDA_ERROR_INVALID_HANDLE);
}

// Two buckets of a step may overlap on two streams. Two kernels on the same bucket may not.
ISOLATED_TEST(Launch, KernelsOnTheSameBufferNeedAnOrder, MachineWithGpus(1)) {
  SKIP_UNDER_TSAN();
  EnterContext();
  CUstream first = MakeStream(), second = MakeStream();
  CUfunction combine = Kernel("gradsync_combine_f32_f32");
  Word word;
  daemon::CombineArguments arguments{};
  arguments.staging = Device<float>({0, 0}, first);
  arguments.count = 1;
  daemon::CombineArguments other = arguments;
  other.staging = Device<float>({0, 0}, first);
  CUDA_OK(cuStreamWaitValue64(first, word.address(), 1, CU_STREAM_WAIT_VALUE_GEQ));
  CUDA_OK(Launch(combine, arguments, first));
  CUDA_OK(Launch(combine, other, second));
  EXPECT_THAT(FakeMachine().Violations(), IsEmpty());
  CUDA_OK(Launch(combine, arguments, second));
  EXPECT_THAT(FakeMachine().Violations(),
              ElementsAre(HasSubstr("race: gradsync_combine_f32_f32 is not ordered after")));
  word.Store(1);
}

}  // namespace
}  // namespace gradsync::fakes
