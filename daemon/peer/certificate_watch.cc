#include "daemon/peer/certificate_watch.h"

#include "daemon/base/logging.h"

namespace gradsync::daemon {

void CertificateWatch::Look(std::uint64_t now_ns, absl::Time now) {
  if (now_ns < next_ns_) return;
  next_ns_ = now_ns + kPeriodNs;
  for (const CertificateFile& file : files_) {
    if (file.expires > now + kSoon) continue;
    Log(LogLevel::kWarning,
        file.expires > now ? "certificate expires soon" : "certificate has expired",
        {{"path", file.path},
         {"expires", absl::FormatTime("%Y-%m-%dT%H:%M:%SZ", file.expires, absl::UTCTimeZone())},
         {"remedy",
          "make new certificates (deploy/peer-keys), install them on every node, and restart every "
          "daemon while no job runs"}});
  }
}

}  // namespace gradsync::daemon
