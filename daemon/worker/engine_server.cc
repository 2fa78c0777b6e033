#include "daemon/worker/engine_server.h"

#include <unistd.h>

#include <chrono>
#include <system_error>
#include <utility>

#include "absl/strings/str_cat.h"
#include "absl/time/time.h"
#include "daemon/base/thread.h"
#include "daemon/engine/lane_memory.h"
#include "daemon/worker/worker_error.h"

namespace gradsync::daemon {

namespace {

absl::StatusOr<std::shared_ptr<const PeerTlsKeys>> ReadKeys(int fd,
                                                            const worker::EngineKeys& parts) {
  auto keys = std::make_shared<PeerTlsKeys>();
  off_t at = 0;
  for (const auto& [text, bytes] :
       {std::pair(&keys->certificate, parts.certificate_bytes()),
        std::pair(&keys->key, parts.key_bytes()), std::pair(&keys->ca, parts.ca_bytes())}) {
    text->resize(bytes);
    if (pread(fd, text->data(), bytes, at) != static_cast<ssize_t>(bytes)) {
      return absl::InternalError("the keys for TLS cannot be read");
    }
    at += static_cast<off_t>(bytes);
  }
  return keys;
}

// The threads of the engine's lanes are started deep within it.
absl::StatusOr<std::unique_ptr<TcpEngine>> ConnectEngine(const TcpOptions& options) {
  try {
    return TcpEngine::Connect(options);
  } catch (const std::system_error&) {
    return OutOfThreads();
  }
}

}  // namespace

// An exchange that has not finished. Deletes itself when it has.
struct EngineServer::Running {
  std::uint64_t call = 0;
  Exchange exchange;
};

EngineServer::~EngineServer() {
  if (thread_.joinable()) thread_.join();
  std::unique_ptr<TcpEngine> engine;
  {
    const MutexLock lock(&mutex_);
    engine = std::move(engine_);
  }
  engine.reset();  // its last callbacks use the other members
}

bool EngineServer::Take(const worker::Call& call, std::vector<UniqueFd> descriptors) {
  TcpEngine* engine = nullptr;
  {
    const MutexLock lock(&mutex_);
    engine = engine_.get();
  }
  switch (call.kind_case()) {
    case worker::Call::kEngineStart:
      return Start(call.id(), call.engine_start(), std::move(descriptors));
    case worker::Call::kEngineValue: {
      {
        const MutexLock lock(&mutex_);
        values_[call.engine_value().key()] = call.engine_value().value();
      }
      changed_.NotifyAll();
      break;
    }
    case worker::Call::kEngineExchange:
      return engine != nullptr && Submit(call.id(), call.engine_exchange());
    case worker::Call::kEngineAbort:
      if (engine == nullptr) return false;
      engine->Abort(DecodeError(call.engine_abort().why()));
      break;
    case worker::Call::kPing:
      break;
    default:
      return false;
  }
  Reply(call.id(), absl::OkStatus());
  return true;
}

bool EngineServer::connecting() const {
  const MutexLock lock(&mutex_);
  return connecting_;
}

// ---- Connecting

bool EngineServer::Start(std::uint64_t call, const worker::EngineStart& start,
                         std::vector<UniqueFd> descriptors) {
  // The memory, the keys if there are any, and the lanes.
  const std::size_t first_lane = start.has_keys() ? 2 : 1;
  if (thread_.joinable() || descriptors.size() != first_lane + start.lanes()) return false;
  TcpOptions options;
  options.lanes = static_cast<int>(start.lanes());
  options.chunk_bytes = start.chunk_bytes();
  options.wire = static_cast<WireType>(start.wire_type());
  options.silence_limit = absl::Nanoseconds(start.silence_limit_ns());
  options.node = start.node();
  options.nodes = static_cast<std::uint32_t>(start.node_names_size());
  options.node_names.assign(start.node_names().begin(), start.node_names().end());
  options.address = start.address();
  options.connect_timeout = absl::Nanoseconds(start.connect_timeout_ns());
  options.store = this;
  options.failed = [this](const absl::Status& why) {
    worker::EngineEvent event;
    *event.mutable_failed() = EncodeError(why);
    Tell(event);
  };
  auto memory = EngineMemory::Map(descriptors[0].get(), options.lanes,
                                  LaneBytes(options.chunk_bytes, options.nodes));
  if (!memory.ok()) {
    Reply(call, memory.status());
    return true;
  }
  memory_.emplace(*std::move(memory));
  options.memory = memory_->lanes();
  if (start.has_keys()) {
    auto keys = ReadKeys(descriptors[1].get(), start.keys());
    if (!keys.ok()) {
      Reply(call, keys.status());
      return true;
    }
    options.keys = *std::move(keys);
  }
  for (std::size_t i = first_lane; i < descriptors.size(); ++i) {
    lanes_.emplace_back(std::move(descriptors[i]));
  }
  {
    const MutexLock lock(&mutex_);
    connecting_ = true;
  }
  // The engine has two threads per lane, and one that watches.
  absl::StatusOr<std::thread> thread = OutOfThreads();
  if (CanStartThreads(2 + 2 * static_cast<int>(options.lanes))) {
    thread = StartCountedThread([this, call, options] { Connect(call, options); });
  }
  if (thread.ok()) {
    thread_ = *std::move(thread);
  } else {
    Reply(call, thread.status());
  }
  return true;
}

void EngineServer::Connect(std::uint64_t call, const TcpOptions& options) {
  const MayBeRefused refusal;
  auto engine = ConnectEngine(options);
  const absl::Status status = engine.status();
  {
    const MutexLock lock(&mutex_);
    connecting_ = false;
    if (engine.ok()) engine_ = *std::move(engine);
  }
  Reply(call, status);
}

absl::Status EngineServer::Set(const std::string& key, const std::string& value) {
  worker::EngineEvent event;
  event.mutable_set()->set_key(key);
  event.mutable_set()->set_value(value);
  Tell(event);
  return absl::OkStatus();
}

absl::StatusOr<std::string> EngineServer::Get(const std::string& key, absl::Duration timeout) {
  const auto deadline = std::chrono::steady_clock::now() + absl::ToChronoNanoseconds(timeout);
  bool ask = false;
  {
    const MutexLock lock(&mutex_);
    ask = values_.emplace(key, std::nullopt).second;
  }
  if (ask) {
    worker::EngineEvent event;
    event.set_get(key);
    Tell(event);
  }
  const MutexLock lock(&mutex_);
  for (;;) {
    const std::optional<std::string>& value = values_[key];
    if (value.has_value()) return *value;
    if (!changed_.WaitUntil(&mutex_, deadline) && !values_[key].has_value()) {
      return absl::DeadlineExceededError(absl::StrCat("no node has set '", key, "'"));
    }
  }
}

// ---- Exchanges

bool EngineServer::Submit(std::uint64_t call, const worker::EngineExchange& message) {
  auto* const running = new Running;  // deleted by Finished()
  running->call = call;
  Exchange& exchange = running->exchange;
  exchange.dtype = static_cast<DataType>(message.data_type());
  exchange.count = message.count();
  exchange.op = static_cast<ReduceOp>(message.op());
  exchange.exact = message.exact();
  exchange.gather = [this, id = message.exchange()](std::size_t first, std::size_t count,
                                                    std::byte* sum) {
    Ask({ChunkRequest::kGather, id, first, count, 0}, sum);
  };
  exchange.scatter = [this, id = message.exchange()](std::size_t first, std::size_t count,
                                                     const std::byte* sum) {
    Ask({ChunkRequest::kScatter, id, first, count, 0}, sum);
  };
  exchange.done = [this, running](const absl::Status& status) { Finished(running, status); };
  TcpEngine* engine = nullptr;
  {
    const MutexLock lock(&mutex_);
    engine = engine_.get();
  }
  if (exchange.dtype == DataType::kUnspecified) {
    engine->SubmitBroadcast(&exchange, message.root_node());
  } else {
    engine->Submit(&exchange);
  }
  return true;
}

void EngineServer::Ask(ChunkRequest request, const std::byte* sum) const {
  const auto offset = static_cast<std::size_t>(sum - memory_->lanes());
  request.offset = offset % memory_->lane_bytes();
  // The daemon has ended, or is about to kill this process.
  if (!lanes_[offset / memory_->lane_bytes()].Ask(request)) _exit(1);
}

void EngineServer::Finished(Running* running, const absl::Status& status) {
  {
    const MutexLock statistics(&statistics_mutex_);
    TcpEngine* engine = nullptr;
    {
      const MutexLock lock(&mutex_);
      engine = engine_.get();
    }
    // Null while it is destroyed.
    if (engine != nullptr) memory_->Write(engine->Statistics());
  }
  Reply(running->call, status);
  delete running;  // the engine's last use of it was this call
}

// ---- Messages to the daemon

void EngineServer::Reply(std::uint64_t call, const absl::Status& status) const {
  worker::Reply reply;
  reply.set_call(call);
  if (!status.ok()) *reply.mutable_error() = EncodeError(status);
  Send(reply);
}

void EngineServer::Tell(const worker::EngineEvent& event) const {
  worker::Reply reply;
  *reply.mutable_engine_event() = event;
  Send(reply);
}

void EngineServer::Send(const worker::Reply& reply) const {
  if (!socket_->Send(reply, {}, MessageSocket::Wait::kYes).ok()) _exit(1);
}

}  // namespace gradsync::daemon
