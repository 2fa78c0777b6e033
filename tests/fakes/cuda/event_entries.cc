// Events.

#include <memory>

#include "tests/fakes/cuda/call_site.h"
#include "tests/fakes/cuda/enqueue.h"

namespace gradsync::fakes {
namespace {

// For an invalid or destroyed event: nullptr and a violation.
std::shared_ptr<Event> EventOf(CUevent handle) {
  Driver& driver = *Driver::Get();
  std::shared_ptr<Event> event = driver.events.Find(handle);
  if (event == nullptr) {
    driver.folder.Note(kViolation, "an event that does not exist (any more) is used");
  }
  return event;
}

std::shared_ptr<Operation> RecordOf(Event& event) {
  daemon::MutexLock lock(&event.mutex);
  return event.record;
}

CUresult Record(CUevent handle, CUstream stream) {
  const std::shared_ptr<Event> event = EventOf(handle);
  if (event == nullptr) return CUDA_ERROR_INVALID_HANDLE;
  std::shared_ptr<Operation> record;
  const CUresult result = Enqueue(
      stream,
      [&](Context* context, Operation* operation) {
        operation->name = "cuEventRecord";
        return event->timeline == &context->timeline ? CUDA_SUCCESS : CUDA_ERROR_INVALID_HANDLE;
      },
      &record);
  if (result != CUDA_SUCCESS) return result;
  daemon::MutexLock lock(&event->mutex);
  event->record = std::move(record);
  return CUDA_SUCCESS;
}

// Waits for the latest record at the time of the call, not for later ones.
CUresult Wait(CUstream stream, CUevent handle) {
  const std::shared_ptr<Event> event = EventOf(handle);
  if (event == nullptr) return CUDA_ERROR_INVALID_HANDLE;
  return Enqueue(stream, [&](Context*, Operation* operation) {
    operation->name = "cuStreamWaitEvent";
    if (auto record = RecordOf(*event)) operation->after.push_back(std::move(record));
    return CUDA_SUCCESS;
  });
}

CUresult Elapsed(float* milliseconds, CUevent start_handle, CUevent end_handle) {
  const std::shared_ptr<Event> start = EventOf(start_handle);
  const std::shared_ptr<Event> end = EventOf(end_handle);
  if (start == nullptr || end == nullptr || !start->timing || !end->timing) {
    return CUDA_ERROR_INVALID_HANDLE;
  }
  const std::shared_ptr<Operation> first = RecordOf(*start);
  const std::shared_ptr<Operation> last = RecordOf(*end);
  if (first == nullptr || last == nullptr) return CUDA_ERROR_INVALID_HANDLE;
  Scheduler& scheduler = Driver::Get()->scheduler;
  if (!scheduler.Done(*first) || !scheduler.Done(*last)) return CUDA_ERROR_NOT_READY;
  *milliseconds = static_cast<float>((static_cast<double>(scheduler.DoneNs(*last)) -
                                      static_cast<double>(scheduler.DoneNs(*first))) /
                                     1e6);
  return CUDA_SUCCESS;
}

}  // namespace
}  // namespace gradsync::fakes

using namespace gradsync::fakes;  // NOLINT(google-build-using-namespace): a C API's bodies

extern "C" {

CUresult CUDAAPI cuEventCreate(CUevent* handle, unsigned int flags) {
  static CallSite site("cuEventCreate");
  return site.Run(Needs::kContext, [&] {
    constexpr unsigned int kKnown = CU_EVENT_BLOCKING_SYNC | CU_EVENT_DISABLE_TIMING;
    if ((flags & ~kKnown) != 0) return CUDA_ERROR_INVALID_VALUE;
    auto event = std::make_shared<Event>();
    event->timeline = &CurrentContext()->timeline;
    event->timing = (flags & CU_EVENT_DISABLE_TIMING) == 0;
    *handle = Driver::Get()->events.Add(std::move(event));
    return CUDA_SUCCESS;
  });
}

CUresult CUDAAPI cuEventDestroy_v2(CUevent handle) {
  static CallSite site("cuEventDestroy_v2");
  return site.Run(Needs::kContext, [&] {
    return Driver::Get()->events.Remove(handle) == nullptr ? CUDA_ERROR_INVALID_HANDLE
                                                           : CUDA_SUCCESS;
  });
}

CUresult CUDAAPI cuEventRecord(CUevent handle, CUstream stream) {
  static CallSite site("cuEventRecord");
  return site.Run(Needs::kContext, [&] { return Record(handle, stream); });
}

CUresult CUDAAPI cuStreamWaitEvent(CUstream stream, CUevent handle, unsigned int) {
  static CallSite site("cuStreamWaitEvent");
  return site.Run(Needs::kContext, [&] { return Wait(stream, handle); });
}

CUresult CUDAAPI cuEventQuery(CUevent handle) {
  static CallSite site("cuEventQuery");
  return site.Run(Needs::kContext, [&] {
    const std::shared_ptr<Event> event = EventOf(handle);
    if (event == nullptr) return CUDA_ERROR_INVALID_HANDLE;
    const std::shared_ptr<Operation> record = RecordOf(*event);
    return record == nullptr || Driver::Get()->scheduler.Done(*record) ? CUDA_SUCCESS
                                                                       : CUDA_ERROR_NOT_READY;
  });
}

CUresult CUDAAPI cuEventSynchronize(CUevent handle) {
  static CallSite site("cuEventSynchronize");
  return site.Run(Needs::kContext, [&] {
    const std::shared_ptr<Event> event = EventOf(handle);
    if (event == nullptr) return CUDA_ERROR_INVALID_HANDLE;
    Driver::Get()->scheduler.AwaitDone(RecordOf(*event));
    return CUDA_SUCCESS;
  });
}

CUresult CUDAAPI cuEventElapsedTime_v2(float* milliseconds, CUevent start, CUevent end) {
  static CallSite site("cuEventElapsedTime_v2");
  return site.Run(Needs::kContext, [&] { return Elapsed(milliseconds, start, end); });
}

CUresult CUDAAPI cuEventElapsedTime(float* milliseconds, CUevent start, CUevent end) {
  return cuEventElapsedTime_v2(milliseconds, start, end);
}

}  // extern "C"
