// Where the nodes of one engine leave each other's addresses: on the coordinator in its memory, on
// an agent a journey away.

#ifndef DAEMON_PEER_RENDEZVOUS_H_
#define DAEMON_PEER_RENDEZVOUS_H_

#include <cstddef>
#include <functional>
#include <map>
#include <string>
#include <vector>

#include "absl/status/status.h"
#include "daemon/base/mutex.h"
#include "daemon/engine/rendezvous_store.h"

namespace gradsync {

// Thread-safe. What is set here is known here; what is asked for and not known is asked for by
// `ask`, if there is one, and waited for.
class Rendezvous final : public RendezvousStore {
 public:
  static constexpr std::size_t kMaxKeys = 4096;
  static constexpr std::size_t kMaxKeyBytes = 128;
  static constexpr std::size_t kMaxValueBytes = 4096;

  Rendezvous() = default;
  // An agent's: `set` and `ask` tell the coordinator, who answers by Put().
  Rendezvous(std::function<void(const std::string& key, const std::string& value)> set,
             std::function<void(const std::string& key)> ask);

  absl::Status Set(const std::string& key, const std::string& value) override;
  absl::StatusOr<std::string> Get(const std::string& key, absl::Duration timeout) override;

  // The coordinator's part. INVALID_ARGUMENT MALFORMED: too long, too many, or set before.
  absl::Status Put(const std::string& key, const std::string& value);
  // Calls `answer` once the key is set, perhaps at once, without a lock held.
  absl::Status When(const std::string& key, std::function<void(const std::string&)> answer);

  // Get fails with `why` from now on; nobody else is answered.
  void Cancel(const absl::Status& why);

 private:
  const std::function<void(const std::string&, const std::string&)> set_;
  const std::function<void(const std::string&)> ask_;

  Mutex mutex_;
  CondVar changed_;
  std::map<std::string, std::string> values_ ABSL_GUARDED_BY(mutex_);
  std::map<std::string, std::vector<std::function<void(const std::string&)>>> waiting_
      ABSL_GUARDED_BY(mutex_);
  absl::Status cancelled_ ABSL_GUARDED_BY(mutex_);
};

}  // namespace gradsync

#endif  // DAEMON_PEER_RENDEZVOUS_H_
