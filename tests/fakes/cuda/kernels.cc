#include "tests/fakes/cuda/kernels.h"

#include <algorithm>
#include <cmath>
#include <cstring>
#include <map>

#include "daemon/reduce/cuda_kernels.h"
#include "tests/reduce/half_reference.h"

namespace gradsync::fakes {
namespace {

// The types of a bucket and of its staging: how an element is stored and in which type it is added
// and scaled.
struct Float32 {
  using Stored = float;
  using Work = float;
  static Work Widen(Stored value) { return value; }
  static Stored Narrow(Work value) { return value; }
};
struct Float64 {
  using Stored = double;
  using Work = double;
  static Work Widen(Stored value) { return value; }
  static Stored Narrow(Work value) { return value; }
};
struct Float16 {
  using Stored = std::uint16_t;
  using Work = float;
  static Work Widen(Stored value) { return static_cast<float>(daemon::Float16Value(value)); }
  static Stored Narrow(Work value) { return daemon::NearestFloat16(value); }
};
struct Bfloat16 {
  using Stored = std::uint16_t;
  using Work = float;
  static Work Widen(Stored value) { return static_cast<float>(daemon::Bfloat16Value(value)); }
  static Stored Narrow(Work value) { return daemon::NearestBfloat16(value); }
};

CUdeviceptr Address(const void* pointer) { return reinterpret_cast<CUdeviceptr>(pointer); }

// Reads an argument of a kernel. Arguments need not be aligned in memory.
template <typename Arguments>
Arguments Read(const void* arguments) {
  Arguments read;
  std::memcpy(&read, arguments, sizeof(read));
  return read;
}

// Staging has one element more than the bucket: the number of void contributions.
template <typename Staging>
std::size_t StagingBytes(std::uint64_t count) {
  return (count + 1) * sizeof(typename Staging::Stored);
}

template <typename Type, typename Staging>
std::vector<Access> CombineBuffers(const void* raw, std::uint32_t) {
  const auto arguments = Read<daemon::CombineArguments>(raw);
  std::vector<Access> buffers = {
      {Address(arguments.staging), StagingBytes<Staging>(arguments.count), true}};
  for (std::uint32_t i = 0; i < arguments.source_count; ++i) {
    buffers.push_back(
        {Address(arguments.sources[i]), arguments.count * sizeof(typename Type::Stored), false});
  }
  return buffers;
}

template <typename Type, typename Staging>
void Combine(const void* raw, std::uint32_t, const Translation& at) {
  const auto arguments = Read<daemon::CombineArguments>(raw);
  auto* const staging = static_cast<typename Staging::Stored*>(at(arguments.staging));
  std::vector<const typename Type::Stored*> sources;
  for (std::uint32_t i = 0; i < arguments.source_count; ++i) {
    sources.push_back(static_cast<const typename Type::Stored*>(at(arguments.sources[i])));
  }
  using Work = typename Type::Work;
  for (std::uint64_t i = 0; i < arguments.count; ++i) {
    Work sum = sources.empty() ? Work(0) : Work(-0.0);
    if (arguments.accumulate != 0) sum = Staging::Widen(staging[i]);
    for (const auto* source : sources) sum += Type::Widen(source[i]);
    staging[i] = Staging::Narrow(sum);
  }
  staging[arguments.count] =
      Staging::Narrow(static_cast<typename Staging::Work>(arguments.void_contributions));
}

template <typename Type, typename Staging>
std::vector<Access> WriteBackBuffers(const void* raw, std::uint32_t blocks) {
  const auto arguments = Read<daemon::WriteBackArguments>(raw);
  std::vector<Access> buffers = {
      {Address(arguments.staging), StagingBytes<Staging>(arguments.count), false}};
  for (std::uint32_t i = 0; i < arguments.destination_count; ++i) {
    buffers.push_back({Address(arguments.destinations[i]),
                       arguments.count * sizeof(typename Type::Stored), true});
  }
  if (arguments.stats != nullptr) {
    buffers.push_back({Address(arguments.stats), blocks * sizeof(daemon::GradientStats), true});
  }
  return buffers;
}

template <typename Type, typename Staging>
void WriteBack(const void* raw, std::uint32_t blocks, const Translation& at) {
  const auto arguments = Read<daemon::WriteBackArguments>(raw);
  using Stored = typename Type::Stored;
  const auto* const staging = static_cast<const typename Staging::Stored*>(at(arguments.staging));
  std::vector<Stored*> destinations;
  for (std::uint32_t i = 0; i < arguments.destination_count; ++i) {
    destinations.push_back(static_cast<Stored*>(at(arguments.destinations[i])));
  }
  std::vector<daemon::GradientStats> stats(blocks);
  constexpr std::uint64_t kElements =
      kVectorBytes / std::min(sizeof(Stored), sizeof(typename Staging::Stored));
  for (std::uint64_t i = 0; i < arguments.count; ++i) {
    const Stored result = Type::Narrow(Staging::Widen(staging[i]) *
                                       static_cast<typename Type::Work>(arguments.scale));
    const double written = Type::Widen(result);
    // The block that writes this element on the device.
    daemon::GradientStats& block = stats[i / kElements / daemon::kCudaBlockThreads % blocks];
    block.sum_of_squares += written * written;
    block.non_finite += std::isfinite(written) ? 0 : 1;
    for (Stored* destination : destinations) destination[i] = result;
  }
  if (Staging::Widen(staging[arguments.count]) != 0) {
    *static_cast<float*>(at(arguments.void_flag)) = 1.0f;
  }
  if (arguments.stats != nullptr) {
    std::memcpy(at(arguments.stats), stats.data(), blocks * sizeof(daemon::GradientStats));
  }
}

template <typename Type, typename Staging>
void Add(const std::string& types, std::map<std::string, Kernel>* kernels) {
  (*kernels)["gradsync_combine_" + types] = {sizeof(daemon::CombineArguments),
                                             CombineBuffers<Type, Staging>, Combine<Type, Staging>};
  (*kernels)["gradsync_write_back_" + types] = {sizeof(daemon::WriteBackArguments),
                                                WriteBackBuffers<Type, Staging>,
                                                WriteBack<Type, Staging>};
}

}  // namespace

const Kernel* FindKernel(const std::string& name) {
  static const auto* const kernels = [] {
    auto* const all = new std::map<std::string, Kernel>;
    Add<Float32, Float32>("f32_f32", all);
    Add<Float32, Float16>("f32_f16", all);
    Add<Float32, Bfloat16>("f32_bf16", all);
    Add<Float64, Float64>("f64_f64", all);
    Add<Float16, Float16>("f16_f16", all);
    Add<Float16, Float32>("f16_f32", all);
    Add<Bfloat16, Bfloat16>("bf16_bf16", all);
    Add<Bfloat16, Float32>("bf16_f32", all);
    return all;
  }();
  const auto found = kernels->find(name);
  return found == kernels->end() ? nullptr : &found->second;
}

}  // namespace gradsync::fakes
