#include "daemon/peer/peer_server.h"

#include <algorithm>
#include <chrono>
#include <optional>
#include <set>
#include <utility>

#include "absl/strings/str_cat.h"
#include "daemon/base/clock.h"
#include "daemon/base/error.h"
#include "daemon/base/logging.h"
#include "daemon/engine/caller.h"
#include "daemon/engine/socket_owner.h"
#include "daemon/peer/local_caller.h"
#include "daemon/peer/peer_protocol.h"

namespace gradsync::daemon {
namespace {

constexpr int kThreads = 2;
// The most calls of a connection without TLS, as long as it lasts. A daemon makes one, and a few
// more if its ranks wait long for the Welcome (ReachProbe). gRPC takes in every call that it reads,
// even if the client has reset it, and destroys them on threads that other connections need. So 64
// connections that reset calls kept the port busy for seconds.
constexpr std::uint32_t kCallsOfConnection = 64;
// Streams of one caller that have not said Hello.
constexpr std::size_t kMaxUngreeted = 64;
// A connection without an HTTP/2 handshake is closed after this.
constexpr int kHandshakeTimeoutMs = 10'000;
// A daemon says Hello before it sends anything else. gRPC holds a message whole before it compares
// its length with a limit.
constexpr ConnectionLimit::SilentBytes kMostSilentBytes = {128 << 10, 1 << 20};
// A look takes two system calls for each connection.
constexpr std::uint64_t kLookAtBytesNs = 250'000'000;
// gRPC reads a connection that it is given until there is nothing to read for a moment. On a busy
// machine that may take long. Meanwhile an honest node sends its Hello, and waits for the Welcome.
constexpr std::uint64_t kConnectLimitNs = 500'000'000;
constexpr std::uint64_t kConnectBytes = 16 << 10;

// How many streams of this address have said Hello, or something that waits for its turn.
std::size_t GreetedAt(const std::string& address,
                      const std::vector<std::shared_ptr<AgentSession>>& open) {
  return static_cast<std::size_t>(std::count_if(open.begin(), open.end(), [&](const auto& one) {
    return !one->silent() && one->address() == address;
  }));
}

// How many of the streams are of the network of `newest`.
std::size_t InNetworkOf(const AgentSession& newest,
                        const std::vector<std::shared_ptr<AgentSession>>& open) {
  const CallerKey network = NetworkOf(newest.caller_key());
  return static_cast<std::size_t>(std::count_if(open.begin(), open.end(), [&](const auto& one) {
    return NetworkOf(one->caller_key()) == network;
  }));
}

}  // namespace

absl::StatusOr<std::unique_ptr<PeerServer>> PeerServer::Listen(
    const PeerAddress& address, const std::shared_ptr<grpc::ServerCredentials>& credentials,
    bool plain_text) {
  auto listener = PeerListener::Listen(address);
  if (!listener.ok()) return listener.status();
  if (plain_text) (*listener)->LimitHeaders(kCallsOfConnection);
  std::unique_ptr<PeerServer> made(new PeerServer);
  made->listener_ = *std::move(listener);
  grpc::ServerBuilder builder;
  made->connections_ = builder.experimental().AddExternalConnectionAcceptor(
      grpc::ServerBuilder::experimental_type::ExternalConnectionType::FROM_FD, credentials);
  builder.AddChannelArgument(GRPC_ARG_MAX_CONCURRENT_STREAMS, kStreamsPerConnection);
  // gRPC limits a message before and after it decompresses it, not meanwhile.
  builder.AddChannelArgument(GRPC_ARG_ENABLE_PER_MESSAGE_DECOMPRESSION, 0);
  builder.AddChannelArgument(GRPC_ARG_SERVER_HANDSHAKE_TIMEOUT_MS, kHandshakeTimeoutMs);
  builder.AddChannelArgument(GRPC_ARG_MAX_CONNECTION_IDLE_MS, kIdleConnectionMs);
  builder.AddChannelArgument(GRPC_ARG_TCP_MAX_READ_CHUNK_SIZE, kPeerReadBytes);
  // Otherwise gRPC keeps 7 KiB for each further ping of a client that does not read the answers.
  builder.AddChannelArgument(GRPC_ARG_HTTP2_MAX_PING_STRIKES, 0);
  // Otherwise each look at the counts would also write down the server's history.
  builder.AddChannelArgument(GRPC_ARG_MAX_CHANNEL_TRACE_EVENT_MEMORY_PER_NODE, 0);
  builder.SetMaxReceiveMessageSize(kMaxAgentMessageBytes);
  builder.RegisterService(&made->service_);
  made->unknown_.Register(&builder);
  made->dispatcher_ = std::make_unique<CompletionDispatcher>(builder.AddCompletionQueue());
  made->server_ = builder.BuildAndStart();
  if (made->server_ == nullptr) {
    made->dispatcher_->Stop();
    return absl::UnavailableError(
        absl::StrCat("peer_listen: gRPC's server does not start on ", address.Text()));
  }
  made->counted_ = CountedServer::Newest();
  made->address_ = address;
  made->address_.port = made->listener_->port();
  return made;
}

void PeerServer::Accept(const AgentSessionContext& context, std::function<void()> accepted,
                        std::function<void()> used) {
  used_ = std::move(used);
  StreamAcceptor<AgentSession>::Hooks hooks;
  hooks.make = [this, &context] { return std::make_shared<AgentSession>(context, streams_.Add()); };
  hooks.request = service_.RequestOf<AgentSession>(0);
  hooks.accepted = [this, &context, accepted = std::move(accepted)](AgentSession* node,
                                                                    const auto& open) {
    CloseOldest(*node);
    const std::string why =
        WhyTooMany({open.size(), InNetworkOf(*node, open), GreetedAt(node->address(), open)},
                   node->address(), node->network());
    if (!why.empty()) {
      node->Close(
          MakeError(absl::StatusCode::kResourceExhausted, reason::kQuota,
                    absl::StrCat("the daemon of node ", context.node_name, " serves ", why)));
    }
    accepted();
  };
  acceptor_.Start(std::move(hooks), dispatcher_->queue());
  unknown_.Start(dispatcher_->queue());
  dispatcher_->Start(kThreads);
  listener_->Start([this](UniqueFd connection) {
    connected_ns_.store(MonotonicNowNs());
    watcher_.Wake();
    grpc::experimental::ExternalConnectionAcceptor::NewConnectionParameters parameters;
    parameters.fd = connection.release();
    connections_->HandleNewConnection(&parameters);
  });
}

std::string PeerServer::WhyTooMany(const OpenStreams& open, absl::string_view address,
                                   absl::string_view network) {
  if (open.all > kMaxNodes) {
    return absl::StrCat(kMaxNodes, " streams of other nodes, as many as it may");
  }
  if (open.of_network > kMaxOfNetwork) {
    return absl::StrCat(kMaxOfNetwork, " streams of ", network,
                        ", as many as one network may have");
  }
  if (open.greeted_at_address >= kMaxGreeted) {
    return absl::StrCat(kMaxGreeted, " streams of ", address, ", as many as one address may have");
  }
  return "";
}

void PeerServer::EndCaller(const std::string& caller) {
  const std::optional<TcpEnd> other = EndOfCaller(caller);
  if (!other.has_value()) return;
  const std::string ip(other->ip.begin(), other->ip.end());
  if (!listener_->End(ip, other->port)) return;
  LogLimited(LogLevel::kWarning, "peer port: connection ended",
             {{"address", caller}, {"why", "it called a method that no daemon has"}});
}

void PeerServer::CloseOldest(const AgentSession& newest) {
  std::vector<std::shared_ptr<AgentSession>> silent;  // the oldest first
  for (auto& session : Sessions()) {
    const bool same = session->caller_key() == newest.caller_key();
    if (same && session->silent()) silent.push_back(std::move(session));
  }
  // Those that it has closed are among them until their ends have been sent.
  for (std::size_t i = 0; i + kMaxUngreeted < silent.size(); ++i) {
    silent[i]->Close(MakeError(absl::StatusCode::kResourceExhausted, reason::kQuota,
                               absl::StrCat(newest.address(), " has ", kMaxUngreeted,
                                            " newer streams without Hello, as many as one caller "
                                            "may have")));
  }
}

void PeerServer::EndSilentSenders() {
  const auto greeted = [this] {
    std::set<TcpEnd> ends;
    for (const auto& session : Sessions()) {
      const std::optional<TcpEnd> end = EndOfCaller(session->caller());
      if (session->greeted() && end.has_value()) ends.insert(*end);
    }
    return ends;
  };
  for (const TcpEnd& end : listener_->EndSilent(kMostSilentBytes, greeted)) {
    LogLimited(LogLevel::kWarning, "peer port: connection ended",
               {{"address", end.Text()}, {"why", "its caller sends much, and has not said Hello"}});
  }
}

void PeerServer::EndVain() {
  for (const TcpEnd& end : listener_->EndVain(kPeerVain)) {
    LogLimited(LogLevel::kWarning, "peer port: connection ended",
               {{"address", end.Text()},
                {"why",
                 "its caller exceeds a limit: bytes without a call or message, bytes that are no "
                 "data, calls, resets, or the length of headers"}});
  }
}

bool PeerServer::WatchCalls() {
  listener_->EndSlow(kConnectLimitNs, kConnectBytes);
  EndVain();
  if (const std::uint64_t now_ns = MonotonicNowNs();
      now_ns >= looked_at_bytes_ns_ + kLookAtBytesNs) {
    looked_at_bytes_ns_ = now_ns;
    EndSilentSenders();
  }
  const CallCounts counted = counted_.Calls();
  if (call_limit_.NeedsConnections(counted)) EndBusiest(counted);
  // A connection is counted once its handshake has ended.
  const std::uint64_t handshake_ns = std::uint64_t{2} * kHandshakeTimeoutMs * 1'000'000;
  const bool connected =
      counted_.HasConnections() || MonotonicNowNs() < connected_ns_.load() + handshake_ns;
  if (connected && used_) used_();
  return connected;
}

void PeerServer::EndBusiest(const CallCounts& counted) {
  const std::vector<ConnectionCalls> connections = counted_.Connections();
  std::vector<std::uint64_t> open;
  for (const ConnectionCalls& connection : connections) open.push_back(connection.calls.open());
  for (const std::size_t place : call_limit_.ToEnd(counted, open)) {
    const ConnectionCalls& connection = connections[place];
    if (!listener_->End(connection.ip, connection.port)) continue;
    LogLimited(LogLevel::kWarning, "peer port: connection ended",
               {{"address", connection.Text()},
                {"calls", connection.calls.open()},
                {"why", "other nodes have more open calls than they may, and it has the most"}});
  }
}

void PeerServer::Shutdown() {
  watcher_.Stop();
  listener_->Stop();
  server_->Shutdown(std::chrono::system_clock::now());
  acceptor_.Stop();
  unknown_.Stop();
}

void PeerServer::Stop() {
  server_->Wait();
  dispatcher_->Stop();
}

}  // namespace gradsync::daemon
