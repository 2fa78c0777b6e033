// Where the nodes of an engine leave each other's addresses while they connect.

#ifndef DAEMON_ENGINE_RENDEZVOUS_STORE_H_
#define DAEMON_ENGINE_RENDEZVOUS_STORE_H_

#include <string>

#include "absl/status/status.h"
#include "absl/status/statusor.h"
#include "absl/time/time.h"

namespace gradsync {

// One engine's keys: whoever implements this keeps those of different jobs and epochs apart, and
// from anybody who is not a node of the job (a value holds the token that lets a node connect).
// Values are below 4 KiB, keys short ASCII words. Called by one thread at a time; Cancelled() by
// any.
class RendezvousStore {
 public:
  virtual ~RendezvousStore() = default;
  // Visible to every node from now on. A key is set once.
  virtual absl::Status Set(const std::string& key, const std::string& value) = 0;
  // Waits for another node to set it. DEADLINE_EXCEEDED after `timeout`.
  virtual absl::StatusOr<std::string> Get(const std::string& key, absl::Duration timeout) = 0;
  // Not OK: the nodes will not meet, and whoever connects gives up with this. Asked often.
  virtual absl::Status Cancelled() const { return absl::OkStatus(); }
};

}  // namespace gradsync

#endif  // DAEMON_ENGINE_RENDEZVOUS_STORE_H_
