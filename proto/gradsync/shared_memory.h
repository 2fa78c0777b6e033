// What the daemon and a trainer share besides gRPC messages: the layout of the memory they both
// map, and the exchange on the side socket that brings its file descriptors. This is an ABI:
// kSharedMemoryAbi changes with any change here, and OpenSession states it.
//
// Per registered layout a session gets two memfds, both created and sealed (shrink, grow, seal) by
// the daemon:
//
//   arena       the buckets, each starting at a multiple of kBucketAlignment; size = the last
//   bucket's end, rounded up to a
//               page. Written by the trainer until MarkReady, by the daemon from then until done.
//   semaphores  one SemaphorePageHeader, then one BucketSemaphore per bucket.
//
// An arena on a GPU is device memory instead (LayoutAssigned.memory), and both sides register the
// semaphores with the driver, so that their streams write and wait for the words.
//
// and per session one staging memfd through which Broadcast and the small all-reduce move tensors.
//
// Nothing that the trainer can write here is ever read back by the daemon to decide anything.

#ifndef PROTO_GRADSYNC_SHARED_MEMORY_H_
#define PROTO_GRADSYNC_SHARED_MEMORY_H_

#include <atomic>
#include <cstddef>
#include <cstdint>

namespace gradsync {

inline constexpr std::uint32_t kSharedMemoryAbi = 1;

// Cache line pair: adjacent-line prefetch never makes two buckets share a line, and every SIMD
// width is aligned.
inline constexpr std::size_t kBucketAlignment = 128;
// Alignment of a parameter inside its bucket, in bytes: what frameworks expect of a tensor's
// storage.
inline constexpr std::size_t kParameterAlignment = 64;

// A word that a survivor writes to release waiters after the other side's death: kPoison + step.
// The comparison of a wait is a cyclic signed >=, so this releases every wait and can be told from
// a step (a run has fewer than 2^32 steps).
inline constexpr std::uint64_t kPoison = std::uint64_t{1} << 62;

// True if `word` releases a wait for `step`.
constexpr bool SemaphoreReleased(std::uint64_t word, std::uint64_t step) {
  return static_cast<std::int64_t>(word - step) >= 0;
}
constexpr bool SemaphorePoisoned(std::uint64_t word) { return (word & kPoison) != 0; }

// One bucket's timeline semaphores. `done`: written by the daemon with the step's number (host
// waits: futex on its low 32 bits, which on this little-endian ABI are its first four bytes; a
// GPU's write wakes no futex). `ready`: used by CUDA arenas alone, written by the trainer's stream
// with the step's number when the bucket's gradients are written.
struct alignas(64) BucketSemaphore {
  std::atomic<std::uint64_t> done;
  std::atomic<std::uint64_t> ready;
};
static_assert(sizeof(BucketSemaphore) == 64);
static_assert(std::atomic<std::uint64_t>::is_always_lock_free);

// First 64 bytes of the semaphore memfd. `void_step` is the last step that was declared void; it is
// stored before the done words of that step, so whoever is released by a void step's done word sees
// it.
struct alignas(64) SemaphorePageHeader {
  std::atomic<std::uint64_t> void_step;
};
static_assert(sizeof(SemaphorePageHeader) == 64);

constexpr std::size_t SemaphoreBytes(std::size_t buckets) {
  return sizeof(SemaphorePageHeader) + buckets * sizeof(BucketSemaphore);
}

// ---- The side socket (SOCK_SEQPACKET, "X-fd.sock" beside "X.sock")
// ----------------------------------------------------- The client sends one FdRequest; the daemon
// answers with one FdReply, which carries `fd_count` descriptors by SCM_RIGHTS when `status` is 0,
// and closes. A nonce works once, within 60 s, for the process that owns the session.

inline constexpr std::uint32_t kFdMagic = 0x64736667;  // "gfsd"
inline constexpr std::size_t kNonceBytes = 16;

struct FdRequest {
  std::uint32_t magic = kFdMagic;
  std::uint32_t abi = kSharedMemoryAbi;
  std::uint8_t nonce[kNonceBytes] = {};
};
static_assert(sizeof(FdRequest) == 24);

// Descriptors in order: layout nonce: arena (none of ARENA_MEMORY_CUDA_IPC), semaphores. Staging
// nonce: staging.
struct FdReply {
  std::uint32_t magic = kFdMagic;
  std::uint32_t status = 0;  // an absl::StatusCode; 0 is OK
  std::uint32_t fd_count = 0;
  char message[244] = {};  // NUL-terminated; why, if status is not 0
};
static_assert(sizeof(FdReply) == 256);

}  // namespace gradsync

#endif  // PROTO_GRADSYNC_SHARED_MEMORY_H_
