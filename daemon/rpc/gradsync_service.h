// The GradientSync service: one SessionStream per trainer. Decodes, validates, calls session and job, and puts what they say
// on the wire.

#ifndef DAEMON_RPC_GRADSYNC_SERVICE_H_
#define DAEMON_RPC_GRADSYNC_SERVICE_H_

#include <cstdint>
#include <memory>
#include <string>
#include <vector>

#include "daemon/base/clock.h"
#include "daemon/base/mutex.h"
#include "daemon/rpc/connections.h"
#include "daemon/rpc/decode.h"
#include "daemon/session/session_table.h"

namespace grpc {
class Service;
}  // namespace grpc

namespace gradsync {

class SessionStream;

struct ServiceContext {
  SessionTable* sessions = nullptr;
  const Connections* connections = nullptr;
  const Clock* clock = nullptr;
  DecodeLimits limits;
  std::string daemon_version;
};

// The streams of the service. Thread-safe.
class StreamRegistry {
 public:
  void Add(std::weak_ptr<SessionStream> stream);
  // Cancels streams whose end the client does not take.
  void Tick(std::uint64_t now_ns);
  // No stream is open.
  bool Empty();

 private:
  Mutex mutex_;
  std::vector<std::weak_ptr<SessionStream>> streams_ ABSL_GUARDED_BY(mutex_);
};

// `context`'s objects and `registry` outlive the service, which outlives its server.
std::unique_ptr<grpc::Service> MakeGradsyncService(const ServiceContext& context,
                                                   StreamRegistry* registry);

}  // namespace gradsync

#endif  // DAEMON_RPC_GRADSYNC_SERVICE_H_
