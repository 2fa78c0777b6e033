// A program of its own, because it replaces operator new.

#include <gtest/gtest.h>
#include <malloc.h>

#include <atomic>
#include <cstddef>
#include <cstdint>
#include <cstdlib>
#include <functional>
#include <future>
#include <memory>
#include <new>
#include <utility>
#include <vector>

#include "daemon/peer/node_exchange.h"

namespace {
constexpr std::size_t kLargeBytes = 64 << 10;
std::atomic<int> g_large{0};  // allocations of at least kLargeBytes that are not freed

void Free(void* memory) {
  if (memory != nullptr && malloc_usable_size(memory) >= kLargeBytes) --g_large;
  std::free(memory);
}
}  // namespace

void* operator new(std::size_t bytes) {
  void* const memory = std::malloc(bytes);
  if (memory == nullptr) std::abort();
  if (malloc_usable_size(memory) >= kLargeBytes) ++g_large;
  return memory;
}
void operator delete(void* memory) noexcept { Free(memory); }
void operator delete(void* memory, std::size_t) noexcept { Free(memory); }

namespace gradsync::daemon {
namespace {

// The test plays the engine's thread.
class HandDrivenEngine final : public Engine {
 public:
  explicit HandDrivenEngine(std::promise<Exchange*>* submitted) : submitted_(submitted) {}
  void Submit(Exchange* exchange) override { submitted_->set_value(exchange); }
  void Broadcast(std::vector<std::byte*>, std::size_t, std::uint32_t,
                 std::function<void(const absl::Status&)>) override {}
  void Abort(const absl::Status&) override {}
  EngineStatistics Statistics() const override { return {}; }

 private:
  std::promise<Exchange*>* const submitted_;
};

TEST(NodeExchangeMemoryTest, ABucketOfManyChunksLeavesNothingBehind) {
  std::promise<Exchange*> submitted;
  NodeExchange exchange(
      "beta",
      [&]() -> absl::StatusOr<std::unique_ptr<Engine>> {
        return std::make_unique<HandDrivenEngine>(&submitted);
      },
      [](const absl::Status&) { FAIL(); });
  constexpr std::size_t kCount = 20'000;
  std::vector<float> rank(kCount, 1.0f);
  double sum_of_squares = 0;
  NodeWork work;
  work.dtype = DataType::kFloat32;
  work.count = kCount;
  work.measure = true;
  work.buffers = {reinterpret_cast<std::byte*>(rank.data())};
  work.done = [&](const absl::Status&, const GradientStats& stats) {
    sum_of_squares = stats.sum_of_squares;
  };
  const int before = g_large;
  ASSERT_TRUE(exchange.Submit(std::move(work)).ok());
  Exchange* const running = submitted.get_future().get();
  const float sum = 1.0f;
  for (std::size_t i = 0; i < kCount; ++i) {
    running->scatter(i, 1, reinterpret_cast<const std::byte*>(&sum));
  }
  EXPECT_GT(g_large, before) << "the statistics of the chunks are large";
  running->done(absl::OkStatus());
  EXPECT_EQ(sum_of_squares, kCount);
  EXPECT_EQ(g_large, before);
}

}  // namespace
}  // namespace gradsync::daemon
