// The key-value store through which the nodes of one engine exchange their addresses. The
// coordinator has the values in memory; an agent asks the coordinator for them.

#ifndef DAEMON_PEER_RENDEZVOUS_H_
#define DAEMON_PEER_RENDEZVOUS_H_

#include <cstddef>
#include <functional>
#include <map>
#include <set>
#include <string>
#include <vector>

#include "absl/status/status.h"
#include "daemon/base/mutex.h"
#include "daemon/engine/rendezvous_store.h"

namespace gradsync::daemon {

// Thread-safe. Each engine has one of its own. An agent asks for each unknown key once, and waits
// for the answer.
class Rendezvous final : public RendezvousStore {
 public:
  static constexpr std::size_t kMaxValueBytes = 4096;

  Rendezvous() = default;
  // For an agent: `set` and `ask` send a message to the coordinator. Its answer goes to Put().
  Rendezvous(std::function<void(const std::string& key, const std::string& value)> set,
             std::function<void(const std::string& key)> ask);

  absl::Status Set(const std::string& key, const std::string& value) override;
  absl::StatusOr<std::string> Get(const std::string& key, absl::Duration timeout) override;
  absl::Status Cancelled() const override;

  // Stores a value. INVALID_ARGUMENT MALFORMED: the key or value is too long, there are too many
  // keys, or this key is already set.
  absl::Status Put(const std::string& key, const std::string& value);
  // Calls `answer` when the key is set, perhaps at once, without a lock held. Never calls it after
  // an error, or if Cancel() comes first. INVALID_ARGUMENT MALFORMED: too many keys are asked for,
  // or this one is too long.
  absl::Status When(const std::string& key, std::function<void(const std::string&)> answer);

  // From now on Get() fails with `why`, and no When() is answered.
  void Cancel(const absl::Status& why);

 private:
  const std::function<void(const std::string&, const std::string&)> set_;
  const std::function<void(const std::string&)> ask_;

  mutable Mutex mutex_;
  CondVar changed_;
  std::map<std::string, std::string> values_ ABSL_GUARDED_BY(mutex_);
  std::set<std::string> asked_ ABSL_GUARDED_BY(mutex_);
  std::map<std::string, std::vector<std::function<void(const std::string&)>>> waiting_
      ABSL_GUARDED_BY(mutex_);
  std::size_t awaited_ ABSL_GUARDED_BY(mutex_) = 0;  // callbacks in waiting_
  absl::Status cancelled_ ABSL_GUARDED_BY(mutex_);
};

}  // namespace gradsync::daemon

#endif  // DAEMON_PEER_RENDEZVOUS_H_
