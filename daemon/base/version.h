// The release that --version, status and SessionOpened show.

#ifndef DAEMON_BASE_VERSION_H_
#define DAEMON_BASE_VERSION_H_

namespace gradsync::daemon {

inline constexpr char kVersion[] = "0.1.0";

}  // namespace gradsync::daemon

#endif  // DAEMON_BASE_VERSION_H_
