#include "tests/fakes/cuda/address_space.h"

#include <sys/mman.h>
#include <unistd.h>

#include <algorithm>
#include <mutex>
#include <utility>

namespace gradsync::fakes {
namespace {

CUdeviceptr Address(const void* pointer) { return reinterpret_cast<CUdeviceptr>(pointer); }

// Reserves address space that nothing can access and no forked child inherits. nullptr on failure.
std::uint8_t* Untouchable(std::size_t bytes, std::size_t alignment) {
  void* const raw = mmap(nullptr, bytes + alignment, PROT_NONE,
                         MAP_PRIVATE | MAP_ANONYMOUS | MAP_NORESERVE, -1, 0);
  if (raw == MAP_FAILED) return nullptr;
  auto* const start = static_cast<std::uint8_t*>(raw);
  std::uint8_t* const aligned = start + (alignment - Address(start) % alignment) % alignment;
  if (aligned > start) munmap(start, static_cast<std::size_t>(aligned - start));
  const std::size_t rest = alignment - static_cast<std::size_t>(aligned - start);
  if (rest > 0) munmap(aligned + bytes, rest);
  madvise(aligned, bytes, MADV_DONTFORK);
  return aligned;
}

}  // namespace

CUresult AddressSpace::Reserve(std::size_t bytes, CUdeviceptr* address) {
  std::uint8_t* const visible = Untouchable(bytes, kGranularity);
  std::uint8_t* const shadow = Untouchable(bytes, kGranularity);
  if (visible == nullptr || shadow == nullptr) return CUDA_ERROR_OUT_OF_MEMORY;
  *address = Address(visible);
  const std::unique_lock<std::shared_mutex> lock(mutex_);
  regions_[*address] = Region{bytes, shadow, nullptr, true, {}};
  return CUDA_SUCCESS;
}

CUresult AddressSpace::Release(CUdeviceptr address, std::size_t bytes) {
  const std::unique_lock<std::shared_mutex> lock(mutex_);
  const auto region = regions_.find(address);
  if (region == regions_.end() || region->second.bytes != bytes || region->second.host != nullptr ||
      !region->second.mappings.empty()) {
    return CUDA_ERROR_INVALID_VALUE;
  }
  munmap(reinterpret_cast<void*>(address), bytes);
  munmap(region->second.shadow, bytes);
  regions_.erase(region);
  return CUDA_SUCCESS;
}

CUresult AddressSpace::Map(CUdeviceptr address, std::size_t bytes,
                           std::shared_ptr<Allocation> allocation) {
  const std::unique_lock<std::shared_mutex> lock(mutex_);
  const auto found = FindLocked(address, bytes);
  if (found == regions_.end() || found->second.host != nullptr ||
      bytes != allocation->header().bytes) {
    return CUDA_ERROR_INVALID_VALUE;
  }
  Region& region = found->second;
  const std::size_t offset = address - found->first;
  for (const auto& [start, mapping] : region.mappings) {
    if (start < offset + bytes && offset < start + mapping.bytes) return CUDA_ERROR_INVALID_VALUE;
  }
  if (mmap(region.shadow + offset, bytes, PROT_READ | PROT_WRITE, MAP_SHARED | MAP_FIXED,
           allocation->fd(), kHeaderBytes) == MAP_FAILED) {
    return CUDA_ERROR_OUT_OF_MEMORY;
  }
  madvise(region.shadow + offset, bytes, MADV_DONTFORK);
  region.mappings[offset] = Mapping{bytes, std::move(allocation), {}};
  return CUDA_SUCCESS;
}

CUresult AddressSpace::Unmap(CUdeviceptr address, std::size_t bytes) {
  const std::unique_lock<std::shared_mutex> lock(mutex_);
  const auto found = FindLocked(address, bytes);
  if (found == regions_.end() || found->second.host != nullptr) return CUDA_ERROR_INVALID_VALUE;
  auto& mappings = found->second.mappings;
  const std::size_t start = address - found->first;
  const auto first = mappings.find(start);
  auto last = first;
  std::size_t end = start;
  while (last != mappings.end() && last->first == end && end < start + bytes) {
    end += last->second.bytes;
    ++last;
  }
  if (end != start + bytes) return CUDA_ERROR_INVALID_VALUE;
  if (mmap(found->second.shadow + start, bytes, PROT_NONE,
           MAP_PRIVATE | MAP_ANONYMOUS | MAP_NORESERVE | MAP_FIXED, -1, 0) == MAP_FAILED) {
    return CUDA_ERROR_OUT_OF_MEMORY;
  }
  mappings.erase(first, last);
  return CUDA_SUCCESS;
}

CUresult AddressSpace::SetAccess(CUdeviceptr address, std::size_t bytes, std::uint32_t gpu,
                                 AccessRight right) {
  const std::unique_lock<std::shared_mutex> lock(mutex_);
  const auto found = FindLocked(address, bytes);
  if (found == regions_.end() || found->second.host != nullptr) return CUDA_ERROR_INVALID_VALUE;
  const std::size_t start = address - found->first;
  std::size_t end = start;
  for (auto& [offset, mapping] : found->second.mappings) {
    if (offset != end || end >= start + bytes) continue;
    mapping.rights[gpu] = right;
    end += mapping.bytes;
  }
  return end == start + bytes ? CUDA_SUCCESS : CUDA_ERROR_INVALID_VALUE;
}

CUresult AddressSpace::RegisterHost(void* host, std::size_t bytes, bool same_address) {
  const auto page = static_cast<std::size_t>(sysconf(_SC_PAGESIZE));
  const std::size_t into_page = Address(host) % page;
  const std::size_t span = (into_page + bytes + page - 1) / page * page;
  // Fails for addresses without a mapping, as page-locking does on a real machine.
  if (bytes == 0 || msync(static_cast<std::uint8_t*>(host) - into_page, span, MS_ASYNC) != 0) {
    return CUDA_ERROR_INVALID_VALUE;
  }
  const std::unique_lock<std::shared_mutex> lock(mutex_);
  for (const auto& [address, region] : regions_) {
    if (region.host != nullptr && Address(region.host) < Address(host) + bytes &&
        Address(host) < Address(region.host) + region.bytes) {
      return CUDA_ERROR_HOST_MEMORY_ALREADY_REGISTERED;
    }
  }
  auto* const shadow = static_cast<std::uint8_t*>(host);
  std::uint8_t* const visible = same_address ? shadow : Untouchable(span, page) + into_page;
  Mapping whole{bytes, nullptr, {}};
  whole.rights.fill(AccessRight::kReadWrite);
  regions_[Address(visible)] = Region{bytes, shadow, host, !same_address, {{0, whole}}};
  return CUDA_SUCCESS;
}

CUresult AddressSpace::UnregisterHost(void* host) {
  const std::unique_lock<std::shared_mutex> lock(mutex_);
  for (auto region = regions_.begin(); region != regions_.end(); ++region) {
    if (region->second.host != host) continue;
    if (region->second.owns_address) {
      const auto page = static_cast<std::size_t>(sysconf(_SC_PAGESIZE));
      const std::size_t into_page = region->first % page;
      munmap(reinterpret_cast<void*>(region->first - into_page),
             (into_page + region->second.bytes + page - 1) / page * page);
    }
    regions_.erase(region);
    return CUDA_SUCCESS;
  }
  return CUDA_ERROR_HOST_MEMORY_NOT_REGISTERED;
}

std::optional<CUdeviceptr> AddressSpace::DeviceAddressOf(const void* host) const {
  const std::shared_lock<std::shared_mutex> lock(mutex_);
  for (const auto& [address, region] : regions_) {
    if (region.host != nullptr && Address(host) >= Address(region.host) &&
        Address(host) < Address(region.host) + region.bytes) {
      return address + (Address(host) - Address(region.host));
    }
  }
  return std::nullopt;
}

bool AddressSpace::IsRegisteredHost(const void* host, std::size_t bytes) const {
  const std::shared_lock<std::shared_mutex> lock(mutex_);
  return std::any_of(regions_.begin(), regions_.end(), [&](const auto& entry) {
    const Region& region = entry.second;
    return region.host != nullptr && Address(host) >= Address(region.host) &&
           Address(host) + bytes <= Address(region.host) + region.bytes;
  });
}

bool AddressSpace::Contains(CUdeviceptr address) const {
  const std::shared_lock<std::shared_mutex> lock(mutex_);
  return FindLocked(address, 1) != regions_.end();
}

AddressSpace::Regions::iterator AddressSpace::FindLocked(CUdeviceptr address, std::size_t bytes) {
  auto region = regions_.upper_bound(address);
  if (region == regions_.begin()) return regions_.end();
  --region;
  const std::size_t offset = address - region->first;
  const std::size_t size = region->second.bytes;
  return offset < size && bytes <= size - offset ? region : regions_.end();
}

AddressSpace::Regions::const_iterator AddressSpace::FindLocked(CUdeviceptr address,
                                                               std::size_t bytes) const {
  return const_cast<AddressSpace*>(this)->FindLocked(address, bytes);
}

void* AddressSpace::TranslateLocked(std::uint32_t gpu, CUdeviceptr address, std::size_t bytes,
                                    bool write) const {
  const auto found = FindLocked(address, bytes);
  if (found == regions_.end()) return nullptr;
  const std::size_t start = address - found->first;
  std::size_t covered = start;
  for (const auto& [offset, mapping] : found->second.mappings) {
    if (offset + mapping.bytes <= covered || covered >= start + bytes) continue;
    const AccessRight right = mapping.rights[gpu];
    if (offset > covered || right == AccessRight::kNone ||
        (write && right != AccessRight::kReadWrite)) {
      return nullptr;
    }
    covered = offset + mapping.bytes;
  }
  return covered >= start + bytes ? found->second.shadow + start : nullptr;
}

}  // namespace gradsync::fakes
