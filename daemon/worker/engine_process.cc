#include "daemon/worker/engine_process.h"

#include <fcntl.h>
#include <unistd.h>

#include <algorithm>
#include <cerrno>
#include <chrono>
#include <optional>
#include <utility>

#include "absl/strings/str_cat.h"
#include "daemon/arena/sealed_memory.h"
#include "daemon/base/error.h"
#include "daemon/base/thread.h"
#include "daemon/engine/broadcast.h"
#include "daemon/engine/lane_memory.h"
#include "daemon/worker/engine_main.h"
#include "daemon/worker/store_desk.h"
#include "daemon/worker/worker_error.h"

namespace gradsync::daemon {
namespace {

using SteadyClock = std::chrono::steady_clock;

// How long one look at the store may take, and one wait for the process. Between them it looks
// whether the nodes still want to connect.
constexpr absl::Duration kLook = absl::Milliseconds(20);
// A process that owes an answer is lost after this silence, if silence_limit is shorter.
constexpr absl::Duration kMinHangLimit = absl::Seconds(5);

absl::Status EngineLost(const std::string& node, absl::string_view how) {
  return MakeError(absl::StatusCode::kUnavailable, reason::kEngineLost,
                   absl::StrCat("the engine process of node ", node, " ", how,
                                "; see the log of that node's daemon"),
                   {{field::kNode, node}});
}

worker::EngineStart StartMessage(const EngineOptions& options) {
  worker::EngineStart start;
  start.set_node(options.node);
  *start.mutable_node_names() = {options.node_names.begin(), options.node_names.end()};
  start.set_address(options.address);
  start.set_lanes(static_cast<std::uint32_t>(options.lanes));
  start.set_chunk_bytes(options.chunk_bytes);
  start.set_wire_type(static_cast<std::uint32_t>(options.wire));
  start.set_silence_limit_ns(
      static_cast<std::uint64_t>(absl::ToInt64Nanoseconds(options.silence_limit)));
  start.set_connect_timeout_ns(
      static_cast<std::uint64_t>(absl::ToInt64Nanoseconds(options.connect_timeout)));
  if (options.keys != nullptr) {
    start.mutable_keys()->set_certificate_bytes(options.keys->certificate.size());
    start.mutable_keys()->set_key_bytes(options.keys->key.size());
    start.mutable_keys()->set_ca_bytes(options.keys->ca.size());
  }
  return start;
}

// A file without a name, which the engine process reads: a message may be too small for it.
absl::StatusOr<UniqueFd> KeysFile(const PeerTlsKeys& keys) {
  const auto memory = SealedMemory::Create(
      "gradsync engine keys", keys.certificate.size() + keys.key.size() + keys.ca.size());
  if (!memory.ok()) return memory.status();
  off_t at = 0;
  for (const std::string* part : {&keys.certificate, &keys.key, &keys.ca}) {
    if (pwrite(memory->fd(), part->data(), part->size(), at) !=
        static_cast<ssize_t>(part->size())) {
      return absl::ErrnoToStatus(errno, "writing the keys of an engine");
    }
    at += static_cast<off_t>(part->size());
  }
  UniqueFd file(fcntl(memory->fd(), F_DUPFD_CLOEXEC, 0));
  if (!file.valid()) return absl::ErrnoToStatus(errno, "dup");
  return file;
}

}  // namespace

EngineProcess::EngineProcess(const EngineOptions& options, EngineMemory memory,
                             const EngineUser& user, std::unique_ptr<SerialExecutor> errors)
    : options_(options),
      memory_(std::move(memory)),
      user_(user),
      turns_(user.gate, user.id),
      errors_(std::move(errors)),
      ledger_(options.chunk_bytes, memory_.lane_bytes()) {}

absl::StatusOr<std::unique_ptr<EngineProcess>> EngineProcess::Connect(const EngineOptions& options,
                                                                      WorkerProcessOptions process,
                                                                      const EngineUser& user) {
  absl::Status status = ValidateEngine(options, options.nodes);
  if (!status.ok()) return status;
  if (options.node >= options.nodes || options.node_names.size() != options.nodes ||
      options.store == nullptr) {
    return absl::InvalidArgumentError("an engine needs its node, every node's name and a store");
  }
  const std::size_t lane_bytes = LaneBytes(options.chunk_bytes, options.nodes);
  const auto file =
      SealedMemory::Create("gradsync engine", EngineMemory::Bytes(options.lanes, lane_bytes));
  if (!file.ok()) return file.status();
  auto memory = EngineMemory::Map(file->fd(), options.lanes, lane_bytes);
  if (!memory.ok()) return memory.status();
  auto errors = SerialExecutor::Start();
  if (!errors.ok()) return errors.status();
  std::unique_ptr<EngineProcess> engine(
      new EngineProcess(options, *std::move(memory), user, *std::move(errors)));
  status = engine->Start(std::move(process), file->fd());
  if (status.ok()) status = engine->StartLanes();
  if (status.ok()) status = engine->ServeStore();
  if (!status.ok()) {
    {
      const MutexLock lock(&engine->mutex_);
      engine->said_ = true;  // the caller learns of it from this call
    }
    if (engine->process_ != nullptr) engine->process_->End(status);
    return status;
  }
  return engine;
}

absl::Status EngineProcess::StartLanes() {
  std::vector<std::function<void()>> bodies;
  for (std::size_t lane = 0; lane < lanes_.size(); ++lane) {
    bodies.emplace_back([this, lane] { ServeLane(lane); });
  }
  return StartThreads(std::move(bodies), &threads_);
}

absl::Status EngineProcess::Start(WorkerProcessOptions process, int memory_fd) {
  std::vector<UniqueFd> descriptors;
  descriptors.emplace_back(fcntl(memory_fd, F_DUPFD_CLOEXEC, 0));
  if (!descriptors.back().valid()) return absl::ErrnoToStatus(errno, "dup");
  if (options_.keys != nullptr) {
    auto file = KeysFile(*options_.keys);
    if (!file.ok()) return file.status();
    descriptors.push_back(*std::move(file));
  }
  for (int lane = 0; lane < options_.lanes; ++lane) {
    auto pair = LaneSocket::Pair();
    if (!pair.ok()) return pair.status();
    lanes_.push_back(std::move(pair->first));
    descriptors.push_back(pair->second.Release());
  }
  process.argument = kEngineArgument;
  process.takes_descriptors = false;
  process.start_limit = options_.connect_timeout + kStartLimit;
  process.hang_limit = std::max(options_.silence_limit, kMinHangLimit);
  process.lost = [node = options_.node_names[options_.node]](absl::string_view how) {
    return EngineLost(node, how);
  };
  process.event = [this](const worker::EngineEvent& event) { OnEvent(event); };
  auto started = WorkerProcess::Start(std::move(process), [this](const absl::Status& why) {
    turns_.Close();
    Failed(why);
  });
  if (!started.ok()) return started.status();
  process_ = *std::move(started);
  priority_.emplace(user_.priorities, user_.id, [this](int nice) { process_->SetNice(nice); });
  worker::Call call;
  *call.mutable_engine_start() = StartMessage(options_);
  process_->Call(std::move(call), std::move(descriptors), [this](const auto& reply) {
    const MutexLock lock(&mutex_);
    if (!connecting_) return;
    connecting_ = false;
    connected_ = reply.status();
    changed_.NotifyAll();
  });
  return absl::OkStatus();
}

EngineProcess::~EngineProcess() {
  priority_.reset();
  // It ends in order, and every call is answered. The last ones may still call it.
  if (process_ != nullptr) process_->Stop();
  turns_.Close();
  for (const LaneSocket& lane : lanes_) lane.Shutdown();
  for (std::thread& thread : threads_) thread.join();
  errors_.reset();
}

// ---- While nodes connect

void EngineProcess::OnEvent(const worker::EngineEvent& event) {
  if (event.has_failed()) return Failed(DecodeError(event.failed()));
  const MutexLock lock(&mutex_);
  if (!connecting_) return;
  events_.push_back(event);
  event_bytes_ += event.SpaceUsedLong();
  if (events_.size() > kMaxEvents || event_bytes_ > kMaxEventBytes) {
    connecting_ = false;
    connected_ = Broken("asked for too much at once");
  }
  changed_.NotifyAll();
}

absl::Status EngineProcess::ServeStore() {
  const SteadyClock::time_point deadline =
      SteadyClock::now() + absl::ToChronoNanoseconds(options_.connect_timeout + 2 * kStartLimit);
  StoreDesk desk(options_.store);
  for (;;) {
    std::deque<worker::EngineEvent> events;
    {
      const MutexLock lock(&mutex_);
      if (connecting_ && events_.empty() && !desk.busy()) {
        changed_.WaitUntil(&mutex_, SteadyClock::now() + absl::ToChronoNanoseconds(kLook));
      }
      if (!connecting_) return connected_;
      events.swap(events_);
      event_bytes_ = 0;
    }
    for (const worker::EngineEvent& event : events) {
      if (absl::Status status = desk.Take(event); !status.ok()) return status;
    }
    if (desk.refused()) {
      return Broken("asked for too much: a value twice, too many values, or a long key");
    }
    if (absl::Status cancelled = options_.store->Cancelled(); !cancelled.ok()) return cancelled;
    if (SteadyClock::now() > deadline) return Broken("neither connected nor failed in time");
    if (!desk.busy()) continue;
    const absl::Status looked =
        desk.Look(kLook, [this](const std::string& key, const std::string& value) {
          worker::Call call;
          call.mutable_engine_value()->set_key(key);
          call.mutable_engine_value()->set_value(value);
          process_->Call(std::move(call), {}, [](const auto&) {});
        });
    if (!looked.ok()) return looked;
  }
}

// ---- Exchanges

void EngineProcess::Submit(Exchange* exchange) {
  worker::Call call;
  worker::EngineExchange* const message = call.mutable_engine_exchange();
  message->set_data_type(static_cast<std::uint32_t>(exchange->dtype));
  message->set_count(exchange->count);
  message->set_op(static_cast<std::uint32_t>(exchange->op));
  message->set_exact(exchange->exact);
  {
    const MutexLock lock(&mutex_);
    message->set_exchange(ledger_.Add(exchange));
  }
  SubmitCall(std::move(call));
}

void EngineProcess::Broadcast(std::vector<std::byte*> buffers, std::size_t bytes,
                              std::uint32_t root_node,
                              std::function<void(const absl::Status&)> done) {
  auto exchange = MakeBroadcast(std::move(buffers), bytes, std::move(done));
  worker::Call call;
  worker::EngineExchange* const message = call.mutable_engine_exchange();
  message->set_count(bytes);
  message->set_root_node(root_node);
  {
    const MutexLock lock(&mutex_);
    message->set_exchange(ledger_.AddBroadcast(std::move(exchange), root_node == options_.node));
  }
  SubmitCall(std::move(call));
}

void EngineProcess::SubmitCall(worker::Call call) {
  priority_->Work();
  const std::uint64_t id = call.engine_exchange().exchange();
  process_->Call(std::move(call), {}, [this, id](const auto& reply) {
    if (reply.ok()) return Answered(id, absl::OkStatus());
    // This may be within Submit(), which must not call done().
    errors_->Run([this, id, status = reply.status()] { Answered(id, status); });
  });
}

void EngineProcess::Answered(std::uint64_t id, absl::Status status) {
  {
    const MutexLock lock(&mutex_);
    if (!ledger_.Awaits(id)) return;
    if (status.ok() && !ledger_.IsWhole(id)) {
      status = Broken("finished an exchange before its last chunk");
      process_->Kill(status);
    }
    if (!status.ok()) status = FailureLocked(status);
    ledger_.Answer(id, status);
  }
  FinishIfIdle(id);
}

void EngineProcess::FinishIfIdle(std::uint64_t id) {
  std::optional<ChunkLedger::Finished> finished;
  {
    const MutexLock lock(&mutex_);
    finished = ledger_.TakeFinished(id);
  }
  if (finished.has_value()) finished->exchange->done(finished->status);
}

// ---- Chunks

void EngineProcess::ServeLane(std::size_t lane) {
  for (;;) {
    ChunkRequest request;
    const LaneSocket::Taken taken = lanes_[lane].Take(&request);
    if (taken == LaneSocket::Taken::kEnd) return;
    if (taken == LaneSocket::Taken::kMalformed || !ServeChunk(lane, request)) {
      process_->Kill(Broken("sent a malformed request for a chunk"));
      return;
    }
    lanes_[lane].Answer();
  }
}

bool EngineProcess::ServeChunk(std::size_t lane, const ChunkRequest& request) {
  std::optional<ChunkLedger::Chunk> chunk;
  {
    const MutexLock lock(&mutex_);
    chunk = ledger_.Begin(request);
  }
  if (!chunk.has_value()) return false;
  {
    const TurnGate::Turn turn(&turns_, chunk->traffic);
    std::byte* const sum = memory_.lane(lane) + request.offset;
    // Without a turn the process has ended: nobody reads the chunk, and the exchange fails.
    if (turn.given() && request.step == ChunkRequest::kGather) {
      chunk->exchange->gather(request.first, request.count, sum);
    } else if (turn.given()) {
      chunk->exchange->scatter(request.first, request.count, sum);
    }
  }
  {
    const MutexLock lock(&mutex_);
    ledger_.End(request.exchange);
  }
  FinishIfIdle(request.exchange);
  return true;
}

// ---- Failures

absl::Status EngineProcess::Broken(absl::string_view how) const {
  return EngineLost(options_.node_names[options_.node], absl::StrCat(how, " and was killed"));
}

absl::Status EngineProcess::FailureLocked(const absl::Status& why) {
  if (failure_.ok()) failure_ = why;
  return failure_;
}

void EngineProcess::Failed(const absl::Status& why) {
  absl::Status failure;
  {
    const MutexLock lock(&mutex_);
    failure = FailureLocked(why);
    if (std::exchange(said_, true)) return;
  }
  if (options_.failed != nullptr) options_.failed(failure);
}

void EngineProcess::Abort(const absl::Status& why) {
  worker::Call call;
  {
    const MutexLock lock(&mutex_);
    if (!failure_.ok()) return;
    failure_ = why.ok() ? absl::CancelledError("aborted") : why;
    said_ = true;
    *call.mutable_engine_abort()->mutable_why() = EncodeError(failure_);
  }
  process_->Call(std::move(call), {}, [](const auto&) {});
}

EngineStatistics EngineProcess::Statistics() const { return memory_.Read(); }

}  // namespace gradsync::daemon
