// float32 gradients that travel between GPUs in 16 bits: two real daemons with their workers, and
// the client, on fakes of the driver and of NCCL.

#include <gmock/gmock.h>

#include <algorithm>
#include <cmath>
#include <cstddef>
#include <cstdint>
#include <limits>
#include <random>
#include <set>
#include <string>
#include <utility>
#include <vector>

#include "client/include/gradsync/client.h"
#include "tests/cuda/cuda_two_nodes.h"
#include "tests/fakes/isolated_test.h"

namespace gradsync {
namespace {

using fakes::GpusThatMayBeOne;
using fakes::MachineWithGpus;
using testing::HasSubstr;
using testing::IsEmpty;

// Elements of the buckets. One bucket is smaller than 16 bytes in both types, one is not a multiple
// of 16 bytes, one needs several blocks.
constexpr std::size_t kCounts[] = {1, 7, 1003, 9001};

// Gradients of both signs and of all magnitudes from 2^-10 to 2^4.
std::vector<float> Gradients(std::uint32_t rank, std::uint64_t step, std::size_t bucket) {
  std::mt19937 random(static_cast<std::uint32_t>(1000 * step + 10 * bucket + rank));
  std::uniform_real_distribution<float> mantissa(-1, 1);
  std::uniform_int_distribution<int> exponent(-10, 4);
  std::vector<float> gradients(kCounts[bucket]);
  for (float& gradient : gradients) gradient = std::ldexp(mantissa(random), exponent(random));
  return gradients;
}

struct Averages {
  std::vector<std::vector<float>> buckets;
  StepResult result;
};

// A job of several generations, each with its wire type.
class WireJob {
 public:
  explicit WireJob(const std::vector<Place>& places) : job_(places) {
    CountGpus(places);
    LayoutSpec spec;
    for (const std::size_t count : kCounts) {
      spec.explicit_buckets.push_back({DataType::kFloat32, count});
    }
    job_.set_spec(spec);
  }
  ~WireJob() { EXPECT_THAT(job_.machine().Violations(), IsEmpty()); }

  // Applies from the next generation on.
  void set_places(const std::vector<Place>& places) {
    job_.set_places(places);
    CountGpus(places);
  }
  void Join(NcclWireType wire_type) {
    job_.set_nccl({0, {}, {}, wire_type});
    job_.Join();
  }
  void End() { job_.End(); }

  // Runs a step in which the last gradient of each bucket is `last` on every rank. Expects the
  // averages to have the same bits on every rank.
  Averages Step(std::uint64_t step, float last = 0) {
    for (std::uint32_t rank = 0; rank < job_.world(); ++rank) {
      for (std::size_t bucket = 0; bucket < std::size(kCounts); ++bucket) {
        std::vector<float> gradients = Gradients(rank, step, bucket);
        if (last != 0) gradients.back() = last;
        EXPECT_TRUE(job_.rank(rank).Mark(step, bucket, gradients).ok());
      }
      EXPECT_TRUE(job_.rank(rank).layout().EndStep(step).ok());
    }
    Averages averages;
    for (std::uint32_t rank = 0; rank < job_.world(); ++rank) {
      EXPECT_TRUE(job_.rank(rank).layout().WaitOnStream(step, job_.rank(rank).stream()).ok());
      std::vector<std::vector<float>> buckets;
      for (std::size_t bucket = 0; bucket < std::size(kCounts); ++bucket) {
        buckets.push_back(job_.rank(rank).Read(bucket));
      }
      EXPECT_EQ(job_.rank(rank).Verdict(step), 0);
      auto result = job_.rank(rank).layout().WaitStep(step, kPatience);
      EXPECT_TRUE(result.ok()) << result.status();
      if (!result.ok()) return averages;
      if (rank == 0) {
        averages = {std::move(buckets), *std::move(result)};
      } else {
        EXPECT_EQ(buckets, averages.buckets) << "rank " << rank;
      }
    }
    return averages;
  }

  // The largest error of the averages of `step`, compared with averages in float64. 1 is the error
  // that rounding to `unit` allows. With G GPUs, a gradient is rounded at most G times: in its
  // GPU's sum, and at each of the G - 1 hops of NCCL's ring. The sum on a GPU and the division are
  // in float32. The error of a subnormal float16 is 2^-25.
  double Error(std::uint64_t step, double unit, const Averages& averages) {
    const double world = job_.world();
    const double relative = std::pow(1 + unit, gpus_) - 1 + (world + 1) * 0x1p-24;
    const double absolute = gpus_ * 0x1p-25;
    double error = 0;
    for (std::size_t bucket = 0; bucket < averages.buckets.size(); ++bucket) {
      std::vector<double> sums(kCounts[bucket]);
      std::vector<double> magnitudes(kCounts[bucket]);
      for (std::uint32_t rank = 0; rank < job_.world(); ++rank) {
        const std::vector<float> gradients = Gradients(rank, step, bucket);
        for (std::size_t i = 0; i < gradients.size(); ++i) {
          sums[i] += gradients[i];
          magnitudes[i] += std::fabs(gradients[i]);
        }
      }
      for (std::size_t i = 0; i < sums.size(); ++i) {
        const double bound = (magnitudes[i] * relative + absolute) / world;
        error = std::max(error, std::fabs(averages.buckets[bucket][i] - sums[i] / world) / bound);
      }
    }
    return error;
  }

  // The sum of the last gradients over all ranks is out of float16's range.
  void ExpectOverflow(std::uint64_t step, float last) {
    const Averages averages = Step(step, last);
    ASSERT_EQ(averages.result.stats.size(), std::size(kCounts));
    for (std::size_t bucket = 0; bucket < std::size(kCounts); ++bucket) {
      EXPECT_EQ(averages.buckets[bucket].back(), std::numeric_limits<float>::infinity());
      EXPECT_EQ(averages.result.stats[bucket].non_finite, 1u) << "bucket " << bucket;
    }
  }

  // The results are rounded, within the bound.
  void ExpectRounded(std::uint64_t step, double unit) {
    const double error = Error(step, unit, Step(step));
    EXPECT_LE(error, 1.0);
    EXPECT_GT(error, 0.1) << "the averages are not rounded";
  }

  void ExpectLives() {
    constexpr double kFloat32Unit = 0x1p-24, kFloat16Unit = 0x1p-11, kBfloat16Unit = 0x1p-8;
    Join(NcclWireType::kBfloat16);
    ExpectRounded(1, kBfloat16Unit);
    ExpectRounded(2, kBfloat16Unit);
    EXPECT_EQ(Step(3, 60000).result.stats.back().non_finite, 0u);
    End();
    Join(NcclWireType::kFloat16);
    ExpectRounded(1, kFloat16Unit);
    ExpectOverflow(2, 60000);
    ExpectRounded(3, kFloat16Unit);
    End();
    Join(NcclWireType::kAuto);
    EXPECT_LE(Error(1, kFloat32Unit, Step(1)), 1.0);
    End();
  }

 private:
  void CountGpus(const std::vector<Place>& places) {
    std::set<int> gpus;
    for (const Place& place : places) gpus.insert(place.gpu);
    gpus_ = static_cast<int>(gpus.size());
  }

  GpuNodes job_;
  int gpus_ = 0;
};

ISOLATED_TEST(WireType, RoundsFloatsBetweenTheGpusOfANode, MachineWithGpus(2)) {
  WireJob job({{0, 0}, {0, 0}, {0, 1}});
  job.ExpectLives();
}

ISOLATED_TEST(WireType, RoundsFloatsBetweenNodes, MachineWithGpus(3)) {
  WireJob job({{0, 0}, {0, 0}, {1, 1}, {1, 2}});
  job.ExpectLives();
}

ISOLATED_TEST(WireType, RoundsFloatsBetweenNodesWithOneGpu, GpusThatMayBeOne(2)) {
  WireJob job({{0, 0}, {0, 0}, {1, 1}, {1, 1}});
  job.ExpectLives();
}

void ExpectExact(const Averages& averages) {
  for (std::size_t bucket = 0; bucket < std::size(kCounts); ++bucket) {
    const std::vector<float> first = Gradients(0, 1, bucket);
    const std::vector<float> second = Gradients(1, 1, bucket);
    std::vector<float> expected;
    for (std::size_t i = 0; i < first.size(); ++i) expected.push_back((first[i] + second[i]) / 2);
    EXPECT_EQ(averages.buckets[bucket], expected);
  }
}

// Nothing travels between GPUs, even while a worker of an earlier generation exists on another GPU.
ISOLATED_TEST(WireType, OneGpuRoundsNothing, MachineWithGpus(2)) {
  WireJob job({{0, 0}, {0, 0}});
  job.Join(NcclWireType::kFloat16);
  ExpectExact(job.Step(1));
  job.End();
  job.set_places({{0, 0}, {0, 1}});
  job.Join(NcclWireType::kFloat16);
  job.ExpectRounded(1, 0x1p-11);
  job.End();
  job.set_places({{0, 0}, {0, 0}});
  job.Join(NcclWireType::kFloat16);
  ExpectExact(job.Step(1));
}

ISOLATED_TEST(WireType, IsTheSameOnEveryNode, GpusThatMayBeOne(2)) {
  GpuNodes job({{0, 0}, {1, 1}});
  const auto first = Session::Join(job.Options(0));
  ASSERT_TRUE(first.ok()) << first.status();
  job.set_nccl({0, {}, {}, NcclWireType::kBfloat16});
  const auto second = Session::Join(job.Options(1));
  EXPECT_EQ(ErrorReason(second.status()), "JOB_MISMATCH") << second.status();
  EXPECT_THAT(std::string(second.status().message()),
              HasSubstr("nccl.wire_type is bfloat16, but the ranks that joined before have auto"));
}

}  // namespace
}  // namespace gradsync
