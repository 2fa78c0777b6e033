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

// A buffer that a kernel reads or writes as whole vectors.
template <typename Type>
Access Buffer(const void* address, std::uint64_t count, bool write) {
  return {Address(address), count * sizeof(typename Type::Stored), write, kVectorBytes};
}

// A single float that a kernel writes.
Access Word(const void* address) { return {Address(address), sizeof(float), true, sizeof(float)}; }

char* VerdictOf(const daemon::AverageOutput& output, std::uint32_t destination) {
  return static_cast<char*>(output.destinations[destination]) + output.verdict_distance;
}

template <typename Type, typename Staging>
std::vector<Access> CombineBuffers(const void* raw, std::uint32_t) {
  const auto arguments = Read<daemon::CombineArguments>(raw);
  // Staging has one element more than the bucket: the number of void contributions.
  std::vector<Access> buffers = {Buffer<Staging>(arguments.staging, arguments.count + 1, true)};
  if (arguments.accumulate != 0) {
    buffers.push_back(Buffer<Staging>(arguments.staging, arguments.count, false));
  }
  for (std::uint32_t i = 0; i < arguments.source_count; ++i) {
    buffers.push_back(Buffer<Type>(arguments.sources[i], arguments.count, false));
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

// What a kernel with this output writes.
template <typename Type>
std::vector<Access> OutputBuffers(const daemon::AverageOutput& output, std::uint64_t count,
                                  std::uint32_t blocks) {
  std::vector<Access> buffers = {Word(output.void_flag)};
  for (std::uint32_t i = 0; i < output.destination_count; ++i) {
    buffers.push_back(Buffer<Type>(output.destinations[i], count, true));
    if (output.writes_verdict != 0) buffers.push_back(Word(VerdictOf(output, i)));
  }
  if (output.stats != nullptr) {
    buffers.push_back(
        {Address(output.stats), blocks * sizeof(daemon::GradientStats), true, kVectorBytes});
  }
  return buffers;
}

// The end of a kernel with this output: writes the sums, scaled, and reports them. `elements` is
// how many elements a thread takes at a time.
template <typename Type>
void Write(const daemon::AverageOutput& output, const std::vector<typename Type::Work>& sums,
           double scale, bool is_void, std::uint64_t elements, std::uint32_t blocks,
           const Translation& at) {
  using Stored = typename Type::Stored;
  std::vector<Stored*> destinations;
  for (std::uint32_t i = 0; i < output.destination_count; ++i) {
    destinations.push_back(static_cast<Stored*>(at(output.destinations[i])));
  }
  std::vector<daemon::GradientStats> stats(blocks);
  for (std::uint64_t i = 0; i < sums.size(); ++i) {
    const Stored result = Type::Narrow(sums[i] * static_cast<typename Type::Work>(scale));
    const double written = Type::Widen(result);
    // The block that writes this element on the device.
    daemon::GradientStats& block = stats[i / elements / daemon::kCudaBlockThreads % blocks];
    block.sum_of_squares += written * written;
    block.non_finite += std::isfinite(written) ? 0 : 1;
    for (Stored* destination : destinations) destination[i] = result;
  }
  const float verdict = is_void ? 1.0f : 0.0f;
  *static_cast<float*>(at(output.void_flag)) = verdict;
  for (std::uint32_t i = 0; output.writes_verdict != 0 && i < output.destination_count; ++i) {
    *static_cast<float*>(at(VerdictOf(output, i))) = verdict;
  }
  if (output.stats != nullptr) {
    std::memcpy(at(output.stats), stats.data(), blocks * sizeof(daemon::GradientStats));
  }
}

template <typename Type, typename Staging>
std::vector<Access> WriteBackBuffers(const void* raw, std::uint32_t blocks) {
  const auto arguments = Read<daemon::WriteBackArguments>(raw);
  std::vector<Access> buffers = OutputBuffers<Type>(arguments.output, arguments.count, blocks);
  buffers.push_back(Buffer<Staging>(arguments.staging, arguments.count + 1, false));
  return buffers;
}

template <typename Type, typename Staging>
void WriteBack(const void* raw, std::uint32_t blocks, const Translation& at) {
  const auto arguments = Read<daemon::WriteBackArguments>(raw);
  const auto* const staging = static_cast<const typename Staging::Stored*>(at(arguments.staging));
  std::vector<typename Type::Work> sums(arguments.count);
  for (std::uint64_t i = 0; i < arguments.count; ++i) sums[i] = Staging::Widen(staging[i]);
  constexpr std::uint64_t kElements =
      kVectorBytes / std::min(sizeof(typename Type::Stored), sizeof(typename Staging::Stored));
  Write<Type>(arguments.output, sums, arguments.scale,
              Staging::Widen(staging[arguments.count]) != 0, kElements, blocks, at);
}

template <typename Type>
std::vector<Access> AverageBuffers(const void* raw, std::uint32_t blocks) {
  const auto arguments = Read<daemon::AverageArguments>(raw);
  std::vector<Access> buffers = OutputBuffers<Type>(arguments.output, arguments.count, blocks);
  for (std::uint32_t i = 0; i < arguments.output.destination_count; ++i) {
    buffers.push_back(Buffer<Type>(arguments.output.destinations[i], arguments.count, false));
  }
  return buffers;
}

template <typename Type>
void Average(const void* raw, std::uint32_t blocks, const Translation& at) {
  const auto arguments = Read<daemon::AverageArguments>(raw);
  using Work = typename Type::Work;
  const std::uint32_t sources = arguments.output.destination_count;
  std::vector<Work> sums(arguments.count, sources == 0 ? Work(0) : Work(-0.0));
  for (std::uint32_t source = 0; source < sources; ++source) {
    const auto* const from =
        static_cast<const typename Type::Stored*>(at(arguments.output.destinations[source]));
    for (std::uint64_t i = 0; i < arguments.count; ++i) sums[i] += Type::Widen(from[i]);
  }
  Write<Type>(arguments.output, sums, arguments.scale, arguments.void_contributions != 0,
              kVectorBytes / sizeof(typename Type::Stored), blocks, at);
}

template <typename Type, typename Staging>
void Add(const std::string& types, std::map<std::string, Kernel>* kernels) {
  (*kernels)["gradsync_combine_" + types] = {sizeof(daemon::CombineArguments),
                                             CombineBuffers<Type, Staging>, Combine<Type, Staging>};
  (*kernels)["gradsync_write_back_" + types] = {sizeof(daemon::WriteBackArguments),
                                                WriteBackBuffers<Type, Staging>,
                                                WriteBack<Type, Staging>};
}

template <typename Type>
void AddInPlace(const std::string& type, std::map<std::string, Kernel>* kernels) {
  (*kernels)["gradsync_average_" + type] = {sizeof(daemon::AverageArguments), AverageBuffers<Type>,
                                            Average<Type>};
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
    AddInPlace<Float32>("f32", all);
    AddInPlace<Float64>("f64", all);
    AddInPlace<Float16>("f16", all);
    AddInPlace<Bfloat16>("bf16", all);
    return all;
  }();
  const auto found = kernels->find(name);
  return found == kernels->end() ? nullptr : &found->second;
}

}  // namespace gradsync::fakes
