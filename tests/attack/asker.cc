// A user who asks a daemon, as a container's probe does.
//
//   asker --socket=PATH --patience_ms=N [--uid=N]
//
// Asks for health, status and stats, ten times, each time on a new connection. Prints
// "error=QUESTION: TEXT" for the first question that fails or has no answer after N milliseconds,
// or "ANSWERED", and ends.

#include <grpcpp/grpcpp.h>
#include <unistd.h>

#include <chrono>
#include <csignal>
#include <iostream>
#include <map>
#include <memory>
#include <string>
#include <utility>
#include <vector>

#include "gradsync/v1/introspection.grpc.pb.h"
#include "grpc/health/v1/health.grpc.pb.h"
#include "tests/kit/become_user.h"

namespace gradsync::attack {
namespace {

using grpc::health::v1::Health;
using grpc::health::v1::HealthCheckRequest;
using grpc::health::v1::HealthCheckResponse;

// Asks on a connection of its own.
class Asker {
 public:
  Asker(const std::string& socket, std::chrono::milliseconds patience) : patience_(patience) {
    grpc::ChannelArguments arguments;
    arguments.SetInt(GRPC_ARG_USE_LOCAL_SUBCHANNEL_POOL, 1);
    channel_ =
        grpc::CreateCustomChannel("unix:" + socket, grpc::InsecureChannelCredentials(), arguments);
  }

  grpc::Status Check() {
    HealthCheckResponse response;
    const grpc::Status status =
        Call(Health::NewStub(channel_), &Health::Stub::Check, HealthCheckRequest(), &response);
    if (!status.ok() || response.status() == HealthCheckResponse::SERVING) return status;
    return {grpc::StatusCode::UNAVAILABLE, "the daemon does not serve"};
  }
  grpc::Status Status() {
    v1::GetStatusResponse response;
    return Call(v1::Introspection::NewStub(channel_), &v1::Introspection::Stub::GetStatus,
                v1::GetStatusRequest(), &response);
  }
  grpc::Status Stats() {
    v1::GetStatsResponse response;
    return Call(v1::Introspection::NewStub(channel_), &v1::Introspection::Stub::GetStats,
                v1::GetStatsRequest(), &response);
  }

 private:
  template <class Stub, class Method, class Request, class Response>
  grpc::Status Call(const Stub& stub, Method method, const Request& request, Response* response) {
    grpc::ClientContext context;
    context.set_deadline(std::chrono::system_clock::now() + patience_);
    context.set_wait_for_ready(true);
    return (stub.get()->*method)(&context, request, response);
  }

  const std::chrono::milliseconds patience_;
  std::shared_ptr<grpc::Channel> channel_;
};

int Main(int argc, char** argv) {
  signal(SIGPIPE, SIG_IGN);
  std::map<std::string, std::string> flags;
  for (int i = 1; i < argc; ++i) {
    const std::string flag = argv[i];
    const std::size_t equals = flag.find('=');
    flags[flag.substr(0, equals)] = equals == std::string::npos ? "" : flag.substr(equals + 1);
  }
  const std::string& uid = flags["--uid"];
  if (!uid.empty() && !BecomeUser(static_cast<uid_t>(std::stoul(uid)))) return 1;
  const std::chrono::milliseconds patience(std::stoul(flags["--patience_ms"]));
  for (int i = 0; i < 10; ++i) {
    Asker asker(flags["--socket"], patience);
    for (const auto& [question, status] : std::vector<std::pair<const char*, grpc::Status>>{
             {"health", asker.Check()}, {"status", asker.Status()}, {"stats", asker.Stats()}}) {
      if (status.ok()) continue;
      std::cout << "error=" << question << ": " << status.error_message() << std::endl;
      return 1;
    }
  }
  std::cout << "ANSWERED" << std::endl;
  return 0;
}

}  // namespace
}  // namespace gradsync::attack

int main(int argc, char** argv) { return gradsync::attack::Main(argc, argv); }
