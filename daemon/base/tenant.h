// Who uses the daemon: a user of this node, or a user in one pod of Kubernetes. Quotas, turns and
// what status shows are kept by tenant, because pods may share a user id.

#ifndef DAEMON_BASE_TENANT_H_
#define DAEMON_BASE_TENANT_H_

#include <sys/types.h>

#include <cstdint>
#include <optional>
#include <string>
#include <tuple>
#include <utility>

#include "absl/strings/string_view.h"

namespace gradsync::daemon {

// The id of a pod: 128 bits. A value.
class PodId {
 public:
  constexpr PodId() = default;  // no pod

  // Reads 32 hexadecimal digits in lower case: in groups of 8, 4, 4, 4 and 12 with a '-' or '_'
  // between groups (an id of the API server), or in one piece (a pod that the kubelet makes from a
  // file). Nullopt for any other text, and for zero.
  static std::optional<PodId> Parse(absl::string_view text);

  bool none() const { return high_ == 0 && low_ == 0; }
  // "6f1e0c4a-93d2-4a57-8f0e-1b2c3d4e5f60"; empty for no pod.
  std::string Text() const;

  bool operator==(const PodId& other) const { return high_ == other.high_ && low_ == other.low_; }
  bool operator!=(const PodId& other) const { return !(*this == other); }
  bool operator<(const PodId& other) const {
    return std::tie(high_, low_) < std::tie(other.high_, other.low_);
  }
  template <typename H>
  friend H AbslHashValue(H hash, const PodId& pod) {
    return H::combine(std::move(hash), pod.high_, pod.low_);
  }

 private:
  std::uint64_t high_ = 0;
  std::uint64_t low_ = 0;
};

// A value.
struct Tenant {
  uid_t uid = 0;
  PodId pod;  // none: the user runs in no pod that the daemon knows

  constexpr Tenant() = default;
  constexpr explicit Tenant(uid_t user, PodId its_pod = {}) : uid(user), pod(its_pod) {}

  bool operator==(const Tenant& other) const { return uid == other.uid && pod == other.pod; }
  bool operator!=(const Tenant& other) const { return !(*this == other); }
  bool operator<(const Tenant& other) const {
    return std::tie(uid, pod) < std::tie(other.uid, other.pod);
  }
  template <typename H>
  friend H AbslHashValue(H hash, const Tenant& tenant) {
    return H::combine(std::move(hash), tenant.uid, tenant.pod);
  }

  // "1000", or "1000 in pod 6f1e0c4a-93d2-4a57-8f0e-1b2c3d4e5f60". For errors, after "user".
  std::string Text() const;
};

}  // namespace gradsync::daemon

#endif  // DAEMON_BASE_TENANT_H_
