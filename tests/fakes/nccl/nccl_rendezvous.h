// The rendezvous of one communicator's ranks: a file that they all map, named by the unique id. It
// holds which ranks have joined and how far each is. A rank's data for a collective is in a file
// beside it.
//
// Every rank writes its own slot only. Thread-safe and process-safe.

#ifndef TESTS_FAKES_NCCL_NCCL_RENDEZVOUS_H_
#define TESTS_FAKES_NCCL_NCCL_RENDEZVOUS_H_

#include <atomic>
#include <cstddef>
#include <cstdint>
#include <functional>
#include <memory>
#include <string>

#include "tests/fakes/machine/state_folder.h"

namespace gradsync::fakes {

inline constexpr int kMaxNcclRanks = 64;

// The arguments of a collective on which the ranks must agree.
struct NcclCall {
  std::uint32_t datatype;    // ncclDataType_t
  std::uint32_t registered;  // 1 if its buffers are registered
  std::uint64_t count;
  // Offset in the registered memory. Ranks may differ here, but NCCL is faster if they do not.
  std::uint64_t offset;
  // Its group's size and its place there. Real ranks that differ here may hang or add up different
  // data: NCCL sorts the collectives of a group, and chooses their algorithm together.
  std::uint32_t group_size = 1;
  std::uint32_t group_place = 0;
};
bool operator==(const NcclCall& one, const NcclCall& other);
inline bool operator!=(const NcclCall& one, const NcclCall& other) { return !(one == other); }

struct NcclSlot {
  // Written before `joined`.
  std::int32_t pid;
  std::uint32_t gpu;
  std::uint64_t host;  // a hash of NCCL_HOSTID; 0 without it
  std::int32_t ranks;
  std::atomic<std::uint32_t> joined;
  std::atomic<std::uint32_t> leaving;  // 1 after this rank has finalized
  // Number, from 1, of the last collective with a call and data.
  std::atomic<std::uint64_t> launched;
  NcclCall call;  // written before `launched`
  // Number of the last collective of which this rank has read the data of all ranks.
  std::atomic<std::uint64_t> finished;
};

class NcclRendezvous {
 public:
  // Makes a new rendezvous and returns its name; "" if that fails.
  static std::string Create(const StateFolder& folder);
  // nullptr if no rendezvous has that name.
  static std::unique_ptr<NcclRendezvous> Open(const StateFolder& folder, const std::string& name);
  ~NcclRendezvous();
  NcclRendezvous(const NcclRendezvous&) = delete;
  NcclRendezvous& operator=(const NcclRendezvous&) = delete;

  NcclSlot& slot(int rank) const { return slots_[rank]; }

  // A rank's data of the running collective, mapped while the object lives.
  class Data {
   public:
    Data(const NcclRendezvous& rendezvous, int rank, std::size_t bytes, bool create);
    ~Data();
    Data(const Data&) = delete;
    Data& operator=(const Data&) = delete;
    void* get() const { return memory_; }  // nullptr if mapping failed

   private:
    void* memory_ = nullptr;
    std::size_t bytes_;
  };

 private:
  NcclRendezvous(std::string path, NcclSlot* slots) : path_(std::move(path)), slots_(slots) {}

  const std::string path_;
  NcclSlot* const slots_;
};

}  // namespace gradsync::fakes

#endif  // TESTS_FAKES_NCCL_NCCL_RENDEZVOUS_H_
