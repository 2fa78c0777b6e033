// The GradientSync service: one SessionStream per trainer.

#ifndef DAEMON_RPC_GRADSYNC_SERVICE_H_
#define DAEMON_RPC_GRADSYNC_SERVICE_H_

#include <chrono>
#include <cstdint>
#include <memory>
#include <vector>

#include "daemon/rpc/completion_dispatcher.h"
#include "daemon/rpc/connections.h"
#include "daemon/rpc/session_handler.h"
#include "daemon/rpc/session_stream.h"
#include "daemon/rpc/stream_acceptor.h"
#include "daemon/rpc/stream_count.h"
#include "gradsync/v1/gradsync.grpc.pb.h"

namespace grpc {
class ServerBuilder;
}  // namespace grpc

namespace gradsync::daemon {

// Legal calls: Register Start (Tick | Idle)* Stop. Tick and Idle are thread-safe.
class GradsyncService {
 public:
  // `connections` and the context's objects outlive the service and its streams.
  GradsyncService(SessionContext context, const Connections* connections);

  // Called before the server is built.
  void Register(grpc::ServerBuilder* builder);
  // Called after it is built. Starts to accept calls.
  void Start();
  // Cancels streams whose client opens no session, or does not read the end, in time.
  void Tick(std::uint64_t now_ns);
  // True if no stream is open.
  bool Idle();
  // Called after the server's Shutdown(). Waits until `deadline` for the streams to end, and joins
  // the threads.
  void Stop(std::chrono::steady_clock::time_point deadline);

 private:
  // Refuses the stream if its user has too many that have no session. `open`: all streams.
  void Admit(SessionStream* stream, const std::vector<std::shared_ptr<SessionStream>>& open);

  const SessionContext context_;
  const Connections* const connections_;
  StreamCount streams_;  // including the one that waits for the next call
  v1::GradientSync::AsyncService service_;
  StreamAcceptor<SessionStream> acceptor_;
  std::unique_ptr<CompletionDispatcher> dispatcher_;
};

}  // namespace gradsync::daemon

#endif  // DAEMON_RPC_GRADSYNC_SERVICE_H_
