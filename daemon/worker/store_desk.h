// What an engine process asks of the rendezvous store while its nodes connect.

#ifndef DAEMON_WORKER_STORE_DESK_H_
#define DAEMON_WORKER_STORE_DESK_H_

#include <deque>
#include <set>
#include <string>

#include "absl/functional/function_ref.h"
#include "absl/status/status.h"
#include "absl/time/time.h"
#include "daemon/engine/rendezvous_store.h"
#include "daemon/worker/worker.pb.h"

namespace gradsync::daemon {

// Each key is answered once, so that a process that reads no answer can make the daemon keep only a
// few. A sound process asks for the key of each other node, once.
//
// Not thread-safe. `store` outlives it.
class StoreDesk {
 public:
  explicit StoreDesk(RendezvousStore* store) : store_(store) {}

  // Stores a value, or notes a key that the process wants. Drops a key for which it must not ask:
  // refused() is then true. Returns the store's errors.
  absl::Status Take(const worker::EngineEvent& event);
  // True if the process wants a key.
  bool busy() const { return !wanted_.empty(); }
  // True if the process has asked for a key twice, for too many keys, or for one that is too long.
  bool refused() const { return refused_; }
  // Waits for the value of one key for at most `patience`, and gives it to `answer`. Each call
  // looks for the next key, in turns. Requires busy(). OK if the store does not have the value yet;
  // otherwise the store's errors.
  absl::Status Look(
      absl::Duration patience,
      absl::FunctionRef<void(const std::string& key, const std::string& value)> answer);

 private:
  RendezvousStore* const store_;
  std::set<std::string> asked_;  // all keys, also those that are answered
  std::deque<std::string> wanted_;
  bool refused_ = false;
};

}  // namespace gradsync::daemon

#endif  // DAEMON_WORKER_STORE_DESK_H_
