#include "daemon/engine/gloo_engine.h"

#include <signal.h>

#include <algorithm>
#include <chrono>
#include <cstring>
#include <utility>

#include "absl/strings/str_cat.h"
#include "absl/strings/str_join.h"
#include "daemon/base/clock.h"
#include "daemon/base/error.h"
#include "daemon/engine/engine_errors.h"
#include "daemon/engine/gloo_errors.h"
#include "daemon/engine/gloo_store.h"
#include "daemon/engine/lane_memory.h"
#include "daemon/engine/local_address.h"
#include "daemon/engine/peer_mesh.h"
#include "daemon/engine/wire_format.h"
#include "gloo/rendezvous/context.h"
#include "gloo/transport/tcp/device.h"

namespace gradsync::daemon {
namespace {

// For the lanes' connections. All nodes are there by then: their watches are connected.
constexpr std::uint64_t kConnectionLimitMs = 10'000;

// Blocks all signals for the threads that are started in its scope, which inherit the mask. The
// main thread handles signals; and SIGPIPE would end the process when Gloo writes to a closed
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

absl::Status Validate(const GlooOptions& options) {
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
std::string Agreement(const GlooOptions& options) {
  return absl::StrCat("nodes=", options.nodes, " lanes=", options.lanes,
                      " chunk_bytes=", options.chunk_bytes, " wire=", WireTypeName(options.wire),
                      " silence_limit=", absl::FormatDuration(options.silence_limit));
}

}  // namespace

GlooEngine::GlooEngine(GlooOptions options)
    : options_(std::move(options)), progress_(static_cast<std::size_t>(options_.lanes)) {}

absl::StatusOr<std::unique_ptr<GlooEngine>> GlooEngine::Connect(const GlooOptions& options) {
  absl::Status status = Validate(options);
  if (!status.ok()) return status;
  GlooOptions resolved = options;
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
  std::unique_ptr<GlooEngine> engine(new GlooEngine(std::move(resolved)));
  status = engine->ConnectWatch(deadline_ns);
  if (!status.ok()) return status;
  status = engine->ConnectLanes(deadline_ns);
  // The loss of a node explains more than the broken connection that follows from it.
  if (!status.ok()) engine->AwaitFailure(status);
  if (engine->failed()) return engine->failure();
  return engine;
}

absl::Status GlooEngine::ConnectWatch(std::uint64_t deadline_ns) {
  PeerMeshOptions mesh;
  mesh.node = options_.node;
  mesh.nodes = options_.nodes;
  mesh.node_names = options_.node_names;
  mesh.address = options_.address;
  mesh.agreement = Agreement(options_);
  mesh.deadline_ns = deadline_ns;
  mesh.store = options_.store;
  absl::StatusOr<std::vector<UniqueFd>> peers = ConnectPeers(mesh);
  if (!peers.ok()) return peers.status();

  PeerWatch::Options watch;
  watch.node = options_.node;
  watch.node_names = options_.node_names;
  watch.silence_limit = options_.silence_limit;
  watch.on_failure = [this](const absl::Status& why) {
    if (Fail(why) && options_.failed != nullptr) options_.failed(why);
  };
  watch_ = std::make_unique<PeerWatch>(std::move(watch), *std::move(peers), &progress_);
  return absl::OkStatus();
}

absl::Status GlooEngine::ConnectLanes(std::uint64_t deadline_ns) {
  const auto nodes = static_cast<int>(options_.nodes);
  GlooLane::Owner* const owner = this;
  for (int lane = 0; lane < options_.lanes; ++lane) {
    GlooStore store(options_.store, absl::StrCat("lane", lane, "/"), deadline_ns,
                    [this] { return failure(); });
    const absl::Status status = GuardGloo([&] {
      const std::uint64_t now_ns = MonotonicNowNs();
      const std::uint64_t left_ms = deadline_ns > now_ns ? (deadline_ns - now_ns) / 1'000'000 : 0;
      gloo::transport::tcp::attr attributes(options_.address.c_str());
      // A device, hence a thread that reads and writes, for each lane.
      auto device = gloo::transport::tcp::CreateDevice(attributes);
      auto context =
          std::make_shared<gloo::rendezvous::Context>(static_cast<int>(options_.node), nodes);
      // Gloo gives each connection five times the context's time, and cannot be interrupted.
      context->setTimeout(std::chrono::milliseconds(std::min(left_ms, kConnectionLimitMs) / 5 + 1));
      context->connectFullMesh(store, device);
      contexts_.push_back(context);
      const auto index = static_cast<std::size_t>(lane);
      std::byte* const memory =
          options_.memory != nullptr
              ? options_.memory + index * LaneBytes(options_.chunk_bytes, options_.nodes)
              : nullptr;
      lanes_.push_back(std::make_unique<GlooLane>(context, options_.chunk_bytes, memory, owner,
                                                  &progress_[index]));
    });
    if (!store.status().ok()) return store.status();
    if (!status.ok()) return status;
    if (failed()) return failure();
  }
  {
    MutexLock lock(&mutex_);
    abortable_ = true;
    if (!failure_.ok()) return failure_;
  }
  for (auto& lane : lanes_) lane->Start();
  return absl::OkStatus();
}

GlooEngine::~GlooEngine() {
  const bool in_order = pending_.load(std::memory_order_acquire) == 0 && !failed();
  // After an earlier failure, the other nodes know that one.
  if (Fail(EngineEnded()) && !in_order && watch_ != nullptr) watch_->Say(EngineEnded());
  for (auto& lane : lanes_) lane->Stop();
  watch_.reset();
  if (in_order) return;
  // A connection that is closed in order still delivers its data. This one drops its data and the
  // lanes' buffers at once.
  for (auto& context : contexts_) GuardGloo([&] { context->closeConnections(); }).IgnoreError();
}

bool GlooEngine::Fail(const absl::Status& why) {
  {
    MutexLock lock(&mutex_);
    if (!failure_.ok()) return false;
    failure_ = why.ok() ? absl::CancelledError("aborted") : why;
    failed_.store(true, std::memory_order_release);
    if (abortable_) {
      for (auto& lane : lanes_) lane->Abort();
    }
  }
  has_failed_.NotifyAll();
  return true;
}

absl::Status GlooEngine::failure() {
  MutexLock lock(&mutex_);
  return failure_;
}

void GlooEngine::Abort(const absl::Status& why) {
  if (Fail(why)) watch_->Say(failure());
}

void GlooEngine::AwaitFailure(const absl::Status& why) {
  if (!failed()) watch_->Suspect(why);
  MutexLock lock(&mutex_);
  while (failure_.ok()) has_failed_.Wait(&mutex_);
}

void GlooEngine::Broken(const absl::Status& why) {
  std::vector<std::string> others = options_.node_names;
  others.erase(others.begin() + options_.node);
  // As far as this node can see, every node is alive: any of the connections may have broken.
  AwaitFailure(absl::IsUnavailable(why)
                   ? PeerLost(absl::StrJoin(others, ", "), why.message())
                   : MakeError(why.code(), reason::kEngineBroken, why.message()));
}

void GlooEngine::Finished(const LaneWork& work) {
  Exchange* const exchange = work.exchange;
  const std::unique_ptr<Exchange> owned(work.owned ? exchange : nullptr);
  const bool dropped = exchange->dropped.load(std::memory_order_relaxed);
  exchanges_.fetch_add(1, std::memory_order_relaxed);
  pending_.fetch_sub(1, std::memory_order_acq_rel);
  exchange->done(dropped ? failure() : absl::OkStatus());
}

void GlooEngine::Submit(Exchange* exchange) {
  LaneWork work;
  work.exchange = exchange;
  const bool same = exchange->exact || IsOrderFree(exchange->op, exchange->dtype);
  work.item_bytes = ItemSize(WorkType(exchange->dtype, exchange->op));
  work.wire = WireDataType(exchange->dtype, same ? WireType::kSame : options_.wire);
  Push(work);
}

void GlooEngine::Broadcast(std::byte* data, std::size_t bytes, std::uint32_t root_node,
                           std::function<void(const absl::Status&)> done) {
  auto* exchange = new Exchange;  // deleted when it has finished
  exchange->count = bytes;
  exchange->gather = [data](std::size_t first, std::size_t count, std::byte* to) {
    std::memcpy(to, data + first, count);
  };
  exchange->scatter = [data](std::size_t first, std::size_t count, const std::byte* from) {
    std::memcpy(data + first, from, count);
  };
  exchange->done = std::move(done);
  PushBroadcast(exchange, root_node, /*owned=*/true);
}

void GlooEngine::SubmitBroadcast(Exchange* exchange, std::uint32_t root_node) {
  PushBroadcast(exchange, root_node, /*owned=*/false);
}

void GlooEngine::PushBroadcast(Exchange* exchange, std::uint32_t root_node, bool owned) {
  LaneWork work;
  work.exchange = exchange;
  work.item_bytes = 1;
  work.root = static_cast<int>(root_node);
  work.owned = owned;
  Push(work);
}

void GlooEngine::Push(LaneWork work) {
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

EngineStatistics GlooEngine::Statistics() const {
  EngineStatistics statistics;
  statistics.exchanges = exchanges_.load(std::memory_order_relaxed);
  for (const auto& lane : lanes_) statistics.lanes.push_back(lane->Statistics());
  return statistics;
}

}  // namespace gradsync::daemon
