// The release, as --version, status and SessionOpened name it.

#ifndef DAEMON_BASE_VERSION_H_
#define DAEMON_BASE_VERSION_H_

namespace gradsync {

inline constexpr char kVersion[] = "0.1.0";

}  // namespace gradsync

#endif  // DAEMON_BASE_VERSION_H_
