// A gradsyncd that sends what a test says to one client of this process: for cases that a real one
// reaches only with a GPU, or never.

#ifndef TESTS_CLIENT_SCRIPTED_DAEMON_H_
#define TESTS_CLIENT_SCRIPTED_DAEMON_H_

#include <grpcpp/grpcpp.h>

#include <condition_variable>
#include <cstddef>
#include <deque>
#include <map>
#include <memory>
#include <mutex>
#include <optional>
#include <string>
#include <thread>
#include <vector>

#include "client/src/unix_socket.h"
#include "proto/gradsync/v1/gradsync.grpc.pb.h"
#include "tests/kit/temporary_directory.h"

namespace gradsync {

// Opens one session by itself, and then only receives. Thread-safe.
class ScriptedDaemon final : public v1::GradientSync::Service {
 public:
  // `opened`: the SessionOpened to send, in which this class sets protocol, incarnation, generation
  // and nonce. Allocates its staging_bytes.
  explicit ScriptedDaemon(v1::SessionOpened opened = {});
  ~ScriptedDaemon() override;

  std::string socket() const { return directory_.File("scripted.sock"); }

  // The client's next message; nullopt if none arrives in time.
  std::optional<v1::SessionRequest> Next();
  // True if Next() has returned every message that the client sent.
  bool Silent();
  void Say(const v1::SessionResponse& response);

  // The side socket returns `descriptors` for `nonce`. The caller still owns them.
  void Offer(const std::string& nonce, std::vector<int> descriptors);

  // The session's staging memory.
  std::byte* staging() const { return staging_; }

  // Breaks the stream, as the end of the process does.
  void Die();

 private:
  using Stream = grpc::ServerReaderWriter<v1::SessionResponse, v1::SessionRequest>;

  grpc::Status Session(grpc::ServerContext* context, Stream* stream) override;
  void ServeDescriptors();

  const v1::SessionOpened opened_;
  const client::FileDescriptor staging_memfd_;
  std::byte* const staging_;
  TemporaryDirectory directory_;
  std::unique_ptr<grpc::Server> server_;
  client::FileDescriptor listener_;
  std::thread descriptors_;

  std::mutex mutex_;
  // mutex_ guards what follows.
  std::condition_variable arrived_;
  std::deque<v1::SessionRequest> requests_;
  std::map<std::string, std::vector<int>> offers_;
  Stream* stream_ = nullptr;
  grpc::ServerContext* context_ = nullptr;
};

}  // namespace gradsync

#endif  // TESTS_CLIENT_SCRIPTED_DAEMON_H_
