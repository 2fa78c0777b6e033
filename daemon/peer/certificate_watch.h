// Warns in the log before certificates of the connections between nodes expire.

#ifndef DAEMON_PEER_CERTIFICATE_WATCH_H_
#define DAEMON_PEER_CERTIFICATE_WATCH_H_

#include <cstdint>
#include <string>
#include <utility>
#include <vector>

#include "absl/time/time.h"

namespace gradsync::daemon {

// A PEM file, as the daemon has read it.
struct CertificateFile {
  std::string path;
  absl::Time expires;  // when it can no longer be used
};

// Thread-compatible.
class CertificateWatch {
 public:
  // How long before the end it warns.
  static constexpr absl::Duration kSoon = absl::Hours(14 * 24);
  // How often it warns of the same file.
  static constexpr std::uint64_t kPeriodNs = 24 * 3'600'000'000'000;

  explicit CertificateWatch(std::vector<CertificateFile> files) : files_(std::move(files)) {}

  // Logs a warning for each file that has expired, or expires within kSoon. Does nothing before
  // kPeriodNs have passed since it last looked. `now_ns`: of a monotonic clock.
  void Look(std::uint64_t now_ns, absl::Time now);

 private:
  const std::vector<CertificateFile> files_;
  std::uint64_t next_ns_ = 0;
};

}  // namespace gradsync::daemon

#endif  // DAEMON_PEER_CERTIFICATE_WATCH_H_
