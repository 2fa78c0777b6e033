// A program of its own, because it replaces operator new.

#include <gtest/gtest.h>

#include <atomic>
#include <cstdlib>
#include <memory>
#include <new>
#include <vector>

#include "daemon/base/mutex.h"
#include "daemon/reduce/host_reducer.h"

namespace {
std::atomic<long> g_allocations{0};
}  // namespace

void* operator new(std::size_t bytes) {
  ++g_allocations;
  if (void* const memory = std::malloc(bytes)) return memory;
  std::abort();
}
void operator delete(void* memory) noexcept { std::free(memory); }
void operator delete(void* memory, std::size_t) noexcept { std::free(memory); }

namespace gradsync::daemon {
namespace {

TEST(HostReducerAllocationTest, StepsAfterTheFirstAllocateNothing) {
  constexpr int kFlows = 3;
  constexpr int kBucketsPerFlow = 20;
  constexpr std::size_t kCount = 300 * 1024;  // 1.2 MiB, queued
  std::vector<float> memory[2] = {std::vector<float>(kCount), std::vector<float>(kCount)};
  Mutex mutex;
  CondVar changed;
  int left = 0;
  std::vector<std::unique_ptr<ReduceOperation>> operations;
  for (int i = 0; i < kFlows * kBucketsPerFlow; ++i) {
    operations.push_back(std::make_unique<ReduceOperation>());
    ReduceOperation& operation = *operations.back();
    operation.dtype = DataType::kFloat32;
    operation.count = kCount;
    operation.flow = static_cast<std::uint64_t>(i % kFlows);
    operation.scale = 0.5;
    operation.measure = true;
    for (auto& buffer : memory) {
      operation.host().buffers.push_back(reinterpret_cast<std::byte*>(buffer.data()));
    }
    operation.done = [&](const ReduceTimes&) {
      MutexLock lock(&mutex);
      --left;
      changed.NotifyAll();
    };
  }
  HostReducer reducer(1);  // one thread, because the operations share their memory
  const auto step = [&] {
    {
      MutexLock lock(&mutex);
      left = static_cast<int>(operations.size());
    }
    for (auto& operation : operations) reducer.Reduce(operation.get());
    MutexLock lock(&mutex);
    while (left > 0) changed.Wait(&mutex);
  };
  // Blocks the thread during the first step, so that the queues grow to hold all operations at
  // once.
  ReduceOperation plug;
  plug.dtype = DataType::kFloat32;
  plug.count = kCount;
  plug.host().buffers = operations[0]->host().buffers;
  bool plugged = true;
  plug.done = [&](const ReduceTimes&) {
    MutexLock lock(&mutex);
    while (plugged) changed.Wait(&mutex);
  };
  reducer.Reduce(&plug);
  {
    MutexLock lock(&mutex);
    left = static_cast<int>(operations.size());
  }
  for (auto& operation : operations) reducer.Reduce(operation.get());
  {
    MutexLock lock(&mutex);
    plugged = false;
    changed.NotifyAll();
    while (left > 0) changed.Wait(&mutex);
  }

  const long before = g_allocations;
  for (int i = 0; i < 5; ++i) step();
  EXPECT_EQ(g_allocations - before, 0);
}

}  // namespace
}  // namespace gradsync::daemon
