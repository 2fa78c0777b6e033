// A user who wants the daemon's memory. Becomes user 12345, does what its arguments say, prints a
// line, and keeps its connections open until standard input ends.
//
//   memory_attacker SOCKET messages N BYTES   N connections, each with a first message of BYTES: a
//                                             layout of as many parameters as possible
//   memory_attacker SOCKET streams N          streams that never open a session
//
// The line: how many calls ended, then the last status of them.

#include <grp.h>
#include <grpcpp/generic/generic_stub.h>
#include <grpcpp/grpcpp.h>
#include <unistd.h>

#include <cstdint>
#include <cstdlib>
#include <iostream>
#include <memory>
#include <string>
#include <thread>
#include <vector>

#include "gradsync/v1/gradsync.pb.h"

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

int Run(const std::vector<std::string>& arguments) {
  const gid_t group = kUser;
  if (setgroups(1, &group) != 0 || setgid(kUser) != 0 || setuid(kUser) != 0) return 1;
  const std::string& socket = arguments.at(1);
  const std::string& attack = arguments.at(2);
  const auto number = [&](std::size_t i) { return Number(arguments.at(i).c_str()); };
  if (attack == "messages") {
    SendMessages(socket, number(3), number(4));
  } else if (attack == "streams") {
    OpenStreams(socket, number(3));
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
