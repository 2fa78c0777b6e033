// A gradsyncd that says what a test says, to one client of this process: for what a real one does
// only with a GPU, or never.

#ifndef TESTS_CLIENT_SCRIPTED_DAEMON_H_
#define TESTS_CLIENT_SCRIPTED_DAEMON_H_

#include <grpcpp/grpcpp.h>

#include <condition_variable>
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
#include "tests/client/temp_directory.h"

namespace gradsync {

// Opens one session by itself, and then only listens. Thread-safe.
class ScriptedDaemon final : public v1::GradientSync::Service {
 public:
  // Speaks protocol 1.`protocol`.
  explicit ScriptedDaemon(std::uint32_t protocol = 4);
  ~ScriptedDaemon() override;

  std::string socket() const { return directory_.File("scripted.sock"); }

  // The client's next message; nothing if none comes in time.
  std::optional<v1::SessionRequest> Next();
  // True if it has sent no message that Next() has not given.
  bool Silent();
  void Say(const v1::SessionResponse& response);

  // What the side socket gives for `nonce`; the descriptors stay the caller's.
  void Offer(const std::string& nonce, std::vector<int> descriptors);

  // The stream breaks, as when the process dies.
  void Die();

 private:
  using Stream = grpc::ServerReaderWriter<v1::SessionResponse, v1::SessionRequest>;

  grpc::Status Session(grpc::ServerContext* context, Stream* stream) override;
  void ServeDescriptors();

  const std::uint32_t protocol_;
  TempDirectory directory_;
  std::unique_ptr<grpc::Server> server_;
  client::FileDescriptor listener_;
  std::thread descriptors_;

  std::mutex mutex_;
  // The rest is guarded by mutex_.
  std::condition_variable arrived_;
  std::deque<v1::SessionRequest> requests_;
  std::map<std::string, std::vector<int>> offers_;
  Stream* stream_ = nullptr;
  grpc::ServerContext* context_ = nullptr;
};

}  // namespace gradsync

#endif  // TESTS_CLIENT_SCRIPTED_DAEMON_H_
