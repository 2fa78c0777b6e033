// The errors of an engine; reasons and fields as engine.h lists them.

#ifndef DAEMON_ENGINE_ENGINE_ERRORS_H_
#define DAEMON_ENGINE_ENGINE_ERRORS_H_

#include <string>

#include "absl/status/status.h"
#include "absl/strings/str_cat.h"
#include "absl/strings/string_view.h"
#include "daemon/base/error.h"

namespace gradsync {

// `nodes`: a name, or several, comma-separated.
inline absl::Status PeerLost(const std::string& nodes, absl::string_view how) {
  return MakeError(absl::StatusCode::kUnavailable, "ENGINE_PEER_LOST",
                   absl::StrCat("node ", nodes, " is lost: ", how), {{"node", nodes}});
}

inline absl::Status EngineTimeout(const std::string& nodes, absl::string_view what) {
  return MakeError(absl::StatusCode::kDeadlineExceeded, "ENGINE_TIMEOUT",
                   absl::StrCat("node ", nodes, ": ", what), {{"node", nodes}});
}

inline absl::Status EngineClosed() {
  return MakeError(absl::StatusCode::kCancelled, "ENGINE_CLOSED",
                   "the engine was destroyed with exchanges pending");
}

}  // namespace gradsync

#endif  // DAEMON_ENGINE_ENGINE_ERRORS_H_
