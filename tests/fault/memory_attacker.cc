// A user who wants the daemon's memory. Becomes user 12345, does what its arguments say, prints a
// line, and keeps its connections open until standard input ends.
//
//   memory_attacker SOCKET messages N BYTES   N connections, each with a first message of BYTES: a
//                                             layout of as many parameters as possible
//   memory_attacker SOCKET streams N          streams that never open a session
//   memory_attacker SOCKET layouts N M P      N sessions, each with a job of its own and M layouts
//                                             of P parameters with the longest names
//   memory_attacker SOCKET unread N           N sessions that run steps and read nothing
//   memory_attacker SOCKET jobs N M           N jobs, one after the other, of one rank with M
//                                             layouts of 4096 buckets
//
// The line: how many calls or sessions ended, or were refused something, then the last status.

#include <grpcpp/generic/generic_stub.h>
#include <grpcpp/grpcpp.h>

#include <cstdint>
#include <cstdlib>
#include <iostream>
#include <memory>
#include <optional>
#include <string>
#include <thread>
#include <vector>

#include "gradsync/v1/gradsync.pb.h"
#include "tests/fault/raw_session.h"
#include "tests/kit/become_user.h"

namespace gradsync::fault {
namespace {

constexpr unsigned kUser = 12345;
constexpr char kSession[] = "/gradsync.v1.GradientSync/Session";

// A SessionRequest of about `bytes` bytes with a RegisterLayout of empty parameters: each takes two
// bytes here and dozens in the daemon.
std::string LayoutOfNothing(std::size_t bytes) {
  v1::RegisterLayout one;
  one.add_parameters();
  const std::string parameter = one.SerializeAsString();
  std::string layout;
  layout.reserve(bytes + parameter.size());
  while (layout.size() < bytes) layout += parameter;
  v1::SessionRequest request;
  request.mutable_register_layout();
  std::string wire = request.SerializeAsString();  // its field, and the length 0
  wire.pop_back();
  for (std::size_t left = layout.size(); left > 0; left >>= 7) {
    wire += static_cast<char>((left & 0x7f) | (left > 0x7f ? 0x80 : 0));
  }
  return wire + layout;
}

// One stream on a connection of its own.
class RawCall {
 public:
  explicit RawCall(const std::string& socket) {
    grpc::ChannelArguments arguments;
    arguments.SetInt(GRPC_ARG_USE_LOCAL_SUBCHANNEL_POOL, 1);
    arguments.SetMaxSendMessageSize(-1);
    stub_ = std::make_unique<grpc::GenericStub>(
        grpc::CreateCustomChannel("unix:" + socket, grpc::InsecureChannelCredentials(), arguments));
    context_.set_wait_for_ready(true);
    call_ = stub_->PrepareCall(&context_, kSession, &queue_);
    call_->StartCall(nullptr);
    Next();
  }
  ~RawCall() {
    if (!ended_) {
      context_.TryCancel();
      End();
    }
    queue_.Shutdown();
    while (Next()) {
    }
  }

  // `bytes` outlives the call.
  void Write(const std::string& bytes) {
    const grpc::Slice slice(bytes.data(), bytes.size(), grpc::Slice::STATIC_SLICE);
    call_->Write(grpc::ByteBuffer(&slice, 1), nullptr);
    Next();
  }
  // Reads to the end: the status comes after the messages.
  grpc::Status End() {
    grpc::ByteBuffer message;
    do call_->Read(&message, nullptr);
    while (Next());
    grpc::Status status;
    ended_ = true;
    call_->Finish(&status, nullptr);
    Next();
    return status;
  }

 private:
  // Waits for the operation under way. False if it failed, or if there is none any more.
  bool Next() {
    void* tag = nullptr;
    bool ok = false;
    return queue_.Next(&tag, &ok) && ok;
  }

  grpc::CompletionQueue queue_;
  std::unique_ptr<grpc::GenericStub> stub_;
  grpc::ClientContext context_;
  std::unique_ptr<grpc::GenericClientAsyncReaderWriter> call_;
  bool ended_ = false;
};

// "X-fd.sock" of "X.sock".
std::string SideSocketOf(const std::string& socket) {
  return socket.substr(0, socket.size() - std::string(".sock").size()) + "-fd.sock";
}

std::size_t Number(const char* text) { return std::strtoull(text, nullptr, 10); }

void Report(std::size_t ended, const grpc::Status& status) {
  std::cout << ended << " " << status.error_code() << " " << status.error_message() << std::endl;
}

void SendMessages(const std::string& socket, std::size_t calls, std::size_t bytes) {
  const std::string message = LayoutOfNothing(bytes);
  std::vector<grpc::Status> ends(calls);
  std::vector<std::thread> threads;
  for (grpc::Status& end : ends) {
    threads.emplace_back([&socket, &message, &end] {
      RawCall call(socket);
      call.Write(message);
      end = call.End();
    });
  }
  for (std::thread& thread : threads) thread.join();
  Report(calls, ends.back());
}

void OpenStreams(const std::string& socket, std::size_t count) {
  std::vector<std::unique_ptr<RawCall>> calls;
  for (std::size_t i = 0; i < count; ++i) calls.push_back(std::make_unique<RawCall>(socket));
  const grpc::Status last = calls.back()->End();
  Report(1, last);
  std::cin.get();
}

void Report(std::size_t ended, const RawStatus& status) {
  std::cout << ended << " " << status.code << " " << status.message << std::endl;
}

// A session of a job of its own.
std::unique_ptr<RawSession> OpenJob(const std::string& socket, std::size_t number) {
  auto session = std::make_unique<RawSession>(socket);
  if (!session->Open(0, 1, "job" + std::to_string(number)).has_value()) {
    Report(0, session->End());
    std::exit(3);
  }
  return session;
}

// Reads until the layout is agreed on or refused; in that case returns the reason.
std::optional<RawStatus> Answer(RawSession* session) {
  for (;;) {
    const auto response = session->Receive();
    if (!response.has_value()) return session->End();
    if (response->has_layout_assigned()) return std::nullopt;
    if (response->has_operation_failed()) return RawStatusOf(response->operation_failed().status());
  }
}

void RegisterLayouts(const std::string& socket, std::size_t sessions, std::size_t layouts,
                     std::size_t parameters) {
  constexpr std::size_t kPerPart = 100;
  std::vector<std::unique_ptr<RawSession>> open;
  std::size_t refused = 0;
  RawStatus last;
  for (std::size_t i = 0; i < sessions; ++i) {
    open.push_back(OpenJob(socket, i));
    for (std::size_t layout = 0; layout < layouts; ++layout) {
      for (std::size_t first = 0; first < parameters; first += kPerPart) {
        v1::SessionRequest part;
        for (std::size_t p = first; p < first + kPerPart; ++p) {
          v1::Parameter& parameter = *part.mutable_layout_part()->add_parameters();
          parameter.set_name(std::to_string(p) + std::string(504, 'n'));
          parameter.set_dtype(v1::DATA_TYPE_FLOAT32);
        }
        if (!open.back()->Send(part)) break;
      }
      v1::SessionRequest request;
      request.mutable_register_layout()->set_request_id(layout);
      request.mutable_register_layout()->set_name("layout" + std::to_string(layout));
      open.back()->Send(request);
      if (const auto why = Answer(open.back().get())) {
        ++refused;
        last = *why;
      }
    }
  }
  Report(refused, last);
  std::cin.get();
}

void RunUnreadSteps(const std::string& socket, const std::string& side_socket,
                    std::size_t sessions) {
  constexpr std::size_t kBuckets = 4096;
  constexpr std::uint64_t kSteps = 400;
  std::vector<std::unique_ptr<RawSession>> open;
  for (std::size_t i = 0; i < sessions; ++i) {
    RawSession& session = *open.emplace_back(OpenJob(socket, i));
    const auto assigned = session.Register(RawSession::LayoutRequest(kBuckets, 1));
    if (!assigned.has_value() || session.Map(*assigned, side_socket) == nullptr) std::exit(4);
    session.Mapped(assigned->channel());
    session.Await(v1::SessionResponse::kLayoutReady);
    for (std::uint64_t step = 1; step <= kSteps; ++step) {
      if (!session.EndStep(assigned->channel(), step, /*ready_rest=*/true)) break;
    }
  }
  Report(sessions, RawStatus());
  std::cin.get();
}

void RunJobs(const std::string& socket, std::size_t jobs, std::size_t layouts) {
  std::size_t refused = 0;
  RawStatus last;
  for (std::size_t i = 0; i < jobs; ++i) {
    const auto session = OpenJob(socket, i);
    for (std::size_t layout = 0; layout < layouts; ++layout) {
      session->Send(RawSession::LayoutRequest(4096, 1, "layout" + std::to_string(layout)));
      if (const auto why = Answer(session.get())) {
        ++refused;
        last = *why;
      }
    }
    session->Cancel();
    session->End();
  }
  Report(refused, last);
  std::cin.get();
}

int Run(const std::vector<std::string>& arguments) {
  if (!BecomeUser(kUser)) return 1;
  const std::string& socket = arguments.at(1);
  const std::string& attack = arguments.at(2);
  const auto number = [&](std::size_t i) { return Number(arguments.at(i).c_str()); };
  if (attack == "messages") {
    SendMessages(socket, number(3), number(4));
  } else if (attack == "streams") {
    OpenStreams(socket, number(3));
  } else if (attack == "layouts") {
    RegisterLayouts(socket, number(3), number(4), number(5));
  } else if (attack == "unread") {
    RunUnreadSteps(socket, SideSocketOf(socket), number(3));
  } else if (attack == "jobs") {
    RunJobs(socket, number(3), number(4));
  } else {
    return 2;
  }
  return 0;
}

}  // namespace
}  // namespace gradsync::fault

int main(int argc, char** argv) {
  return gradsync::fault::Run(std::vector<std::string>(argv, argv + argc));
}
