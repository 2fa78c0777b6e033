// The services with which clients ask the daemon: Health, Introspection and reflection. It also
// answers the calls of methods that the daemon does not have.
//
// They have a queue and a thread of their own. No client can keep these busy by calls that stay
// open, by answers that it does not read, or by the work of its jobs.

#ifndef DAEMON_RPC_ASKING_SERVICE_H_
#define DAEMON_RPC_ASKING_SERVICE_H_

#include <chrono>
#include <cstdint>
#include <memory>

#include "daemon/base/user_executor.h"
#include "daemon/rpc/connections.h"
#include "daemon/rpc/introspection_answers.h"

namespace grpc {
class ServerBuilder;
}  // namespace grpc

namespace gradsync::daemon {

// Legal calls: Register Start (Tick | StopServing)* Stop. Tick and StopServing are thread-safe.
class AskingService {
 public:
  // `connections`, `executor` and the context's objects outlive the service. The executor works out
  // the answers that lock jobs or wait for workers. Its work may end after the service, and uses
  // the context's objects until then.
  AskingService(IntrospectionContext context, const Connections* connections,
                UserExecutor* executor);
  ~AskingService();
  AskingService(const AskingService&) = delete;
  AskingService& operator=(const AskingService&) = delete;

  // Called before the server is built.
  void Register(grpc::ServerBuilder* builder);
  // Called after it is built. Starts to accept calls.
  void Start();
  // Health answers NOT_SERVING from now on.
  void StopServing();
  // Cancels the calls of clients that ask nothing, or do not read the answer, in time.
  void Tick(std::uint64_t now_ns);
  // Called after the server's Shutdown(). Waits until `deadline` for the calls to end, and joins
  // the threads.
  void Stop(std::chrono::steady_clock::time_point deadline);

 private:
  struct Parts;
  const std::unique_ptr<Parts> parts_;
};

}  // namespace gradsync::daemon

#endif  // DAEMON_RPC_ASKING_SERVICE_H_
