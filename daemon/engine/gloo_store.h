// Adapts a RendezvousStore to Gloo's interface.

#ifndef DAEMON_ENGINE_GLOO_STORE_H_
#define DAEMON_ENGINE_GLOO_STORE_H_

#include <chrono>
#include <cstdint>
#include <functional>
#include <string>
#include <vector>

#include "absl/status/status.h"
#include "absl/time/time.h"
#include "daemon/engine/rendezvous_store.h"
#include "gloo/rendezvous/store.h"

namespace gradsync::daemon {

// Throws gloo::IoException if `store` fails or the engine has failed; status() is then the cause.
// Not thread-safe.
class GlooStore final : public gloo::rendezvous::Store {
 public:
  // Puts `prefix` before every key. `deadline_ns` (CLOCK_MONOTONIC) holds for all calls together.
  // Every kPatience, a waiting call asks `failure` and ends if it returns an error.
  GlooStore(RendezvousStore* store, std::string prefix, std::uint64_t deadline_ns,
            std::function<absl::Status()> failure);

  void set(const std::string& key, const std::vector<char>& data) override;
  std::vector<char> get(const std::string& key) override;
  void wait(const std::vector<std::string>& keys) override;
  // Ignores `timeout`: the deadline holds.
  void wait(const std::vector<std::string>& keys,
            const std::chrono::milliseconds& timeout) override;

  const absl::Status& status() const { return status_; }

 private:
  static constexpr absl::Duration kPatience = absl::Milliseconds(200);

  void Check(const absl::Status& status);

  RendezvousStore* const store_;
  const std::string prefix_;
  const std::uint64_t deadline_ns_;
  const std::function<absl::Status()> failure_;
  absl::Status status_;
};

}  // namespace gradsync::daemon

#endif  // DAEMON_ENGINE_GLOO_STORE_H_
