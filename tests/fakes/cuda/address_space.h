// The device addresses of this process: reservations, mappings with their access rights, and
// registered host memory.
//
// A device address is reserved address space that the CPU cannot access: host code that
// dereferences a CUdeviceptr gets SIGSEGV, as on a real machine. The memory is mapped a second time
// (the shadow). The fake's queues use the shadow, after this class has checked the access.
//
// Thread-safe. Queues hold an AccessLock while they translate and use addresses; it delays
// unmapping.

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
  // Maps the whole allocation. No GPU may access it yet.
  CUresult Map(CUdeviceptr address, std::size_t bytes, std::shared_ptr<Allocation> allocation);
  // [address, address + bytes) must consist of whole mappings.
  CUresult Unmap(CUdeviceptr address, std::size_t bytes);
  CUresult SetAccess(CUdeviceptr address, std::size_t bytes, std::uint32_t gpu, AccessRight right);

  // Gives host memory a device address: the same address, as for page-locked memory of the driver;
  // or another one, which registered memory may have on a real machine.
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
    std::shared_ptr<Allocation> allocation;  // the mapping alone would keep it alive too
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
  // nullptr if `gpu` may not access every byte in this way.
  void* TranslateLocked(std::uint32_t gpu, CUdeviceptr address, std::size_t bytes,
                        bool write) const;

  mutable std::shared_mutex mutex_;
  Regions regions_;  // guarded by mutex_
};

// Delays unmapping while it lives.
class AccessLock {
 public:
  explicit AccessLock(const AddressSpace& space) : space_(space), lock_(space.mutex_) {}

  // The CPU's address of [address, address + bytes); nullptr if `gpu` may not access all of it.
  void* Translate(std::uint32_t gpu, CUdeviceptr address, std::size_t bytes, bool write) const {
    return space_.TranslateLocked(gpu, address, bytes, write);
  }

 private:
  const AddressSpace& space_;
  const std::shared_lock<std::shared_mutex> lock_;
};

}  // namespace gradsync::fakes

#endif  // TESTS_FAKES_CUDA_ADDRESS_SPACE_H_
