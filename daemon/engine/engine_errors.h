// Makes an engine's errors, with the reasons and fields that engine.h lists.

#ifndef DAEMON_ENGINE_ENGINE_ERRORS_H_
#define DAEMON_ENGINE_ENGINE_ERRORS_H_

#include <string>

#include "absl/status/status.h"
#include "absl/strings/str_cat.h"
#include "absl/strings/string_view.h"
#include "daemon/base/error.h"

namespace gradsync::daemon {

// `nodes`: one name, or several, comma-separated.
inline absl::Status PeerLost(const std::string& nodes, absl::string_view how) {
  return MakeError(absl::StatusCode::kUnavailable, reason::kEnginePeerLost,
                   absl::StrCat("node ", nodes, " is lost: ", how), {{field::kNode, nodes}});
}

inline absl::Status EngineTimeout(const std::string& nodes, absl::string_view what) {
  return MakeError(absl::StatusCode::kDeadlineExceeded, reason::kEngineTimeout,
                   absl::StrCat("node ", nodes, ": ", what), {{field::kNode, nodes}});
}

inline absl::Status EngineEnded() {
  return MakeError(absl::StatusCode::kCancelled, reason::kEngineClosed,
                   "the engine was destroyed with exchanges pending");
}

}  // namespace gradsync::daemon

#endif  // DAEMON_ENGINE_ENGINE_ERRORS_H_
