// Streams, events and words: the order that CUDA guarantees, and where that order is surprising.

#include <dlfcn.h>
#include <gmock/gmock.h>
#include <stdlib.h>
#include <sys/mman.h>
#include <unistd.h>

#include <functional>
#include <future>
#include <string>
#include <utility>
#include <vector>

#include "tests/fakes/cuda_process.h"
#include "tests/fakes/isolated_test.h"
#include "tests/kit/deadline.h"

namespace gradsync::fakes {
namespace {

using testing::ElementsAre;
using testing::HasSubstr;
using testing::IsEmpty;

constexpr std::uint64_t kPoison = std::uint64_t{1} << 62;

// Runs a call that blocks, in a thread of its own that has this thread's context.
std::future<CUresult> InThread(std::function<CUresult()> call) {
  CUcontext context = nullptr;
  CUDA_OK(cuCtxGetCurrent(&context));
  return std::async(std::launch::async, [context, call = std::move(call)] {
    CUDA_OK(cuCtxSetCurrent(context));
    return call();
  });
}

// The number of hardware queues. Each further stream shares a queue.
constexpr int kQueues = 8;

ISOLATED_TEST(Stream, RunsInOrder, MachineWithGpus(1)) {
  EnterContext();
  CUstream stream = MakeStream();
  const CUdeviceptr values = MakeFloats(1);
  for (int i = 1; i <= 20; ++i) CUDA_OK(cuMemsetD32Async(values, 0x3F800000u + i, 1, stream));
  CUDA_OK(cuMemsetD32Async(values, 0x40000000u, 1, stream));
  EXPECT_THAT(ReadFloats(values, 1, stream), ElementsAre(2.0f));
  EXPECT_THAT(FakeMachine().Violations(), IsEmpty());
}

ISOLATED_TEST(Event, OrdersTwoStreams, MachineWithGpus(1)) {
  EnterContext();
  CUstream writer = MakeStream(), reader = MakeStream();
  CUevent written = MakeEvent();
  const CUdeviceptr values = MakeFloats(1), copy = MakeFloats(1);
  for (int i = 0; i < 20; ++i) {
    CUDA_OK(cuMemsetD32Async(values, 0x40000000u, 1, writer));
    CUDA_OK(cuEventRecord(written, writer));
    CUDA_OK(cuStreamWaitEvent(reader, written, 0));
    CUDA_OK(cuMemcpyAsync(copy, values, sizeof(float), reader));
    EXPECT_THAT(ReadFloats(copy, 1, reader), ElementsAre(2.0f));
  }
  EXPECT_THAT(FakeMachine().Violations(), IsEmpty());
}

ISOLATED_TEST(Event, MissingWaitIsARace, MachineWithGpus(1)) {
  SKIP_UNDER_TSAN();
  EnterContext();
  CUstream writer = MakeStream(), reader = MakeStream();
  const CUdeviceptr values = MakeFloats(1), copy = MakeFloats(1);
  Word word;
  CUDA_OK(cuStreamWaitValue64(writer, word.address(), 1, CU_STREAM_WAIT_VALUE_GEQ));
  CUDA_OK(cuMemsetD32Async(values, 0x40000000u, 1, writer));
  CUDA_OK(cuMemcpyAsync(copy, values, sizeof(float), reader));
  EXPECT_THAT(FakeMachine().Violations(),
              ElementsAre(HasSubstr("race: cuMemcpyAsync is not ordered after cuMemsetD32Async")));
  word.Store(1);
}

ISOLATED_TEST(Event, WaitUsesTheLatestRecord, MachineWithGpus(1)) {
  EnterContext();
  CUstream parked = MakeStream(), other = MakeStream();
  CUevent event = MakeEvent();
  Word word;
  CUDA_OK(cuEventRecord(event, other));
  CUDA_OK(cuStreamWaitEvent(other, event, 0));
  // This record comes too late for the wait above.
  CUDA_OK(cuStreamWaitValue64(parked, word.address(), 1, CU_STREAM_WAIT_VALUE_GEQ));
  CUDA_OK(cuEventRecord(event, parked));
  EXPECT_EQ(cuStreamSynchronize(other), CUDA_SUCCESS);
  EXPECT_EQ(cuEventQuery(event), CUDA_ERROR_NOT_READY);
  word.Store(1);
  EXPECT_EQ(cuEventSynchronize(event), CUDA_SUCCESS);
}

ISOLATED_TEST(Event, UnrecordedEventIsComplete, MachineWithGpus(1)) {
  EnterContext();
  CUevent event = MakeEvent();
  CUstream stream = MakeStream();
  EXPECT_EQ(cuEventQuery(event), CUDA_SUCCESS);
  EXPECT_EQ(cuStreamWaitEvent(stream, event, 0), CUDA_SUCCESS);
  EXPECT_EQ(cuStreamSynchronize(stream), CUDA_SUCCESS);
}

ISOLATED_TEST(Event, MeasuresTime, MachineWithGpus(1)) {
  EnterContext();
  CUstream stream = MakeStream();
  CUevent start = nullptr, end = nullptr;
  CUDA_OK(cuEventCreate(&start, 0));
  CUDA_OK(cuEventCreate(&end, 0));
  CUDA_OK(cuEventRecord(start, stream));
  CUDA_OK(cuEventRecord(end, stream));
  CUDA_OK(cuStreamSynchronize(stream));
  float milliseconds = -1;
  EXPECT_EQ(cuEventElapsedTime(&milliseconds, start, end), CUDA_SUCCESS);
  EXPECT_GE(milliseconds, 0);
  EXPECT_EQ(cuEventElapsedTime(&milliseconds, MakeEvent(), end), CUDA_ERROR_INVALID_HANDLE);
}

ISOLATED_TEST(Stream, UseAfterDestroyIsAViolation, MachineWithGpus(1)) {
  EnterContext();
  CUstream stream = MakeStream();
  CUevent event = MakeEvent();
  CUDA_OK(cuStreamDestroy(stream));
  CUDA_OK(cuEventDestroy(event));
  EXPECT_EQ(cuStreamQuery(stream), CUDA_ERROR_INVALID_HANDLE);
  EXPECT_EQ(cuEventQuery(event), CUDA_ERROR_INVALID_HANDLE);
  EXPECT_EQ(FakeMachine().Violations().size(), 2u);
}

ISOLATED_TEST(Stream, WorkOfADestroyedStreamStillRuns, MachineWithGpus(1)) {
  EnterContext();
  CUstream stream = MakeStream();
  Word go, written;
  CUDA_OK(cuStreamWaitValue64(stream, go.address(), 1, CU_STREAM_WAIT_VALUE_GEQ));
  CUDA_OK(cuStreamWriteValue64(stream, written.address(), 7, CU_STREAM_WRITE_VALUE_DEFAULT));
  CUDA_OK(cuStreamDestroy(stream));
  go.Store(1);
  CUDA_OK(cuCtxSynchronize());
  EXPECT_EQ(written.Load(), 7u);
}

ISOLATED_TEST(Stream, LegacyDefaultStreamWaitsForBlockingStreams, MachineWithGpus(1)) {
  EnterContext();
  CUstream blocking = MakeStream(CU_STREAM_DEFAULT), free = MakeStream();
  CUevent after_blocking = MakeEvent();
  Word word;
  CUDA_OK(cuStreamWaitValue64(blocking, word.address(), 1, CU_STREAM_WAIT_VALUE_GEQ));
  CUDA_OK(cuEventRecord(after_blocking, nullptr));
  CUDA_OK(cuEventRecord(MakeEvent(), free));
  EXPECT_EQ(cuStreamSynchronize(free), CUDA_SUCCESS);
  EXPECT_EQ(cuEventQuery(after_blocking), CUDA_ERROR_NOT_READY);
  word.Store(1);
  EXPECT_EQ(cuStreamSynchronize(nullptr), CUDA_SUCCESS);
}

ISOLATED_TEST(Word, WaitsAreCyclicAndSigned, MachineWithGpus(1)) {
  EnterContext();
  CUstream stream = MakeStream(), other = MakeStream();
  Word word;
  // A word of all ones counts as before 5, so it does not release the wait. The poison value does.
  word.Store(~std::uint64_t{0});
  CUDA_OK(cuStreamWaitValue64(stream, word.address(), 5, CU_STREAM_WAIT_VALUE_GEQ));
  for (int i = 0; i < 20; ++i) CUDA_OK(cuEventRecord(MakeEvent(), other));
  CUDA_OK(cuStreamSynchronize(other));
  EXPECT_EQ(cuStreamQuery(stream), CUDA_ERROR_NOT_READY);
  word.Store(kPoison + 5);
  EXPECT_EQ(cuStreamSynchronize(stream), CUDA_SUCCESS);
  // A plain step value ends the poisoning.
  word.Store(5);
  CUDA_OK(cuStreamWaitValue64(stream, word.address(), 6, CU_STREAM_WAIT_VALUE_GEQ));
  CUDA_OK(cuEventRecord(MakeEvent(), other));
  CUDA_OK(cuStreamSynchronize(other));
  EXPECT_EQ(cuStreamQuery(stream), CUDA_ERROR_NOT_READY);
  word.Store(6);
  EXPECT_EQ(cuStreamSynchronize(stream), CUDA_SUCCESS);
}

ISOLATED_TEST(Word, FirstVersionsAreRefused, MachineWithGpus(1)) {
  EnterContext();
  CUstream stream = MakeStream();
  Word word;
  for (const char* const name : {"cuStreamWaitValue64", "cuStreamWriteValue64"}) {
    const auto first_version =
        reinterpret_cast<decltype(&cuStreamWaitValue64)>(dlsym(RTLD_DEFAULT, name));
    ASSERT_NE(first_version, nullptr);
    EXPECT_EQ(first_version(stream, word.address(), 0, 0), CUDA_ERROR_NOT_SUPPORTED);
  }
}

ISOLATED_TEST(Word, MustBeAnAlignedDeviceAddress, MachineWithGpus(1)) {
  EnterContext();
  CUstream stream = MakeStream();
  Word word;
  std::uint64_t elsewhere = 0;
  EXPECT_EQ(cuStreamWriteValue64(stream, word.address() + 4, 1, 0), CUDA_ERROR_INVALID_VALUE);
  EXPECT_EQ(cuStreamWriteValue64(stream, reinterpret_cast<CUdeviceptr>(&elsewhere), 1, 0),
            CUDA_ERROR_INVALID_VALUE);
  EXPECT_EQ(cuStreamWaitValue64(stream, word.address(), 1, CU_STREAM_WAIT_VALUE_FLUSH),
            CUDA_ERROR_NOT_SUPPORTED);
}

MachineDescription WithoutWords() {
  MachineDescription machine = MachineWithGpus(1);
  machine.gpus[0].stream_memory_operations = false;
  return machine;
}

ISOLATED_TEST(Word, OldDevicesRefuseWords, WithoutWords()) {
  EnterContext();
  Word word;
  int supported = -1;
  CUDA_OK(cuDeviceGetAttribute(&supported, CU_DEVICE_ATTRIBUTE_CAN_USE_64_BIT_STREAM_MEM_OPS, 0));
  EXPECT_EQ(supported, 0);
  EXPECT_EQ(cuStreamWriteValue64(MakeStream(), word.address(), 1, 0), CUDA_ERROR_NOT_SUPPORTED);
}

// A stream of one process waits for a word that a stream of another process writes.
ROLE(word_writer) {
  EnterContext();
  void* const page = mmap(nullptr, 4096, PROT_READ | PROT_WRITE, MAP_SHARED, 3, 0);
  CUdeviceptr address = 0;
  CUDA_OK(cuMemHostRegister(page, 4096, CU_MEMHOSTREGISTER_DEVICEMAP));
  CUDA_OK(cuMemHostGetDevicePointer(&address, page, 0));
  CUDA_OK(cuStreamWriteValue64(MakeStream(), address, 3, CU_STREAM_WRITE_VALUE_DEFAULT));
  CUDA_OK(cuCtxSynchronize());
  return 0;
}

ISOLATED_TEST(Word, OrdersTwoProcesses, MachineWithGpus(1)) {
  EnterContext();
  const Descriptor memory(memfd_create("words", MFD_CLOEXEC));
  ASSERT_EQ(ftruncate(memory.get(), 4096), 0);
  void* const page = mmap(nullptr, 4096, PROT_READ | PROT_WRITE, MAP_SHARED, memory.get(), 0);
  CUdeviceptr address = 0;
  CUDA_OK(cuMemHostRegister(page, 4096, CU_MEMHOSTREGISTER_DEVICEMAP));
  CUDA_OK(cuMemHostGetDevicePointer(&address, page, 0));
  CUstream stream = MakeStream();
  CUDA_OK(cuStreamWaitValue64(stream, address, 3, CU_STREAM_WAIT_VALUE_GEQ));
  const auto writer = StartRole("word_writer", {memory.get()});
  EXPECT_EQ(cuStreamSynchronize(stream), CUDA_SUCCESS);
  EXPECT_TRUE(Succeeds(*writer));
}

// ---- hardware queues and calls that block ----

ISOLATED_TEST(HardwareQueue, StreamsBeyondTheirNumberShareThem, MachineWithGpus(1)) {
  EnterContext();
  // The legacy default stream takes the first queue.
  std::vector<CUstream> streams(kQueues + 1);
  for (CUstream& stream : streams) stream = MakeStream();
  Word word;
  CUDA_OK(cuStreamWaitValue64(streams[0], word.address(), 1, CU_STREAM_WAIT_VALUE_GEQ));
  CUevent alone = MakeEvent(), shared = MakeEvent();
  CUDA_OK(cuEventRecord(shared, streams[kQueues]));
  CUDA_OK(cuEventRecord(alone, streams[1]));
  EXPECT_EQ(cuEventSynchronize(alone), CUDA_SUCCESS);
  EXPECT_EQ(cuEventQuery(shared), CUDA_ERROR_NOT_READY);
  word.Store(1);
  EXPECT_EQ(cuEventSynchronize(shared), CUDA_SUCCESS);
}

MachineDescription WithMps() {
  MachineDescription machine = MachineWithGpus(1);
  machine.mps = true;
  return machine;
}

// Whether work runs on the third stream of a process whose first stream is parked.
void ExpectThirdStreamRuns(bool runs) {
  EnterContext();
  // The legacy default stream takes the first queue.
  CUstream parked = MakeStream(), second = MakeStream(), third = MakeStream();
  Word word;
  CUDA_OK(cuStreamWaitValue64(parked, word.address(), 1, CU_STREAM_WAIT_VALUE_GEQ));
  CUevent there = MakeEvent();
  CUDA_OK(cuEventRecord(there, third));
  CUDA_OK(cuEventRecord(MakeEvent(), second));
  EXPECT_EQ(cuStreamSynchronize(second), CUDA_SUCCESS);
  if (!runs) {
    EXPECT_EQ(cuEventQuery(there), CUDA_ERROR_NOT_READY);
    word.Store(1);
  }
  EXPECT_EQ(cuEventSynchronize(there), CUDA_SUCCESS);
  word.Store(1);
}

ISOLATED_TEST(HardwareQueue, MpsClientHasTwo, WithMps()) { ExpectThirdStreamRuns(false); }

ISOLATED_TEST(HardwareQueue, MpsClientGetsAsManyAsItAsksFor, WithMps()) {
  setenv("CUDA_DEVICE_MAX_CONNECTIONS", "8", 1);
  ExpectThirdStreamRuns(true);
}

ISOLATED_TEST(HardwareQueue, AllStreamsShareASingleQueue, MachineWithGpus(1)) {
  setenv("CUDA_DEVICE_MAX_CONNECTIONS", "1", 1);
  EnterContext();
  CUstream parked = MakeStream(), other = MakeStream();
  Word word;
  CUDA_OK(cuStreamWaitValue64(parked, word.address(), 1, CU_STREAM_WAIT_VALUE_GEQ));
  CUDA_OK(cuEventRecord(MakeEvent(), other));
  EXPECT_EQ(cuStreamQuery(other), CUDA_ERROR_NOT_READY);
  word.Store(1);
  EXPECT_EQ(cuStreamSynchronize(other), CUDA_SUCCESS);
}

struct BlockingCall {
  const char* name;
  std::function<CUresult()> call;
};

ISOLATED_TEST(ParkedStream, BlocksSynchronizingCalls, MachineWithGpus(1)) {
  EnterContext();
  const FakeMachine machine;
  CUstream parked = MakeStream();
  const CUdeviceptr memory = MakeFloats(1);
  void* pages = nullptr;
  CUDA_OK(cuMemHostAlloc(&pages, 4096, 0));
  const std::uint32_t image[4] = {0xBA55ED50};
  Word word;
  const std::vector<BlockingCall> calls = {
      {"cuStreamCreateWithPriority",
       [] {
         CUstream stream = nullptr;
         return cuStreamCreateWithPriority(&stream, CU_STREAM_NON_BLOCKING, 0);
       }},
      {"cuMemFree_v2", [memory] { return cuMemFree(memory); }},
      {"cuMemFreeHost", [pages] { return cuMemFreeHost(pages); }},
      {"cuModuleLoadData",
       [image] {
         CUmodule module = nullptr;
         return cuModuleLoadData(&module, image);
       }},
      {"cuDevicePrimaryCtxRelease", [] { return cuDevicePrimaryCtxRelease(0); }},
  };
  std::uint64_t step = 0;
  for (const BlockingCall& call : calls) {
    ++step;
    CUDA_OK(cuStreamWaitValue64(parked, word.address(), step, CU_STREAM_WAIT_VALUE_GEQ));
    std::future<CUresult> result = InThread(call.call);
    EXPECT_TRUE(machine.AwaitJournal(kBlocked, call.name, kPatienceMs)) << call.name;
    // A store of the CPU releases all the blocked calls.
    word.Store(step);
    EXPECT_EQ(result.get(), CUDA_SUCCESS) << call.name;
  }
}

// ---- capture ----

ISOLATED_TEST(Capture, StreamIsCapturingAndRunsNothing, MachineWithGpus(1)) {
  EnterContext();
  CUstream stream = MakeStream();
  Word word;
  CUDA_OK(cuStreamBeginCapture(stream, CU_STREAM_CAPTURE_MODE_GLOBAL));
  CUstreamCaptureStatus status = CU_STREAM_CAPTURE_STATUS_NONE;
  CUDA_OK(cuStreamIsCapturing(stream, &status));
  EXPECT_EQ(status, CU_STREAM_CAPTURE_STATUS_ACTIVE);
  CUDA_OK(cuStreamWriteValue64(stream, word.address(), 9, CU_STREAM_WRITE_VALUE_DEFAULT));
  EXPECT_EQ(cuStreamSynchronize(stream), CUDA_ERROR_STREAM_CAPTURE_UNSUPPORTED);
  CUgraph graph = nullptr;
  CUDA_OK(cuStreamEndCapture(stream, &graph));
  CUDA_OK(cuStreamSynchronize(stream));
  EXPECT_EQ(word.Load(), 0u);
}

// In whatever mode and thread: the context includes the stream that is being captured.
ISOLATED_TEST(Capture, SynchronizingTheContextSpoilsIt, MachineWithGpus(1)) {
  EnterContext();
  CUstream stream = MakeStream(), other = MakeStream();
  for (const CUstreamCaptureMode mode :
       {CU_STREAM_CAPTURE_MODE_GLOBAL, CU_STREAM_CAPTURE_MODE_RELAXED}) {
    CUDA_OK(cuStreamBeginCapture(stream, mode));
    CUDA_OK(cuStreamSynchronize(other));
    EXPECT_EQ(InThread([] { return cuCtxSynchronize(); }).get(),
              CUDA_ERROR_STREAM_CAPTURE_UNSUPPORTED);
    CUstreamCaptureStatus status = CU_STREAM_CAPTURE_STATUS_NONE;
    CUDA_OK(cuStreamIsCapturing(stream, &status));
    EXPECT_EQ(status, CU_STREAM_CAPTURE_STATUS_INVALIDATED);
    CUgraph graph = nullptr;
    EXPECT_EQ(cuStreamEndCapture(stream, &graph), CUDA_ERROR_STREAM_CAPTURE_INVALIDATED);
    EXPECT_EQ(cuCtxSynchronize(), CUDA_SUCCESS);
  }
}

}  // namespace
}  // namespace gradsync::fakes
