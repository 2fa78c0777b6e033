// A coordinator that a trainer has chosen: it tells the trainer's daemon what the test wants.

#ifndef TESTS_FAULT_FAKE_COORDINATOR_H_
#define TESTS_FAULT_FAKE_COORDINATOR_H_

#include <grpcpp/grpcpp.h>
#include <grpcpp/server.h>

#include <atomic>
#include <cstdint>
#include <functional>
#include <memory>
#include <string>

#include "gradsync/v1/peer.grpc.pb.h"

namespace gradsync::fault {

// Runs the script once per stream, on a thread of gRPC. The stream ends when the script returns.
// The destructor cancels the streams and waits for their scripts.
class FakeCoordinator final : public v1::Peer::Service {
 public:
  using Stream = grpc::ServerReaderWriter<v1::AttachResponse, v1::AttachRequest>;

  explicit FakeCoordinator(std::function<void(Stream*)> script);
  ~FakeCoordinator() override;
  std::string address() const;

  static v1::AttachResponse Welcome();
  // Asks for an engine with a node that does not answer.
  static v1::AttachResponse ConnectEngine(std::uint64_t epoch);
  // Reads, and pings, until an engine was refused because the job has four that have not ended.
  // False: the stream has ended.
  static bool AwaitRefusedEngine(Stream* stream);
  // A script that asks for a new engine whenever one is refused: so the job nearly always has as
  // many as it may. Sets *full when the first one is refused.
  static std::function<void(Stream*)> AskForEngines(std::atomic<bool>* full);

 private:
  grpc::Status Attach(grpc::ServerContext* context, Stream* stream) override;

  const std::function<void(Stream*)> script_;
  int port_ = 0;
  std::unique_ptr<grpc::Server> server_;
};

}  // namespace gradsync::fault

#endif  // TESTS_FAULT_FAKE_COORDINATOR_H_
