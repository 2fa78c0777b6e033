// What an engine process asks of the rendezvous store while its nodes connect.

#ifndef DAEMON_WORKER_STORE_DESK_H_
#define DAEMON_WORKER_STORE_DESK_H_

#include <cstddef>
#include <deque>
#include <string>

#include "absl/functional/function_ref.h"
#include "absl/status/status.h"
#include "absl/time/time.h"
#include "daemon/engine/rendezvous_store.h"
#include "daemon/worker/worker.pb.h"

namespace gradsync::daemon {

// Not thread-safe. `store` outlives it.
class StoreDesk {
 public:
  // The most keys that a process may want at a time.
  static constexpr std::size_t kMaxKeys = 1024;

  explicit StoreDesk(RendezvousStore* store) : store_(store) {}

  // Stores a value, or notes a key that the process wants. Returns the store's errors.
  absl::Status Take(const worker::EngineEvent& event);
  // True if the process wants a key.
  bool busy() const { return !wanted_.empty(); }
  // True if the process wants too many keys.
  bool full() const { return wanted_.size() > kMaxKeys; }
  // Waits for the value of one key for at most `patience`, and gives it to `answer`. Each call
  // looks for the next key, in turns. Requires busy(). OK if the store does not have the value yet;
  // otherwise the store's errors.
  absl::Status Look(
      absl::Duration patience,
      absl::FunctionRef<void(const std::string& key, const std::string& value)> answer);

 private:
  RendezvousStore* const store_;
  std::deque<std::string> wanted_;
};

}  // namespace gradsync::daemon

#endif  // DAEMON_WORKER_STORE_DESK_H_
