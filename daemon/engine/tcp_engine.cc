#include "daemon/engine/tcp_engine.h"

#include <signal.h>

#include <algorithm>
#include <utility>

#include "absl/strings/str_cat.h"
#include "absl/strings/str_join.h"
#include "daemon/base/clock.h"
#include "daemon/base/error.h"
#include "daemon/engine/broadcast.h"
#include "daemon/engine/engine_errors.h"
#include "daemon/engine/lane_memory.h"
#include "daemon/engine/local_address.h"
#include "daemon/engine/peer_mesh.h"
#include "daemon/engine/wire_format.h"

namespace gradsync::daemon {
namespace {

// Blocks all signals for the threads that are started in its scope, which inherit the mask. The
// main thread handles signals; and SIGPIPE would end the process when TLS writes to a closed
// socket.
class SignalsBlocked {
 public:
  SignalsBlocked() {
    sigset_t all;
    sigfillset(&all);
    pthread_sigmask(SIG_SETMASK, &all, &before_);
  }
  ~SignalsBlocked() { pthread_sigmask(SIG_SETMASK, &before_, nullptr); }
  SignalsBlocked(const SignalsBlocked&) = delete;
  SignalsBlocked& operator=(const SignalsBlocked&) = delete;

 private:
  sigset_t before_;
};

absl::Status Validate(const TcpOptions& options) {
  absl::Status status = ValidateEngine(options, options.nodes);
  if (!status.ok()) return status;
  if (options.node >= options.nodes) return absl::InvalidArgumentError("node must be below nodes");
  if (!options.node_names.empty() && options.node_names.size() != options.nodes) {
    return absl::InvalidArgumentError("node_names must name every node");
  }
  if (options.connect_timeout <= absl::ZeroDuration() ||
      options.connect_timeout > absl::Hours(24)) {
    return absl::InvalidArgumentError("connect_timeout must be above 0, up to 24 h");
  }
  if (options.store == nullptr) return absl::InvalidArgumentError("store is missing");
  return absl::OkStatus();
}

// The options that must be the same on every node, as a line of text.
std::string Agreement(const TcpOptions& options) {
  return absl::StrCat("nodes=", options.nodes, " lanes=", options.lanes,
                      " chunk_bytes=", options.chunk_bytes, " wire=", WireTypeName(options.wire),
                      " silence_limit=", absl::FormatDuration(options.silence_limit),
                      " encrypted=", options.keys != nullptr ? "yes" : "no");
}

}  // namespace

TcpEngine::TcpEngine(TcpOptions options)
    : options_(std::move(options)), progress_(static_cast<std::size_t>(options_.lanes)) {}

absl::StatusOr<std::unique_ptr<TcpEngine>> TcpEngine::Connect(const TcpOptions& options) {
  absl::Status status = Validate(options);
  if (!status.ok()) return status;
  TcpOptions resolved = options;
  for (std::size_t node = options.node_names.size(); node < options.nodes; ++node) {
    resolved.node_names.push_back(absl::StrCat(node));
  }
  absl::StatusOr<std::string> address = LocalAddress(options.address, options.interface);
  if (!address.ok()) return address.status();
  resolved.address = *std::move(address);

  const std::uint64_t deadline_ns =
      MonotonicNowNs() +
      static_cast<std::uint64_t>(absl::ToInt64Nanoseconds(options.connect_timeout));
  const SignalsBlocked blocked;
  std::unique_ptr<TcpEngine> engine(new TcpEngine(std::move(resolved)));
  status = engine->ConnectAll(deadline_ns);
  if (!status.ok()) return status;
  if (engine->failed()) return engine->failure();
  return engine;
}

absl::Status TcpEngine::ConnectAll(std::uint64_t deadline_ns) {
  PeerMeshOptions mesh;
  mesh.node = options_.node;
  mesh.nodes = options_.nodes;
  mesh.channels = static_cast<std::uint32_t>(options_.lanes) + 1;
  mesh.node_names = options_.node_names;
  mesh.address = options_.address;
  mesh.agreement = Agreement(options_);
  mesh.deadline_ns = deadline_ns;
  mesh.store = options_.store;
  if (options_.keys != nullptr) {
    absl::StatusOr<std::shared_ptr<PeerTls>> tls = PeerTls::Make(*options_.keys);
    if (!tls.ok()) return tls.status();
    mesh.tls = *std::move(tls);
  }
  absl::StatusOr<std::vector<std::vector<PeerStream>>> peers = ConnectPeers(mesh);
  if (!peers.ok()) return peers.status();

  TcpLane::Owner* const owner = this;
  for (std::size_t lane = 0; lane < progress_.size(); ++lane) {
    std::byte* const memory =
        options_.memory != nullptr
            ? options_.memory + lane * LaneBytes(options_.chunk_bytes, options_.nodes)
            : nullptr;
    lanes_.push_back(std::make_unique<TcpLane>(options_.node, options_.node_names,
                                               std::move((*peers)[lane + 1]), options_.chunk_bytes,
                                               memory, owner, &progress_[lane]));
  }
  PeerWatch::Options watch;
  watch.node = options_.node;
  watch.node_names = options_.node_names;
  watch.silence_limit = options_.silence_limit;
  watch.on_failure = [this](const absl::Status& why) {
    if (Fail(why) && options_.failed != nullptr) options_.failed(why);
  };
  watch_ = std::make_unique<PeerWatch>(std::move(watch), std::move((*peers)[0]), &progress_);
  for (auto& lane : lanes_) lane->Start();
  return absl::OkStatus();
}

TcpEngine::~TcpEngine() {
  const bool in_order = pending_.load(std::memory_order_acquire) == 0 && !failed();
  // After an earlier failure, the other nodes know that one.
  if (Fail(EngineEnded()) && !in_order && watch_ != nullptr) watch_->Say(EngineEnded());
  for (auto& lane : lanes_) {
    lane->Stop();
    if (!in_order) lane->DropUnsent();
  }
  watch_.reset();
}

bool TcpEngine::Fail(const absl::Status& why) {
  {
    MutexLock lock(&mutex_);
    if (!failure_.ok()) return false;
    failure_ = why.ok() ? absl::CancelledError("aborted") : why;
    failed_.store(true, std::memory_order_release);
    for (auto& lane : lanes_) lane->Abort();
  }
  has_failed_.NotifyAll();
  return true;
}

absl::Status TcpEngine::failure() {
  MutexLock lock(&mutex_);
  return failure_;
}

void TcpEngine::Abort(const absl::Status& why) {
  if (Fail(why)) watch_->Say(failure());
}

void TcpEngine::AwaitFailure(const absl::Status& why) {
  if (!failed()) watch_->Suspect(why);
  MutexLock lock(&mutex_);
  while (failure_.ok()) has_failed_.Wait(&mutex_);
}

void TcpEngine::Broken(const absl::Status& why) { AwaitFailure(why); }

void TcpEngine::Finished(const LaneWork& work) {
  Exchange* const exchange = work.exchange;
  const std::unique_ptr<Exchange> owned(work.owned ? exchange : nullptr);
  const bool dropped = exchange->dropped.load(std::memory_order_relaxed);
  exchanges_.fetch_add(1, std::memory_order_relaxed);
  pending_.fetch_sub(1, std::memory_order_acq_rel);
  exchange->done(dropped ? failure() : absl::OkStatus());
}

void TcpEngine::Submit(Exchange* exchange) {
  LaneWork work;
  work.exchange = exchange;
  const bool same = exchange->exact || IsOrderFree(exchange->op, exchange->dtype);
  work.item_bytes = ItemSize(WorkType(exchange->dtype, exchange->op));
  work.wire = WireDataType(exchange->dtype, same ? WireType::kSame : options_.wire);
  Push(work);
}

void TcpEngine::Broadcast(std::vector<std::byte*> buffers, std::size_t bytes,
                          std::uint32_t root_node, std::function<void(const absl::Status&)> done) {
  auto exchange = MakeBroadcast(std::move(buffers), bytes, std::move(done));
  PushBroadcast(exchange.release(), root_node, /*owned=*/true);  // deleted when it has finished
}

void TcpEngine::SubmitBroadcast(Exchange* exchange, std::uint32_t root_node) {
  PushBroadcast(exchange, root_node, /*owned=*/false);
}

void TcpEngine::PushBroadcast(Exchange* exchange, std::uint32_t root_node, bool owned) {
  LaneWork work;
  work.exchange = exchange;
  work.item_bytes = 1;
  work.root = static_cast<int>(root_node);
  work.owned = owned;
  Push(work);
}

void TcpEngine::Push(LaneWork work) {
  Exchange* const exchange = work.exchange;
  work.chunk_items = options_.chunk_bytes / std::max<std::size_t>(work.item_bytes, 1);
  // An empty exchange has one chunk too, so that its done() comes on an engine's thread.
  work.chunks =
      std::max<std::size_t>(1, (exchange->count + work.chunk_items - 1) / work.chunk_items);
  exchange->chunks_left.store(work.chunks, std::memory_order_relaxed);
  exchange->dropped.store(false, std::memory_order_relaxed);
  pending_.fetch_add(1, std::memory_order_acq_rel);
  const std::size_t lanes = lanes_.size();
  work.stride = lanes;
  MutexLock lock(&submit_mutex_);
  const std::size_t offset = chunks_submitted_ % lanes;
  chunks_submitted_ += work.chunks;
  for (std::size_t i = 0; i < std::min(lanes, work.chunks); ++i) {
    work.next = i;
    lanes_[(offset + i) % lanes]->Push(work);
  }
}

EngineStatistics TcpEngine::Statistics() const {
  EngineStatistics statistics;
  statistics.exchanges = exchanges_.load(std::memory_order_relaxed);
  for (const auto& lane : lanes_) statistics.lanes.push_back(lane->Statistics());
  return statistics;
}

}  // namespace gradsync::daemon
