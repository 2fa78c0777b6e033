// Limits how much of one kind of memory each user has: arenas on the host, arenas on GPUs, engines
// between nodes, or memory that the daemon itself keeps for the user.

#ifndef DAEMON_ARENA_ARENA_QUOTA_H_
#define DAEMON_ARENA_ARENA_QUOTA_H_

#include <cstdint>
#include <map>
#include <memory>
#include <utility>
#include <vector>

#include "absl/base/thread_annotations.h"
#include "absl/status/statusor.h"
#include "absl/strings/string_view.h"
#include "daemon/base/mutex.h"
#include "daemon/base/tenant.h"

namespace gradsync::daemon {

// Bounds the memory that another machine asks for, over all users that it names: it may name any
// user. Thread-safe.
class MemoryOrigin {
 public:
  virtual ~MemoryOrigin() = default;
  // Counts `bytes` more. RESOURCE_EXHAUSTED QUOTA: they would be too many. Then nothing changes.
  virtual absl::Status Take(std::uint64_t bytes) = 0;
  virtual void GiveBack(std::uint64_t bytes) = 0;
};

// Counts bytes per tenant and refuses reservations beyond the quota. Thread-safe. Outlives its
// reservations.
class ArenaQuota {
 public:
  // A share of the quota. Its destructor gives the share back. Keep it beside the memory that it
  // stands for. Move-only; not thread-safe.
  class Reservation {
   public:
    Reservation() = default;  // holds nothing
    Reservation(Reservation&& other) noexcept;
    Reservation& operator=(Reservation&& other) noexcept;
    ~Reservation();

    std::uint64_t bytes() const { return bytes_; }
    // The reservation holds `bytes` from now on. RESOURCE_EXHAUSTED as Reserve(); then nothing
    // changes. A reservation that was default-constructed or moved from always stays empty.
    absl::Status Resize(std::uint64_t bytes);
    // From now on it counts for the user alone.
    void LeaveOrigin();
    // Moves `bytes` of this reservation, or all if it has fewer, to the result.
    Reservation Split(std::uint64_t bytes);

   private:
    friend class ArenaQuota;
    Reservation(ArenaQuota* quota, const Tenant& user, std::uint64_t bytes,
                std::shared_ptr<MemoryOrigin> origin)
        : quota_(quota), user_(user), bytes_(bytes), origin_(std::move(origin)) {}
    void Release();

    ArenaQuota* quota_ = nullptr;  // null: holds nothing
    Tenant user_;
    std::uint64_t bytes_ = 0;
    std::shared_ptr<MemoryOrigin> origin_;  // may be null
  };

  // `option` is the config key of `bytes_per_user`. `what` names the kind of memory. Both are
  // string literals.
  explicit ArenaQuota(std::uint64_t bytes_per_user,
                      absl::string_view option = "quota_arena_bytes_per_user",
                      absl::string_view what = "arena memory")
      : bytes_per_user_(bytes_per_user), option_(option), what_(what) {}
  ~ArenaQuota();
  ArenaQuota(const ArenaQuota&) = delete;
  ArenaQuota& operator=(const ArenaQuota&) = delete;

  // RESOURCE_EXHAUSTED if `user` would then hold more than its quota. The error names the requested
  // bytes, the held bytes, the quota and its config key. `origin` counts the bytes, too, and may
  // refuse them with an error of its own; null: the request comes from this machine. On error
  // nothing changes.
  absl::StatusOr<Reservation> Reserve(const Tenant& user, std::uint64_t bytes,
                                      std::shared_ptr<MemoryOrigin> origin = nullptr);

  std::uint64_t bytes_per_user() const { return bytes_per_user_; }
  // The users that hold something, in order, with their bytes.
  std::vector<std::pair<Tenant, std::uint64_t>> Users() const;
  // Bytes that all users hold together.
  std::uint64_t total_bytes() const;
  // Bytes that one user holds.
  std::uint64_t bytes_of(const Tenant& user) const;

 private:
  // Counts `bytes` more for the user and the origin, or returns why they may not have them.
  absl::Status Take(const Tenant& user, std::uint64_t bytes, MemoryOrigin* origin);
  void Release(const Tenant& user, std::uint64_t bytes, MemoryOrigin* origin);

  const std::uint64_t bytes_per_user_;
  const absl::string_view option_;
  const absl::string_view what_;
  mutable Mutex mutex_;
  std::map<Tenant, std::uint64_t> held_ ABSL_GUARDED_BY(mutex_);  // only users that hold something
};

// The tenant that is charged for memory. A value.
struct MemoryAccount {
  ArenaQuota* quota = nullptr;  // null: nothing is charged
  Tenant user;
  std::shared_ptr<MemoryOrigin> origin = nullptr;  // as for ArenaQuota::Reserve()

  // As ArenaQuota::Reserve().
  absl::StatusOr<ArenaQuota::Reservation> Reserve(std::uint64_t bytes) const {
    if (quota == nullptr) return ArenaQuota::Reservation();
    return quota->Reserve(user, bytes, origin);
  }
};

}  // namespace gradsync::daemon

#endif  // DAEMON_ARENA_ARENA_QUOTA_H_
