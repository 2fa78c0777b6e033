// cuMemAlloc and the handles by which other processes open such memory (legacy IPC).
//
// Small allocations share a block of 2 MiB, and a handle names the block: cuIpcOpenMemHandle
// returns the beginning of the block, not of the allocation. If a process frees memory that another
// process has open, that is a violation, and the memory is filled with a pattern.

#include <sys/file.h>
#include <sys/stat.h>
#include <unistd.h>

#include <cstring>
#include <map>
#include <memory>
#include <string>

#include "tests/fakes/cuda/call_site.h"

namespace gradsync::fakes {
namespace {

constexpr std::size_t kSmallBytes = kGranularity / 2;
constexpr std::size_t kSmallAlignment = 512;
constexpr int kFreedPattern = 0xDB;
constexpr std::uint64_t kHandleMagic = 0x6970'6368'616e'646c;

struct Block {
  const Context* context = nullptr;
  std::shared_ptr<Allocation> allocation;
  CUdeviceptr address = 0;
  std::size_t bytes = 0;
  std::size_t given_out = 0;    // bytes that small allocations have taken from the front
  std::size_t allocations = 0;  // live allocations
  std::size_t opened = 0;       // how often another process's block is open here
};

// The content of a CUipcMemHandle.
struct IpcHandle {
  std::uint64_t magic;
  std::uint64_t id;
  std::uint64_t pid_namespace;
  std::uint32_t gpu;
  std::int32_t pid;
};
static_assert(sizeof(IpcHandle) <= sizeof(CUipcMemHandle));

// All memory of this kind in this process. Thread-safe.
class LegacyMemory {
 public:
  static LegacyMemory& Get() {
    static auto* const memory = new LegacyMemory;
    return *memory;
  }

  CUresult Allocate(CUdeviceptr* address, std::size_t bytes);
  CUresult Free(CUdeviceptr address);
  CUresult GetHandle(IpcHandle* handle, CUdeviceptr address);
  CUresult Open(CUdeviceptr* address, const IpcHandle& handle);
  CUresult Close(CUdeviceptr address);
  void Release(const Context& context);

 private:
  using Blocks = std::map<CUdeviceptr, std::shared_ptr<Block>>;

  // A block of its own size, mapped and accessible to the context's GPU.
  CUresult MapLocked(const Context& context, std::shared_ptr<Allocation> allocation,
                     std::shared_ptr<Block>* block) ABSL_EXCLUSIVE_LOCKS_REQUIRED(mutex_);
  void UnmapLocked(const Block& block) ABSL_EXCLUSIVE_LOCKS_REQUIRED(mutex_);

  daemon::Mutex mutex_;
  Blocks allocations_ ABSL_GUARDED_BY(mutex_);  // by the addresses of cuMemAlloc
  Blocks opened_ ABSL_GUARDED_BY(mutex_);       // by those of cuIpcOpenMemHandle
  // The newest block for small allocations.
  std::map<const Context*, std::shared_ptr<Block>> small_ ABSL_GUARDED_BY(mutex_);
};

std::uint64_t PidNamespace() {
  struct stat status {};
  return stat("/proc/self/ns/pid", &status) == 0 ? status.st_ino : 0;
}

CUresult LegacyMemory::MapLocked(const Context& context, std::shared_ptr<Allocation> allocation,
                                 std::shared_ptr<Block>* block) {
  AddressSpace& addresses = Driver::Get()->addresses;
  auto made = std::make_shared<Block>();
  made->context = &context;
  made->bytes = allocation->header().bytes;
  CUresult result = addresses.Reserve(made->bytes, &made->address);
  if (result == CUDA_SUCCESS) result = addresses.Map(made->address, made->bytes, allocation);
  if (result == CUDA_SUCCESS) {
    result = addresses.SetAccess(made->address, made->bytes, context.gpu, AccessRight::kReadWrite);
  }
  made->allocation = std::move(allocation);
  *block = std::move(made);
  return result;
}

void LegacyMemory::UnmapLocked(const Block& block) {
  AddressSpace& addresses = Driver::Get()->addresses;
  addresses.Unmap(block.address, block.bytes);
  addresses.Release(block.address, block.bytes);
}

CUresult LegacyMemory::Allocate(CUdeviceptr* address, std::size_t bytes) {
  if (bytes == 0) return CUDA_ERROR_INVALID_VALUE;
  const Context& context = *CurrentContext();
  const bool is_small = bytes <= kSmallBytes;
  daemon::MutexLock lock(&mutex_);
  std::shared_ptr<Block> block = is_small ? small_[&context] : nullptr;
  if (block == nullptr || block->allocations == 0 || block->bytes - block->given_out < bytes) {
    const std::size_t whole = (bytes + kGranularity - 1) / kGranularity * kGranularity;
    auto allocation = Allocation::Create(Driver::Get()->folder, context.gpu, MemoryKind::kLegacy,
                                         is_small ? kGranularity : whole);
    if (allocation == nullptr) return CUDA_ERROR_OUT_OF_MEMORY;
    const CUresult result = MapLocked(context, std::move(allocation), &block);
    if (result != CUDA_SUCCESS) return result;
    if (is_small) small_[&context] = block;
  }
  *address = block->address + block->given_out;
  ++block->allocations;
  block->given_out += (bytes + kSmallAlignment - 1) / kSmallAlignment * kSmallAlignment;
  allocations_[*address] = std::move(block);
  return CUDA_SUCCESS;
}

CUresult LegacyMemory::Free(CUdeviceptr address) {
  Driver& driver = *Driver::Get();
  daemon::MutexLock lock(&mutex_);
  const auto found = allocations_.find(address);
  if (found == allocations_.end()) return CUDA_ERROR_INVALID_VALUE;
  const std::shared_ptr<Block> block = found->second;
  allocations_.erase(found);
  if (--block->allocations > 0) return CUDA_SUCCESS;
  small_.erase(block->context);
  {
    const AccessLock access(driver.addresses);
    void* const memory = access.Translate(block->context->gpu, block->address, block->bytes, true);
    // The lock becomes exclusive only if no other process holds one.
    if (flock(block->allocation->fd(), LOCK_EX | LOCK_NB) != 0) {
      driver.folder.Note(kViolation, "cuMemFree of memory that another process has open");
      std::memset(memory, kFreedPattern, block->bytes);
    }
  }
  UnmapLocked(*block);
  block->allocation.reset();
  return CUDA_SUCCESS;
}

CUresult LegacyMemory::GetHandle(IpcHandle* handle, CUdeviceptr address) {
  daemon::MutexLock lock(&mutex_);
  const auto found = allocations_.find(address);
  // The address must be the beginning of an allocation.
  if (found == allocations_.end()) return CUDA_ERROR_INVALID_VALUE;
  const AllocationHeader& header = found->second->allocation->header();
  *handle = IpcHandle{kHandleMagic, header.id, PidNamespace(), header.gpu, header.pid};
  return CUDA_SUCCESS;
}

CUresult LegacyMemory::Open(CUdeviceptr* address, const IpcHandle& handle) {
  Driver& driver = *Driver::Get();
  const Context& context = *CurrentContext();
  if (handle.magic != kHandleMagic || handle.pid_namespace != PidNamespace()) {
    return CUDA_ERROR_INVALID_VALUE;
  }
  if (handle.pid == getpid()) return CUDA_ERROR_INVALID_CONTEXT;
  if (handle.gpu != context.gpu) return CUDA_ERROR_INVALID_DEVICE;  // the fake has no peer access
  daemon::MutexLock lock(&mutex_);
  for (const auto& [start, block] : opened_) {
    if (block->allocation->header().id == handle.id && block->context == &context) {
      ++block->opened;
      *address = start;
      return CUDA_SUCCESS;
    }
  }
  auto allocation = Allocation::Find(driver.folder, handle.gpu, handle.id);
  if (allocation == nullptr || allocation->header().kind != MemoryKind::kLegacy) {
    return CUDA_ERROR_INVALID_VALUE;
  }
  std::shared_ptr<Block> block;
  const CUresult result = MapLocked(context, std::move(allocation), &block);
  if (result != CUDA_SUCCESS) return result;
  block->opened = 1;
  *address = block->address;
  opened_[*address] = std::move(block);
  return CUDA_SUCCESS;
}

CUresult LegacyMemory::Close(CUdeviceptr address) {
  daemon::MutexLock lock(&mutex_);
  const auto found = opened_.find(address);
  if (found == opened_.end()) return CUDA_ERROR_INVALID_VALUE;
  if (--found->second->opened > 0) return CUDA_SUCCESS;
  UnmapLocked(*found->second);
  opened_.erase(found);
  return CUDA_SUCCESS;
}

void LegacyMemory::Release(const Context& context) {
  daemon::MutexLock lock(&mutex_);
  small_.erase(&context);
  for (Blocks* blocks : {&allocations_, &opened_}) {
    for (auto entry = blocks->begin(); entry != blocks->end();) {
      if (entry->second->context != &context) {
        ++entry;
        continue;
      }
      // The block ends with its last allocation.
      if (blocks == &opened_ || --entry->second->allocations == 0) UnmapLocked(*entry->second);
      entry = blocks->erase(entry);
    }
  }
}

CUresult FreeIdle(CUdeviceptr address) {
  Driver& driver = *Driver::Get();
  const Timeline& timeline = CurrentContext()->timeline;
  // cuMemFree synchronizes the device first.
  driver.scheduler.AwaitNothing(Operation::Kind::kWordWait, timeline, "cuMemFree_v2");
  driver.scheduler.AwaitIdle(timeline);
  return LegacyMemory::Get().Free(address);
}

}  // namespace

void ReleaseLegacyMemory(const Context& context) { LegacyMemory::Get().Release(context); }

}  // namespace gradsync::fakes

using namespace gradsync::fakes;  // NOLINT(google-build-using-namespace): a C API's bodies

extern "C" {

CUresult CUDAAPI cuMemAlloc_v2(CUdeviceptr* address, std::size_t bytes) {
  static CallSite site("cuMemAlloc_v2");
  return site.Run(Needs::kContext, [&] { return LegacyMemory::Get().Allocate(address, bytes); });
}

CUresult CUDAAPI cuMemFree_v2(CUdeviceptr address) {
  static CallSite site("cuMemFree_v2");
  return site.Run(Needs::kContext, [&] { return address == 0 ? CUDA_SUCCESS : FreeIdle(address); });
}

CUresult CUDAAPI cuIpcGetMemHandle(CUipcMemHandle* handle, CUdeviceptr address) {
  static CallSite site("cuIpcGetMemHandle");
  return site.Run(Needs::kContext, [&] {
    IpcHandle content{};
    const CUresult result = LegacyMemory::Get().GetHandle(&content, address);
    *handle = {};
    std::memcpy(handle->reserved, &content, sizeof(content));
    return result;
  });
}

CUresult CUDAAPI cuIpcOpenMemHandle_v2(CUdeviceptr* address, CUipcMemHandle handle,
                                       unsigned int flags) {
  static CallSite site("cuIpcOpenMemHandle_v2");
  return site.Run(Needs::kContext, [&] {
    if (flags != CU_IPC_MEM_LAZY_ENABLE_PEER_ACCESS) return CUDA_ERROR_INVALID_VALUE;
    IpcHandle content{};
    std::memcpy(&content, handle.reserved, sizeof(content));
    return LegacyMemory::Get().Open(address, content);
  });
}

CUresult CUDAAPI cuIpcCloseMemHandle(CUdeviceptr address) {
  static CallSite site("cuIpcCloseMemHandle");
  return site.Run(Needs::kContext, [&] {
    Driver& driver = *Driver::Get();
    driver.scheduler.AwaitNothing(Operation::Kind::kWordWait, CurrentContext()->timeline,
                                  "cuIpcCloseMemHandle");
    return LegacyMemory::Get().Close(address);
  });
}

}  // extern "C"
