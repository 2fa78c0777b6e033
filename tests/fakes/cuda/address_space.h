// The device addresses of this process: reservations, what is mapped into them with which access,
// and registered host memory.
//
// A device address is reserved address space that the CPU cannot touch, so host code that follows a
// CUdeviceptr gets SIGSEGV as it would on a real machine. The memory itself is mapped a second time
// (the shadow), where the fake's queues reach it after the access has been checked here.
//
// Thread-safe. Queues translate and use addresses under an AccessLock, which holds off unmapping.

#ifndef TESTS_FAKES_CUDA_ADDRESS_SPACE_H_
#define TESTS_FAKES_CUDA_ADDRESS_SPACE_H_

#include <array>
#include <cstddef>
#include <cstdint>
#include <map>
#include <memory>
#include <optional>
#include <shared_mutex>

#include "tests/fakes/cuda/cuda_declarations.h"
#include "tests/fakes/machine/device_memory.h"

namespace gradsync::fakes {

inline constexpr std::size_t kGranularity = std::size_t{2} << 20;

enum class AccessRight : std::uint8_t { kNone, kRead, kReadWrite };

class AddressSpace {
 public:
  // Address space for `bytes`, aligned to kGranularity.
  CUresult Reserve(std::size_t bytes, CUdeviceptr* address);
  CUresult Release(CUdeviceptr address, std::size_t bytes);
  // Maps the whole allocation; nothing may access it yet.
  CUresult Map(CUdeviceptr address, std::size_t bytes, std::shared_ptr<Allocation> allocation);
  // [address, address + bytes) must be whole mappings.
  CUresult Unmap(CUdeviceptr address, std::size_t bytes);
  CUresult SetAccess(CUdeviceptr address, std::size_t bytes, std::uint32_t gpu, AccessRight right);

  // Gives host memory a device address: its own (as page-locked memory of the driver has) or
  // another one (as registered memory may have; the worse case).
  CUresult RegisterHost(void* host, std::size_t bytes, bool same_address);
  CUresult UnregisterHost(void* host);
  std::optional<CUdeviceptr> DeviceAddressOf(const void* host) const;
  // True if every byte is registered host memory.
  bool IsRegisteredHost(const void* host, std::size_t bytes) const;
  // True if `address` lies in any device address range of this process.
  bool Contains(CUdeviceptr address) const;

 private:
  friend class AccessLock;
  struct Mapping {
    std::size_t bytes;
    std::shared_ptr<Allocation> allocation;  // keeps nothing alive that the mapping does not
    std::array<AccessRight, kMaxGpus> rights{};
  };
  struct Region {
    std::size_t bytes;
    std::uint8_t* shadow;                     // of the region's first byte
    const void* host;                         // registered host memory; nullptr: device addresses
    bool owns_address;                        // the device addresses are mapped by Reserve
    std::map<std::size_t, Mapping> mappings;  // by offset
  };
  using Regions = std::map<CUdeviceptr, Region>;

  Regions::iterator FindLocked(CUdeviceptr address, std::size_t bytes);
  Regions::const_iterator FindLocked(CUdeviceptr address, std::size_t bytes) const;
  // nullptr if any byte is not accessible to `gpu` in this way.
  void* TranslateLocked(std::uint32_t gpu, CUdeviceptr address, std::size_t bytes,
                        bool write) const;

  mutable std::shared_mutex mutex_;
  Regions regions_;  // guarded by mutex_
};

// While it lives, nothing is unmapped.
class AccessLock {
 public:
  explicit AccessLock(const AddressSpace& space) : space_(space), lock_(space.mutex_) {}

  // Where the CPU finds [address, address + bytes); nullptr if `gpu` may not access all of it.
  void* Translate(std::uint32_t gpu, CUdeviceptr address, std::size_t bytes, bool write) const {
    return space_.TranslateLocked(gpu, address, bytes, write);
  }

 private:
  const AddressSpace& space_;
  const std::shared_lock<std::shared_mutex> lock_;
};

}  // namespace gradsync::fakes

#endif  // TESTS_FAKES_CUDA_ADDRESS_SPACE_H_
