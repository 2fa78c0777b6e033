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
  // Reads until a message of this kind comes, and returns it. If the stream ends first, the result
  // has no kind. A Pong may come between any two messages: the daemon sends it unasked while a
  // message waits for its turn there.
  static v1::AttachRequest Await(Stream* stream, v1::AttachRequest::KindCase kind);
  // The longest message of a coordinator, of empty parts: each takes two bytes here, and dozens in
  // a daemon that parses it.
  static v1::AttachResponse Longest();
  // Asks for an engine with a node that does not answer.
  static v1::AttachResponse ConnectEngine(std::uint64_t epoch);
  // Asks for kEnginesAtOnce engines, and for a new one whenever one has ended or was refused, until
  // one was refused because the job has four that have not ended. `*asked`: how many it has asked
  // for on this stream, 0 at first. False: the stream has ended.
  static bool AskUntilRefused(Stream* stream, std::uint64_t* asked);
  // A script that does so until the stream ends: so the job nearly always has as many engines as it
  // may. Sets *full when the first one is refused.
  static std::function<void(Stream*)> AskForEngines(std::atomic<bool>* full);

 private:
  static constexpr std::uint64_t kEnginesAtOnce = 32;

  grpc::Status Attach(grpc::ServerContext* context, Stream* stream) override;

  const std::function<void(Stream*)> script_;
  int port_ = 0;
  std::unique_ptr<grpc::Server> server_;
};

}  // namespace gradsync::fault

#endif  // TESTS_FAULT_FAKE_COORDINATOR_H_
