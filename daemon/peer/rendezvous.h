// Where the nodes of one engine leave each other's addresses: on the coordinator in its memory, on
// an agent a journey away.

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

namespace gradsync {

// Thread-safe. What is not known here is asked for by `ask`, if there is one, once, and waited for.
class Rendezvous final : public RendezvousStore {
 public:
  // A key of each node for each lane and the watch: 256 nodes, 16 lanes. Gloo's values have 136
  // bytes for each node.
  static constexpr std::size_t kMaxKeys = 8192;
  static constexpr std::size_t kMaxKeyBytes = 128;
  static constexpr std::size_t kMaxValueBytes = 64 << 10;

  Rendezvous() = default;
  // An agent's: `set` and `ask` tell the coordinator, who answers by Put().
  Rendezvous(std::function<void(const std::string& key, const std::string& value)> set,
             std::function<void(const std::string& key)> ask);

  absl::Status Set(const std::string& key, const std::string& value) override;
  absl::StatusOr<std::string> Get(const std::string& key, absl::Duration timeout) override;
  absl::Status Cancelled() const override;

  // The coordinator's part. INVALID_ARGUMENT MALFORMED: too long, too many, or set before.
  absl::Status Put(const std::string& key, const std::string& value);
  // Calls `answer` once the key is set, perhaps at once, without a lock held; never if it is
  // cancelled first.
  absl::Status When(const std::string& key, std::function<void(const std::string&)> answer);

  // Get fails with `why` from now on; nobody who asked by When is answered.
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
  std::size_t awaited_ ABSL_GUARDED_BY(mutex_) = 0;  // answers in waiting_
  absl::Status cancelled_ ABSL_GUARDED_BY(mutex_);
};

}  // namespace gradsync

#endif  // DAEMON_PEER_RENDEZVOUS_H_
