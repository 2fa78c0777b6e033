// Where the ranks of one communicator meet: a file that they all map, named by the unique id. It
// holds who has joined and how far each rank is; what a rank contributes to a collective lies in a
// file of its own beside it.
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

// What the ranks must agree on in one collective.
struct NcclCall {
  enum class Kind : std::uint32_t { kAllReduce, kBroadcast };
  Kind kind;
  std::uint32_t datatype;   // ncclDataType_t
  std::uint32_t operation;  // ncclRedOp_t
  std::uint32_t root;
  std::uint32_t registered;  // 1: its buffers are registered
  std::uint64_t count;
  // Bytes into what is registered. They need not agree, but NCCL sums faster if they do.
  std::uint64_t offset;
};
bool operator==(const NcclCall& one, const NcclCall& other);
inline bool operator!=(const NcclCall& one, const NcclCall& other) { return !(one == other); }

struct NcclSlot {
  // Written before `joined`.
  std::int32_t pid;
  std::uint32_t gpu;
  std::int32_t ranks;
  std::atomic<std::uint32_t> joined;
  std::atomic<std::uint32_t> leaving;  // has finalized
  // The collective, counted from 1, whose call and data are there.
  std::atomic<std::uint64_t> launched;
  NcclCall call;  // written before `launched`
  // The last one for which this rank has read everybody's data.
  std::atomic<std::uint64_t> finished;
};

class NcclRendezvous {
 public:
  // A new one; its name, or "" if that fails.
  static std::string Create(const StateFolder& folder);
  // nullptr if there is none of that name.
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
    void* get() const { return memory_; }  // nullptr if that failed

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
