// Finds out why another daemon cannot be reached.

#ifndef DAEMON_PEER_REACH_PROBE_H_
#define DAEMON_PEER_REACH_PROBE_H_

#include <grpcpp/grpcpp.h>

#include <functional>
#include <memory>
#include <string>

#include "daemon/rpc/completion_dispatcher.h"
#include "gradsync/v1/peer.grpc.pb.h"

namespace gradsync::daemon {

// Asks gRPC why a channel is not connected: one call that fails at once instead of waiting for the
// connection.
//
// Thread-safe. The object owns itself; the queue outlives it.
class ReachProbe {
 public:
  // `why`: gRPC's words; empty if nothing has answered so far.
  using Answer = std::function<void(const std::string& why)>;

  // Calls `answer` once, on a thread of `queue`, after at most 0.2 s.
  static void Start(const std::shared_ptr<grpc::Channel>& channel, grpc::CompletionQueue* queue,
                    Answer answer);

 private:
  explicit ReachProbe(Answer answer) : answer_(std::move(answer)) {}

  void OnStarted(bool ok);
  void OnFinished(bool ok);

  const Answer answer_;
  grpc::ClientContext call_;
  std::unique_ptr<v1::Peer::Stub> stub_;
  std::unique_ptr<grpc::ClientAsyncReaderWriter<v1::AttachRequest, v1::AttachResponse>> stream_;
  grpc::Status status_;
  MethodCompletion<ReachProbe, &ReachProbe::OnStarted> on_started_{this};
  MethodCompletion<ReachProbe, &ReachProbe::OnFinished> on_finished_{this};
};

// Cause and remedy, for people. `why`: as in ReachProbe::Answer.
std::string ExplainUnreachable(const std::string& why);

}  // namespace gradsync::daemon

#endif  // DAEMON_PEER_REACH_PROBE_H_
