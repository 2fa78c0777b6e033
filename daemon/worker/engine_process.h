// The engine between the nodes of a job, in a process of its own. Bytes from the network can end
// that process, and the job, but not the daemon.

#ifndef DAEMON_WORKER_ENGINE_PROCESS_H_
#define DAEMON_WORKER_ENGINE_PROCESS_H_

#include <sys/types.h>

#include <cstddef>
#include <cstdint>
#include <deque>
#include <functional>
#include <memory>
#include <optional>
#include <string>
#include <thread>
#include <vector>

#include "absl/base/thread_annotations.h"
#include "absl/status/status.h"
#include "absl/status/statusor.h"
#include "absl/strings/string_view.h"
#include "absl/time/time.h"
#include "daemon/base/executor.h"
#include "daemon/base/mutex.h"
#include "daemon/base/tenant.h"
#include "daemon/engine/engine.h"
#include "daemon/engine/engine_options.h"
#include "daemon/reduce/turn_gate.h"
#include "daemon/worker/chunk_ledger.h"
#include "daemon/worker/engine_memory.h"
#include "daemon/worker/engine_priorities.h"
#include "daemon/worker/lane_socket.h"
#include "daemon/worker/worker_process.h"

namespace gradsync::daemon {

// For whom an engine works, and what shares the CPUs between users: `gate` and `priorities` outlive
// the engine.
struct EngineUser {
  TurnGate* gate = nullptr;                // the lanes' turns; null: every turn begins at once
  EnginePriorities* priorities = nullptr;  // null: the process has the daemon's priority
  Tenant id;
};

// The daemon's side of an engine process (EngineServer has the other). The process never sees the
// trainers' memory. For each chunk, a lane asks the daemon to gather it into the lane's shared
// memory, and to scatter it from there. So there is no additional copy. Everything that the process
// says is checked. A process that breaks the protocol is killed.
//
// The lanes of all engines take turns by user while they gather and scatter (TurnGate). For the
// rest the processes of a user have the weight of one (EnginePriorities).
//
// Thread-safe. Has a thread for each lane, one for errors, and that of the WorkerProcess. Errors,
// besides those of engine.h:
//   UNAVAILABLE  ENGINE_LOST: the process has ended. Field "node": this node.
class EngineProcess final : public Engine {
 public:
  // Starts a process, which connects to the other nodes. Blocks for up to connect_timeout plus
  // kStartLimit. `process`: the program and its environment. Errors: those of TcpEngine::Connect;
  // ENGINE_LOST; the store's; and those of starting a process.
  static absl::StatusOr<std::unique_ptr<EngineProcess>> Connect(const EngineOptions& options,
                                                                WorkerProcessOptions process = {},
                                                                const EngineUser& user = {});
  ~EngineProcess() override;
  EngineProcess(const EngineProcess&) = delete;
  EngineProcess& operator=(const EngineProcess&) = delete;

  void Submit(Exchange* exchange) override;
  void Broadcast(std::vector<std::byte*> buffers, std::size_t bytes, std::uint32_t root_node,
                 std::function<void(const absl::Status&)> done) override;
  void Abort(const absl::Status& why) override;
  EngineStatistics Statistics() const override;

  pid_t pid() const { return process_->pid(); }

 private:
  static constexpr absl::Duration kStartLimit = absl::Seconds(20);
  // The most that is kept while the nodes connect: events, and their bytes.
  static constexpr std::size_t kMaxEvents = 1024;
  static constexpr std::size_t kMaxEventBytes = 1 << 20;

  EngineProcess(const EngineOptions& options, EngineMemory memory, const EngineUser& user,
                std::unique_ptr<SerialExecutor> errors);

  // Starts the process, and makes it begin to connect.
  absl::Status Start(WorkerProcessOptions process, int memory_fd);
  // Answers what the process asks of the store, until it has connected.
  absl::Status ServeStore();
  absl::Status StartLanes();
  void OnEvent(const worker::EngineEvent& event);

  void ServeLane(std::size_t lane);
  // False: the request breaks the protocol.
  bool ServeChunk(std::size_t lane, const ChunkRequest& request);
  void SubmitCall(worker::Call call);
  void Answered(std::uint64_t id, absl::Status status);
  // Calls done() if the exchange is answered and no callback runs.
  void FinishIfIdle(std::uint64_t id);
  // The engine's first error. That is `why` if there was none before.
  absl::Status FailureLocked(const absl::Status& why) ABSL_EXCLUSIVE_LOCKS_REQUIRED(mutex_);
  // The engine has failed by itself.
  void Failed(const absl::Status& why);
  absl::Status Broken(absl::string_view how) const;

  const EngineOptions options_;
  const EngineMemory memory_;
  const EngineUser user_;
  TurnGate::Client turns_;                  // closed once the process has ended
  std::unique_ptr<SerialExecutor> errors_;  // calls done() where Submit() must not

  mutable Mutex mutex_;
  CondVar changed_;
  std::deque<worker::EngineEvent> events_ ABSL_GUARDED_BY(mutex_);  // until it has connected
  std::size_t event_bytes_ ABSL_GUARDED_BY(mutex_) = 0;
  bool connecting_ ABSL_GUARDED_BY(mutex_) = true;
  absl::Status connected_ ABSL_GUARDED_BY(mutex_);  // once it is not connecting_
  ChunkLedger ledger_ ABSL_GUARDED_BY(mutex_);
  absl::Status failure_ ABSL_GUARDED_BY(mutex_);
  bool said_ ABSL_GUARDED_BY(mutex_) = false;  // `failed` was called, or Abort()

  std::vector<LaneSocket> lanes_;  // constant after Start()
  std::unique_ptr<WorkerProcess> process_;
  std::optional<EnginePriorities::Engine> priority_;  // of process_
  std::vector<std::thread> threads_;                  // by lane
};

}  // namespace gradsync::daemon

#endif  // DAEMON_WORKER_ENGINE_PROCESS_H_
