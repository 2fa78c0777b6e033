// Stands between two daemons and hands on what they say to each other; holds one message back for
// as long as a test likes.

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

// The n-th message of its kind, from 1. Names tell the direction too: no kind has both.
// "launch", "rank_request.end_step".
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

// Agents take its address for the coordinator's. When one side of a stream ends, the other side
// gets what was said before, then the end. Thread-safe. Threads: gRPC's.
class PeerProxy final : private v1::Peer::CallbackService {
 public:
  // Hands on to the daemon at `coordinator`; holds the message at `point`.
  PeerProxy(const std::string& coordinator, std::optional<WirePoint> point);
  PeerProxy(const PeerProxy&) = delete;
  PeerProxy& operator=(const PeerProxy&) = delete;
  // Ends every stream. Nothing is held any more.
  ~PeerProxy() override;

  const std::string& address() const { return address_; }

  // Waits until the message is held, or `over` holds; true in the first case. `over` is looked at
  // when Wake() is called.
  bool AwaitHeld(const std::function<bool()>& over);
  void Wake();
  // Lets the held message go: to the other side, or nowhere, with both sides' streams.
  void Release(bool deliver);

  // How many of each kind have passed, but for Ping and Pong, once there are so many at least.
  std::map<std::string, int> AwaitPassed(const std::map<std::string, int>& counts);

 private:
  class Relay;
  // What becomes of a message: called once, at once or by Release().
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
