// The port on which this daemon serves the daemons of other nodes.
//
// gRPC bounds neither the calls that a client opens and resets at once (CVE-2023-44487), nor the
// memory that they take. So a thread compares gRPC's counts every kWatchPeriod. If there are too
// many, it ends the connections with the most open calls. gRPC does not bound the headers that it
// keeps, either. So the thread also ends connections that send many bytes but no call or message.

#ifndef DAEMON_PEER_PEER_SERVER_H_
#define DAEMON_PEER_PEER_SERVER_H_

#include <grpcpp/grpcpp.h>

#include <atomic>
#include <chrono>
#include <cstdint>
#include <functional>
#include <memory>
#include <string>
#include <vector>

#include "absl/status/statusor.h"
#include "absl/strings/string_view.h"
#include "daemon/base/ticker.h"
#include "daemon/engine/caller.h"
#include "daemon/engine/socket_owner.h"
#include "daemon/peer/agent_session.h"
#include "daemon/peer/peer_address.h"
#include "daemon/peer/peer_listener.h"
#include "daemon/rpc/call_counts.h"
#include "daemon/rpc/call_limit.h"
#include "daemon/rpc/client_input.h"
#include "daemon/rpc/completion_dispatcher.h"
#include "daemon/rpc/stream_acceptor.h"
#include "daemon/rpc/stream_count.h"
#include "daemon/rpc/stream_service.h"
#include "daemon/rpc/unknown_calls.h"

namespace gradsync::daemon {

// Call order: Listen Accept Shutdown Stop, once each. Between Accept() and Stop() it is
// thread-safe. The sessions own themselves.
class PeerServer {
 public:
  static constexpr std::chrono::milliseconds kWatchPeriod{50};
  // The most streams of one connection at a time, and the most streams of all daemons together. A
  // daemon has a connection for each job.
  static constexpr int kStreamsPerConnection = 64;
  static constexpr std::size_t kMaxNodes = 4096;
  // The most streams of one IPv6 network, of which a machine can use every address. It leaves room
  // for other networks.
  static constexpr std::size_t kMaxOfNetwork = kMaxNodes - kMaxNodes / 8;
  // The most streams of one address that have said Hello: the jobs of its daemons. There may be
  // several daemons, on one machine or behind one address.
  static constexpr std::size_t kMaxGreeted = 256;
  // A connection with more than kFewCalls open calls is busy; a daemon's has one. kMaxBusyCalls:
  // the most open calls of all busy connections together. Each call takes some 13 KiB. When a
  // connection ends, gRPC destroys its calls one after the other, on a thread that other
  // connections may need.
  static constexpr std::uint64_t kFewCalls = 4;
  static constexpr std::uint64_t kMaxBusyCalls = 1024;
  // The most open calls of the other connections. Streams beyond kMaxNodes are refused one by one,
  // and that takes a moment: no connection ends for them.
  static constexpr std::uint64_t kMaxOtherCalls = kMaxNodes + 1024;

  // The streams that are open. Only the last count is without the newest one.
  struct OpenStreams {
    std::size_t all = 0;
    std::size_t of_network = 0;
    std::size_t greeted_at_address = 0;
  };
  // Empty: the newest stream, of this address and network, may stay. Otherwise the streams of which
  // there are too many, for the error that ends it.
  static std::string WhyTooMany(const OpenStreams& open, absl::string_view address,
                                absl::string_view network);

  // Binds the port. `plain_text`: the credentials have no TLS. UNAVAILABLE: it cannot listen there.
  static absl::StatusOr<std::unique_ptr<PeerServer>> Listen(
      const PeerAddress& address, const std::shared_ptr<grpc::ServerCredentials>& credentials,
      bool plain_text);

  // The address that it listens on. If port 0 was asked for, this has the port that was chosen.
  const PeerAddress& address() const { return address_; }
  // The queue for this daemon's streams to other daemons. The server's threads serve it.
  grpc::CompletionQueue* queue() { return dispatcher_->queue(); }

  // As PeerListener::LimitDescriptors(). Called before Accept().
  void LimitDescriptors(const DescriptorQuota* quota) { listener_->LimitDescriptors(quota); }
  // Starts to accept streams and to handle messages. `context` outlives the server. `accepted` is
  // called after each new session. `used`, unless it is null, is called every kWatchPeriod while
  // somebody is connected.
  void Accept(const AgentSessionContext& context, std::function<void()> accepted,
              std::function<void()> used = nullptr);
  // The CallerKey of a caller, from gRPC's name for it.
  CallerKey CallerAt(absl::string_view caller) { return listener_->CallerAt(caller); }
  // The input of a caller's connection. Null: the connection has ended.
  std::shared_ptr<ClientInput> InputOf(absl::string_view caller) {
    return listener_->InputOf(caller);
  }
  // The bytes on a caller's connection that gRPC has not read.
  std::size_t UnreadBytes(absl::string_view caller) { return listener_->UnreadBytes(caller); }
  // This process's ends of its connections with a caller, as gRPC names it.
  std::vector<TcpEnd> OwnEnds(absl::string_view caller) { return listener_->OwnEnds(caller); }
  // The sessions that are open.
  std::vector<std::shared_ptr<AgentSession>> Sessions() { return acceptor_.Open(); }
  // Counts the sessions' streams and the unknown calls, including those that wait for the next
  // call.
  const StreamCount& streams() const { return streams_; }

  // Ends every stream and accepts no more.
  void Shutdown();
  // Waits until every call has ended, and ends the threads.
  void Stop();

 private:
  PeerServer() = default;
  // Ends the connection of a caller, as gRPC names it. No daemon calls unknown methods.
  void EndCaller(const std::string& caller);
  // Ends a caller's connections on which no stream has said Hello, if they send much.
  void EndSilentSenders();
  // Ends connections of which much is read, but no call or message comes.
  void EndVain();
  // If the caller of `newest` has too many streams that have said nothing, closes the oldest of
  // them.
  void CloseOldest(const AgentSession& newest);
  // Called by the watcher. False: nobody is connected.
  bool WatchCalls();
  // Ends connections with too many open calls. `counted`: the server's count.
  void EndBusiest(const CallCounts& counted);

  PeerAddress address_;  // constant after Listen()
  StreamCount streams_;
  StreamService service_{"/gradsync.v1.Peer/Attach"};
  StreamAcceptor<AgentSession> acceptor_;
  UnknownCalls unknown_{
      &streams_, {/*input=*/nullptr, [this](const std::string& caller) { EndCaller(caller); }}};
  std::unique_ptr<CompletionDispatcher> dispatcher_;
  std::unique_ptr<grpc::Server> server_;
  // Takes the connections that the listener accepts.
  std::unique_ptr<grpc::experimental::ExternalConnectionAcceptor> connections_;
  std::unique_ptr<PeerListener> listener_;

  CountedServer counted_;                       // constant after Listen()
  std::atomic<std::uint64_t> connected_ns_{0};  // when the last connection came
  // The watcher's.
  std::function<void()> used_;  // constant after Accept()
  std::uint64_t looked_at_bytes_ns_ = 0;
  // The watcher's. A connection can have more open calls than kStreamsPerConnection if it has reset
  // some, or if the client has not acknowledged that limit.
  CallLimit call_limit_{{/*most=*/kMaxBusyCalls, /*enough=*/kStreamsPerConnection,
                         /*most_of_one=*/kStreamsPerConnection, /*few=*/kFewCalls,
                         /*most_of_others=*/kMaxOtherCalls}};
  Ticker watcher_{kWatchPeriod, [this] { return WatchCalls(); }};  // last
};

}  // namespace gradsync::daemon

#endif  // DAEMON_PEER_PEER_SERVER_H_
