// A key-value store through which the nodes of an engine exchange their addresses while they
// connect.

#ifndef DAEMON_ENGINE_RENDEZVOUS_STORE_H_
#define DAEMON_ENGINE_RENDEZVOUS_STORE_H_

#include <cstddef>
#include <string>

#include "absl/status/status.h"
#include "absl/status/statusor.h"
#include "absl/time/time.h"
#include "daemon/engine/engine_settings.h"

namespace gradsync::daemon {

// Holds the keys of one engine. An implementation separates the keys of different jobs and epochs,
// and shows them to the job's nodes alone: a value holds the token that lets a node connect. Values
// are smaller than 4 KiB, keys are short ASCII words. Called by one thread at a time; Cancelled()
// by any.
class RendezvousStore {
 public:
  // The most keys: one of each node.
  static constexpr std::size_t kMaxKeys = kMaxEngineNodes;
  static constexpr std::size_t kMaxKeyBytes = 128;

  virtual ~RendezvousStore() = default;
  // Makes the value visible to every node. A key is set once.
  virtual absl::Status Set(const std::string& key, const std::string& value) = 0;
  // Waits until a node has set the key. DEADLINE_EXCEEDED after `timeout`.
  virtual absl::StatusOr<std::string> Get(const std::string& key, absl::Duration timeout) = 0;
  // An error if the nodes will not connect; ConnectPeers then fails with it. Called often.
  virtual absl::Status Cancelled() const { return absl::OkStatus(); }
};

}  // namespace gradsync::daemon

#endif  // DAEMON_ENGINE_RENDEZVOUS_STORE_H_
