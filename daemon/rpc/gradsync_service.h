// The GradientSync service: one SessionStream per trainer. Decodes, validates, calls session and
// job, and puts what they say on the wire.
//
// It polls a completion queue of its own: gRPC 1.51's callback API sleeps 100 ms after every idle
// second (CallbackAlternativeCQ), and a trainer's next bucket would wait for it. The threads sleep
// in epoll; the one that takes a message also runs what follows from it, down to the reduction of a
// small bucket.

#ifndef DAEMON_RPC_GRADSYNC_SERVICE_H_
#define DAEMON_RPC_GRADSYNC_SERVICE_H_

#include <cstdint>
#include <memory>
#include <string>

#include "daemon/base/clock.h"
#include "daemon/rpc/connections.h"
#include "daemon/rpc/decode.h"
#include "daemon/session/session_table.h"

namespace grpc {
class ServerBuilder;
}  // namespace grpc

namespace gradsync {

struct ServiceContext {
  SessionTable* sessions = nullptr;
  const Connections* connections = nullptr;
  const Clock* clock = nullptr;
  DecodeLimits limits;
  std::string daemon_version;
};

class GradsyncService {
 public:
  // `context`'s objects outlive the service.
  explicit GradsyncService(const ServiceContext& context);
  // After Stop().
  ~GradsyncService();

  // Before the server is built.
  void Register(grpc::ServerBuilder* builder);
  // After it is built: takes calls from now on.
  void Start();
  // Cancels streams whose end the client does not take. Thread-safe.
  void Tick(std::uint64_t now_ns);
  // No stream is open. Thread-safe.
  bool Idle();
  // After the server's Shutdown(): waits for the streams to end and joins the threads.
  void Stop();

 private:
  class Impl;
  const std::unique_ptr<Impl> impl_;
};

}  // namespace gradsync

#endif  // DAEMON_RPC_GRADSYNC_SERVICE_H_
