#include "tests/fakes/nccl/nccl_process.h"

#include <dlfcn.h>

namespace gradsync::fakes {
namespace {

std::string& LastError() {
  thread_local std::string text;
  return text;
}

// Like NCCL: the driver that the process has loaded from any path, else the loader's choice.
void* DriverLibrary() {
  static void* const library = [] {
    void* const loaded = dlopen("libcuda.so.1", RTLD_NOW | RTLD_NOLOAD);
    return loaded != nullptr ? loaded : dlopen("libcuda.so.1", RTLD_NOW);
  }();
  return library;
}

}  // namespace

NcclProcess* NcclProcess::Get() {
  static NcclProcess* const process = []() -> NcclProcess* {
    const StateFolder* const folder = StateFolder::OfThisProcess();
    return folder == nullptr ? nullptr : new NcclProcess(*folder);
  }();
  return process;
}

NcclPort* NcclProcess::port() {
  const auto find = reinterpret_cast<NcclPortFunction*>(DriverFunction(kNcclPortSymbol));
  return find == nullptr ? nullptr : find();
}

void* NcclProcess::DriverFunction(const char* name) {
  return DriverLibrary() == nullptr ? nullptr : dlsym(DriverLibrary(), name);
}

void NcclProcess::NoteRegistered(CUdeviceptr buffer) {
  daemon::MutexLock lock(&mutex_);
  registered_.insert(buffer);
}

void NcclProcess::NoteDeregistered(CUdeviceptr buffer) {
  daemon::MutexLock lock(&mutex_);
  registered_.erase(registered_.find(buffer));
}

bool NcclProcess::AnyRegistered(CUdeviceptr begin, std::size_t bytes) {
  daemon::MutexLock lock(&mutex_);
  const auto first = registered_.lower_bound(begin);
  return first != registered_.end() && *first < begin + bytes;
}

ncclResult_t NcclFailure(ncclResult_t result, const std::string& text) {
  LastError() = text;
  return result;
}

const char* NcclLastError() { return LastError().c_str(); }

}  // namespace gradsync::fakes
