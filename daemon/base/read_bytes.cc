#include "daemon/base/read_bytes.h"

#include <sys/socket.h>
#include <sys/stat.h>
#include <sys/syscall.h>
#include <sys/types.h>
#include <unistd.h>

#include <algorithm>
#include <array>
#include <atomic>
#include <cstddef>
#include <utility>

#include "daemon/base/clock.h"
#include "daemon/base/header_frames.h"

namespace {

using gradsync::daemon::HeaderFrames;
using gradsync::daemon::MonotonicNowNs;

// What was read from the descriptors of a number.
struct Reads {
  std::atomic<std::uint64_t> bytes{0};
  std::atomic<ino_t> socket{0};      // that LimitHeaders() got last; 0: none
  std::atomic<bool> limited{false};  // it is to be followed
  std::atomic<std::uint32_t> unfinished{0};
  std::atomic<ino_t> refused{0};  // the last socket that was refused; 0: none
  // These belong to LimitHeaders(), then to the thread that reads the connection.
  std::uint64_t counted_ns = 0;   // since when resets are counted
  std::uint64_t regained_ns = 0;  // when bytes that are no data were regained last
  HeaderFrames frames;
};

constexpr std::uint64_t kCountNs = 1'000'000'000;

#ifdef __SANITIZE_ADDRESS__
// LeakSanitizer reads every page when a process ends.
constexpr std::size_t kNumbers = std::size_t{1} << 14;
#else
// Linux gives no process larger numbers, unless its administrator says so (fs.nr_open). Only the
// pages of numbers in use take memory.
constexpr std::size_t kNumbers = std::size_t{1} << 20;
#endif
std::array<Reads, kNumbers> all_reads;

// Null: the number is too large.
Reads* ReadsOf(int descriptor) {
  const auto number = static_cast<std::size_t>(descriptor);
  return descriptor >= 0 && number < kNumbers ? &all_reads[number] : nullptr;
}

bool Names(int descriptor, ino_t socket) {
  struct stat named {};
  return fstat(descriptor, &named) == 0 && S_ISSOCK(named.st_mode) && named.st_ino == socket;
}

// False: there are too many headers, calls, resets or bytes that are no data.
bool TakeFrames(Reads* reads, const msghdr& message, std::size_t bytes) {
  // Few reads ask for the time: most connections reset few calls, and bring little but data.
  if (reads->frames.counts()) {
    const std::uint64_t now_ns = MonotonicNowNs();
    if (now_ns >= reads->counted_ns + kCountNs) {
      reads->counted_ns = now_ns;
      reads->frames.ForgetResets();
    }
    reads->frames.Regain(now_ns - std::exchange(reads->regained_ns, now_ns));
  }
  bool fine = true;
  for (std::size_t i = 0; fine && bytes > 0 && i < message.msg_iovlen; ++i) {
    const iovec& part = message.msg_iov[i];
    const std::size_t size = std::min(bytes, part.iov_len);
    fine = reads->frames.Take(static_cast<const char*>(part.iov_base), size);
    bytes -= size;
  }
  reads->unfinished.store(fine ? reads->frames.unfinished() : 0, std::memory_order_relaxed);
  return fine;
}

}  // namespace

// In the place of the C library's recvmsg(), for the whole program. A declaration with that name
// would have to repeat the C library's.
extern "C" ssize_t ReadMessage(int descriptor, msghdr* message, int flags) __asm__("recvmsg");
extern "C" ssize_t ReadMessage(int descriptor, msghdr* message, int flags) {
  const ssize_t bytes = syscall(SYS_recvmsg, descriptor, message, flags);
  if (bytes <= 0 || (flags & (MSG_PEEK | MSG_ERRQUEUE)) != 0) return bytes;
  Reads* const reads = ReadsOf(descriptor);
  if (reads == nullptr) return bytes;
  reads->bytes.fetch_add(static_cast<std::uint64_t>(bytes), std::memory_order_relaxed);
  if (!reads->limited.load(std::memory_order_acquire)) return bytes;
  if (TakeFrames(reads, *message, static_cast<std::size_t>(bytes))) return bytes;
  reads->limited.store(false);
  const ino_t socket = reads->socket.load();
  if (!Names(descriptor, socket)) return bytes;  // a later socket
  reads->refused.store(socket);
  shutdown(descriptor, SHUT_RDWR);
  return 0;
}

namespace gradsync::daemon {

std::uint64_t ReadBytes(int descriptor) {
  const Reads* const reads = ReadsOf(descriptor);
  return reads == nullptr ? 0 : reads->bytes.load(std::memory_order_relaxed);
}

void LimitHeaders(int descriptor, ino_t socket, const HeaderFrames& frames) {
  Reads* const reads = ReadsOf(descriptor);
  if (reads == nullptr) return;
  reads->frames = frames;
  reads->counted_ns = reads->regained_ns = MonotonicNowNs();
  reads->unfinished.store(0);
  reads->socket.store(socket);
  reads->limited.store(true, std::memory_order_release);
}

HeaderState HeadersOf(int descriptor, ino_t socket) {
  const Reads* const reads = ReadsOf(descriptor);
  if (reads == nullptr || socket == 0) return {};
  const bool is_last = reads->socket.load() == socket;
  return {is_last ? reads->unfinished.load(std::memory_order_relaxed) : 0,
          reads->refused.load() == socket};
}

}  // namespace gradsync::daemon
