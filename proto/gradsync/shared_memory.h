// The ABI between the daemon and a trainer besides gRPC messages: the form of the memory that both
// map, and the exchange on the side socket that brings its file descriptors. Any change here
// changes kSharedMemoryAbi, which OpenSession states.
//
// The daemon creates these memfds, and seals their size (shrink, grow):
//
//   arena       one per layout of a session: its buckets. Each bucket starts at a multiple of
//               kBucketAlignment; the size is the last bucket's end, rounded up to a page, or
//               above 2 MiB to a multiple of 2 MiB. The trainer writes a bucket until MarkReady,
//               the daemon from then until it is done.
//               After that the trainer may write it again; with LOSS_POLICY_HOLD only after
//               StepDone, because the replacement of another rank may get the average from it.
//   semaphores  one per layout of a session: a SemaphorePageHeader, then one BucketSemaphore per
//               bucket.
//   staging     one per session: Broadcast and the small all-reduce move tensors through it.
//
// In host memory the trainer populates and seals arena and semaphores before ArenaMapped, and
// staging before its first use. So their pages are charged to the trainer.
//
// On a GPU the arena is device memory instead (LayoutAssigned.memory). Both sides register the
// semaphores with the CUDA driver, so that their streams write the words and wait for them.
//
// The daemon bases no decision on this memory, because the trainer can write all of it.

#ifndef PROTO_GRADSYNC_SHARED_MEMORY_H_
#define PROTO_GRADSYNC_SHARED_MEMORY_H_

#include <atomic>
#include <cstddef>
#include <cstdint>

namespace gradsync {

inline constexpr std::uint32_t kSharedMemoryAbi = 1;

// Bytes. A pair of cache lines, so that adjacent-line prefetch never makes two buckets share a
// line, and every SIMD width is aligned.
inline constexpr std::size_t kBucketAlignment = 128;
// Bytes. Alignment of a parameter inside its bucket, as frameworks expect of a tensor's storage.
inline constexpr std::size_t kParameterAlignment = 64;

// When a session has ended, its client library writes kPoison + step to its words. A wait compares
// by a cyclic signed >=, so this releases every wait. Poison differs from the number of every step,
// because a run has fewer than 2^32 steps.
inline constexpr std::uint64_t kPoison = std::uint64_t{1} << 62;

// True if `word` releases a wait for `step`.
constexpr bool SemaphoreReleased(std::uint64_t word, std::uint64_t step) {
  return static_cast<std::int64_t>(word - step) >= 0;
}
constexpr bool SemaphorePoisoned(std::uint64_t word) { return (word & kPoison) != 0; }

inline constexpr int kDoneWakes = 16;

// One bucket's timeline semaphores. Each holds the number of a step.
//
// `done`: the last step in which the bucket is done, void steps too. The daemon writes it, or a
// worker. The host waits by futex on its low 32 bits, which are its first four bytes: the ABI is
// little-endian. A GPU's write wakes no futex. The daemon wakes kDoneWakes waiters at most, because
// it has other users to serve. If more threads wait, those that it has woken wake the others.
//
// `ready`: for arenas on a GPU only. The trainer's stream writes it when the bucket's gradients are
// written.
struct alignas(64) BucketSemaphore {
  std::atomic<std::uint64_t> done;
  std::atomic<std::uint64_t> ready;
};
static_assert(sizeof(BucketSemaphore) == 64);
static_assert(std::atomic<std::uint64_t>::is_always_lock_free);

// First 64 bytes of the semaphore memfd. `void_step` is the last void step. The daemon stores it
// before the done words of that step. So a waiter that such a done word releases sees that step, or
// a later void step. If it sees a later one, its own step is decided, and StepDone says how.
struct alignas(64) SemaphorePageHeader {
  std::atomic<std::uint64_t> void_step;
};
static_assert(sizeof(SemaphorePageHeader) == 64);

constexpr std::size_t SemaphoreBytes(std::size_t buckets) {
  return sizeof(SemaphorePageHeader) + buckets * sizeof(BucketSemaphore);
}

// ---- The side socket: SOCK_SEQPACKET, "X-fd.sock" beside "X.sock"
//
// The client sends one FdRequest. The daemon answers with one FdReply and closes the connection. If
// `status` is 0, the reply carries `fd_count` descriptors by SCM_RIGHTS. A nonce works once, within
// 60 s, for the process that owns the session.

inline constexpr std::uint32_t kFdMagic = 0x64736667;  // "gfsd"
inline constexpr std::size_t kNonceBytes = 16;

struct FdRequest {
  std::uint32_t magic = kFdMagic;
  std::uint32_t abi = kSharedMemoryAbi;
  std::uint8_t nonce[kNonceBytes] = {};
};
static_assert(sizeof(FdRequest) == 24);

// Descriptors for a layout's nonce: arena, semaphores; only semaphores with ARENA_MEMORY_CUDA_IPC.
// For the staging nonce: staging.
struct FdReply {
  std::uint32_t magic = kFdMagic;
  std::uint32_t status = 0;  // an absl::StatusCode; 0 is OK
  std::uint32_t fd_count = 0;
  char message[244] = {};  // why, if status is not 0; ends with NUL
};
static_assert(sizeof(FdReply) == 256);

}  // namespace gradsync

#endif  // PROTO_GRADSYNC_SHARED_MEMORY_H_
