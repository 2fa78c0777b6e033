// A proxy between two daemons that forwards their messages and can hold one of them.

#ifndef TESTS_FAULT_PEER_PROXY_H_
#define TESTS_FAULT_PEER_PROXY_H_

#include <grpcpp/grpcpp.h>

#include <condition_variable>
#include <functional>
#include <map>
#include <memory>
#include <mutex>
#include <optional>
#include <string>
#include <vector>

#include "gradsync/v1/peer.grpc.pb.h"

namespace gradsync::fault {

// The n-th message of a kind, counted from 1. The kind implies the direction, because no kind
// travels in both. Examples of kinds: "launch", "rank_request.end_step".
struct WirePoint {
  std::string kind;
  int ordinal = 1;

  bool FromAgent() const;
  bool operator==(const WirePoint& other) const {
    return kind == other.kind && ordinal == other.ordinal;
  }
  bool operator<(const WirePoint& other) const {
    return std::tie(kind, ordinal) < std::tie(other.kind, other.ordinal);
  }
};

// Forwards the messages between a coordinator and the agents that connect to the proxy's address.
// When one side of a stream ends, the other side gets all earlier messages, then the end.
// Thread-safe; runs on gRPC's threads.
class PeerProxy final : private v1::Peer::CallbackService {
 public:
  // Forwards to the daemon at `coordinator` and holds the message at `point`, if any.
  PeerProxy(const std::string& coordinator, std::optional<WirePoint> point);
  PeerProxy(const PeerProxy&) = delete;
  PeerProxy& operator=(const PeerProxy&) = delete;
  // Ends every stream and drops a held message.
  ~PeerProxy() override;

  const std::string& address() const { return address_; }

  // Waits until the message is held or `ended` returns true. Returns true if the message is held.
  // Wake() makes it check `ended` again.
  bool AwaitHeld(const std::function<bool()>& ended);
  void Wake();
  // Releases the held message. `deliver`: forwards it. Otherwise drops it and ends both sides of
  // the stream.
  void Release(bool deliver);

  // Waits until at least `counts` messages of each kind have passed. Returns how many have passed
  // of each kind, except for Ping and Pong.
  std::map<std::string, int> AwaitPassed(const std::map<std::string, int>& counts);

 private:
  class Relay;
  // Forwards or drops a message. Called exactly once, either at once or by Release().
  using Verdict = std::function<void(bool deliver)>;

  grpc::ServerBidiReactor<v1::AttachRequest, v1::AttachResponse>* Attach(
      grpc::CallbackServerContext* context) override;
  void Pass(const std::string& kind, Verdict verdict);
  void RelayEnded();

  const std::optional<WirePoint> point_;
  std::unique_ptr<v1::Peer::Stub> coordinator_;
  std::string address_;

  std::mutex mutex_;
  std::condition_variable changed_;
  std::map<std::string, int> passed_;
  Verdict held_;
  bool was_held_ = false;
  int relays_ = 0;

  std::unique_ptr<grpc::Server> server_;  // last
};

}  // namespace gradsync::fault

#endif  // TESTS_FAULT_PEER_PROXY_H_
