// How much memory each user has in arenas: of the host, or of GPUs.

#ifndef DAEMON_ARENA_ARENA_QUOTA_H_
#define DAEMON_ARENA_ARENA_QUOTA_H_

#include <sys/types.h>

#include <cstdint>
#include <map>

#include "absl/base/thread_annotations.h"
#include "absl/status/statusor.h"
#include "absl/strings/string_view.h"
#include "daemon/base/mutex.h"

namespace gradsync {

// Counts arena bytes per uid and refuses what goes beyond the quota. Thread-safe. Outlives its
// reservations.
class ArenaQuota {
 public:
  // A share of the quota, given back when it is destroyed. Belongs beside the memory it stands for.
  // Move-only; not thread-safe.
  class Reservation {
   public:
    Reservation() = default;  // of nothing
    Reservation(Reservation&& other) noexcept;
    Reservation& operator=(Reservation&& other) noexcept;
    ~Reservation();

    std::uint64_t bytes() const { return bytes_; }

   private:
    friend class ArenaQuota;
    Reservation(ArenaQuota* quota, uid_t uid, std::uint64_t bytes)
        : quota_(quota), uid_(uid), bytes_(bytes) {}
    void Release();

    ArenaQuota* quota_ = nullptr;  // null: holds nothing
    uid_t uid_ = 0;
    std::uint64_t bytes_ = 0;
  };

  // `option` is the config's key that `bytes_per_user` comes from, `what` the memory's name; both
  // are literals.
  explicit ArenaQuota(std::uint64_t bytes_per_user,
                      absl::string_view option = "quota_arena_bytes_per_user",
                      absl::string_view what = "arena memory")
      : bytes_per_user_(bytes_per_user), option_(option), what_(what) {}
  ~ArenaQuota();
  ArenaQuota(const ArenaQuota&) = delete;
  ArenaQuota& operator=(const ArenaQuota&) = delete;

  // RESOURCE_EXHAUSTED if `uid` would then hold more than its quota; the message says what was
  // asked, what is held, the quota and its config key. Nothing changes then.
  absl::StatusOr<Reservation> Reserve(uid_t uid, std::uint64_t bytes);

  // What all users hold together.
  std::uint64_t total_bytes() const;
  // What one user holds.
  std::uint64_t bytes_of(uid_t uid) const;

 private:
  void Release(uid_t uid, std::uint64_t bytes);

  const std::uint64_t bytes_per_user_;
  const absl::string_view option_;
  const absl::string_view what_;
  mutable Mutex mutex_;
  std::map<uid_t, std::uint64_t> held_ ABSL_GUARDED_BY(mutex_);  // only users that hold something
};

}  // namespace gradsync

#endif  // DAEMON_ARENA_ARENA_QUOTA_H_
