#include "tests/fakes/nccl/nccl_rendezvous.h"

#include <sys/mman.h>
#include <sys/random.h>
#include <unistd.h>

#include <cstdio>
#include <utility>

#include "tests/fakes/machine/shared_file.h"

namespace gradsync::fakes {
namespace {

constexpr std::size_t kSlotsBytes = kMaxNcclRanks * sizeof(NcclSlot);

}  // namespace

bool operator==(const NcclCall& one, const NcclCall& other) {
  return one.datatype == other.datatype && one.registered == other.registered &&
         one.count == other.count && one.group_size == other.group_size &&
         one.group_place == other.group_place;
}

std::string NcclRendezvous::Create(const StateFolder& folder) {
  std::uint64_t number = 0;
  if (getrandom(&number, sizeof(number), 0) != sizeof(number)) return "";
  char name[32];
  std::snprintf(name, sizeof(name), "nccl.%016llx", static_cast<unsigned long long>(number));
  const daemon::UniqueFd fd = OpenShared(folder.PathOf(name), O_RDWR | O_CREAT | O_EXCL);
  return fd.valid() && ftruncate(fd.get(), kSlotsBytes) == 0 ? name : "";
}

std::unique_ptr<NcclRendezvous> NcclRendezvous::Open(const StateFolder& folder,
                                                     const std::string& name) {
  if (name.compare(0, 5, "nccl.") != 0 || name.find('/') != std::string::npos) return nullptr;
  std::string path = folder.PathOf(name);
  const daemon::UniqueFd fd = OpenShared(path, O_RDWR);
  if (!fd.valid()) return nullptr;
  void* const slots = mmap(nullptr, kSlotsBytes, PROT_READ | PROT_WRITE, MAP_SHARED, fd.get(), 0);
  if (slots == MAP_FAILED) return nullptr;
  return std::unique_ptr<NcclRendezvous>(
      new NcclRendezvous(std::move(path), static_cast<NcclSlot*>(slots)));
}

NcclRendezvous::~NcclRendezvous() { munmap(slots_, kSlotsBytes); }

NcclRendezvous::Data::Data(const NcclRendezvous& rendezvous, int rank, std::size_t bytes,
                           bool create)
    : bytes_(bytes) {
  const daemon::UniqueFd fd =
      OpenShared(rendezvous.path_ + "." + std::to_string(rank), create ? O_RDWR | O_CREAT : O_RDWR);
  if (!fd.valid() || (create && ftruncate(fd.get(), static_cast<off_t>(bytes)) != 0)) return;
  void* const memory =
      mmap(nullptr, bytes, PROT_READ | (create ? PROT_WRITE : 0), MAP_SHARED, fd.get(), 0);
  if (memory != MAP_FAILED) memory_ = memory;
}

NcclRendezvous::Data::~Data() {
  if (memory_ != nullptr) munmap(memory_, bytes_);
}

}  // namespace gradsync::fakes
