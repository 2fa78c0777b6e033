// An engine process, seen from inside: runs a TcpEngine for the daemon.

#ifndef DAEMON_WORKER_ENGINE_SERVER_H_
#define DAEMON_WORKER_ENGINE_SERVER_H_

#include <cstdint>
#include <map>
#include <memory>
#include <optional>
#include <string>
#include <thread>
#include <vector>

#include "absl/base/thread_annotations.h"
#include "absl/status/status.h"
#include "absl/status/statusor.h"
#include "daemon/base/mutex.h"
#include "daemon/engine/rendezvous_store.h"
#include "daemon/engine/tcp_engine.h"
#include "daemon/worker/engine_memory.h"
#include "daemon/worker/lane_socket.h"
#include "daemon/worker/message_socket.h"
#include "daemon/worker/worker.pb.h"

namespace gradsync::daemon {

// Carries out the daemon's calls (worker.proto). One thread calls Take(); the engine's threads do
// the rest. This object is the rendezvous store of its engine, and gets the values from the daemon.
//
// Its threads may wait for the daemon without a deadline: main ends the process when the daemon has
// ended.
class EngineServer final : private RendezvousStore {
 public:
  // `socket` must outlive this object.
  explicit EngineServer(const MessageSocket* socket) : socket_(socket) {}
  // Do not destroy it while it connects.
  ~EngineServer() override;
  EngineServer(const EngineServer&) = delete;
  EngineServer& operator=(const EngineServer&) = delete;

  // Carries out any call but Stop. False: the call is malformed.
  bool Take(const worker::Call& call, std::vector<UniqueFd> descriptors);
  // True from EngineStart until its reply.
  bool connecting() const;

 private:
  struct Running;

  bool Start(std::uint64_t call, const worker::EngineStart& start,
             std::vector<UniqueFd> descriptors);
  void Connect(std::uint64_t call, const TcpOptions& options);
  bool Submit(std::uint64_t call, const worker::EngineExchange& message);
  void Finished(Running* running, const absl::Status& status);
  // Asks the daemon to fill or empty a chunk.
  void Ask(ChunkRequest request, const std::byte* sum) const;
  void Reply(std::uint64_t call, const absl::Status& status) const;
  void Tell(const worker::EngineEvent& event) const;
  void Send(const worker::Reply& reply) const;

  absl::Status Set(const std::string& key, const std::string& value) override;
  absl::StatusOr<std::string> Get(const std::string& key, absl::Duration timeout) override;

  const MessageSocket* const socket_;
  // Constant after Start().
  std::optional<EngineMemory> memory_;
  std::vector<LaneSocket> lanes_;

  mutable Mutex mutex_;
  CondVar changed_;
  std::map<std::string, std::optional<std::string>> values_ ABSL_GUARDED_BY(mutex_);  // asked for
  bool connecting_ ABSL_GUARDED_BY(mutex_) = false;
  std::unique_ptr<TcpEngine> engine_ ABSL_GUARDED_BY(mutex_);  // set once

  Mutex statistics_mutex_;  // one thread at a time publishes

  std::thread thread_;  // connects
};

}  // namespace gradsync::daemon

#endif  // DAEMON_WORKER_ENGINE_SERVER_H_
