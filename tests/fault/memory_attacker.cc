// A user who wants the daemon's memory, until standard input ends. Becomes user 12345.
//
//   memory_attacker SOCKET messages N BYTES   N connections, each with a first message of BYTES: a
//                                             layout of as many parameters as possible
//   memory_attacker SOCKET streams N          streams that never open a session
//   memory_attacker SOCKET layouts N M P      N sessions, each with a job of its own and M layouts
//                                             of P parameters with the longest names
//   memory_attacker SOCKET buckets N M B W [COORDINATOR]
//                                             N sessions, each the only rank of a job of W ranks,
//                                             with M layouts of B buckets
//   memory_attacker SOCKET unread N           N sessions that run steps and read nothing
//   memory_attacker SOCKET jobs N M           N jobs, one after the other, of one rank with M
//                                             layouts of 4096 buckets
//   memory_attacker SOCKET collectives N      N sessions, each of a job of two ranks, that begin as
//                                             many collectives as the daemon keeps
//   memory_attacker SOCKET reflection N       N streams of reflection that ask and read nothing
//
// Prints READY when the attack is at its full strength. Each attack consists of rounds. After the
// first round it prints a line: how many calls or sessions ended, or were refused something, then
// the last status. Then round follows round. A refusal by the daemon is no failure: the exit status
// is 0.

#include <grpcpp/generic/generic_stub.h>
#include <grpcpp/grpcpp.h>
#include <unistd.h>

#include <atomic>
#include <cstdint>
#include <cstdlib>
#include <functional>
#include <iostream>
#include <memory>
#include <mutex>
#include <optional>
#include <string>
#include <thread>
#include <vector>

#include "daemon/job/collective_order.h"
#include "gradsync/v1/gradsync.pb.h"
#include "grpc/reflection/v1alpha/reflection.pb.h"
#include "proto/gradsync/limits.h"
#include "tests/fault/raw_session.h"
#include "tests/kit/become_user.h"

namespace gradsync::fault {
namespace {

constexpr unsigned kUser = 12345;
constexpr char kSession[] = "/gradsync.v1.GradientSync/Session";
constexpr char kReflection[] = "/grpc.reflection.v1alpha.ServerReflection/ServerReflectionInfo";

// Says that the attack is at its full strength, once.
void Ready() {
  static std::once_flag said;
  std::call_once(said, [] { std::cout << "READY" << std::endl; });
}

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
  explicit RawCall(const std::string& socket, const std::string& method = kSession) {
    grpc::ChannelArguments arguments;
    arguments.SetInt(GRPC_ARG_USE_LOCAL_SUBCHANNEL_POOL, 1);
    arguments.SetMaxSendMessageSize(-1);
    stub_ = std::make_unique<grpc::GenericStub>(
        grpc::CreateCustomChannel("unix:" + socket, grpc::InsecureChannelCredentials(), arguments));
    context_.set_wait_for_ready(true);
    call_ = stub_->PrepareCall(&context_, method, &queue_);
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

void Report(std::size_t ended, const RawStatus& status) {
  std::cout << ended << " " << status.code << " " << status.message << std::endl;
}

// ---- The attacks. None returns: the main thread ends the process.

[[noreturn]] void SendMessages(const std::string& socket, std::size_t calls, std::size_t bytes) {
  const std::string message = LayoutOfNothing(bytes);
  std::atomic<std::size_t> begun{0};
  for (bool first = true;; first = false) {
    std::vector<grpc::Status> ends(calls);
    std::vector<std::thread> threads;
    for (grpc::Status& end : ends) {
      threads.emplace_back([&] {
        RawCall call(socket);
        if (++begun == calls) Ready();
        call.Write(message);
        end = call.End();
      });
    }
    for (std::thread& thread : threads) thread.join();
    if (first) Report(calls, ends.back());
  }
}

[[noreturn]] void OpenStreams(const std::string& socket, std::size_t count) {
  std::vector<std::unique_ptr<RawCall>> calls;
  for (std::size_t i = 0; i < count; ++i) calls.push_back(std::make_unique<RawCall>(socket));
  Ready();
  const grpc::Status last = calls.back()->End();
  Report(1, last);
  for (std::size_t i = 0;; i = (i + 1) % count) calls[i] = std::make_unique<RawCall>(socket);
}

[[noreturn]] void AskForReflection(const std::string& socket, std::size_t count) {
  // The answer repeats it.
  grpc::reflection::v1alpha::ServerReflectionRequest question;
  question.set_file_containing_symbol(std::string(60'000, 'x'));
  const std::string message = question.SerializeAsString();
  std::vector<std::unique_ptr<RawCall>> calls(count);
  for (bool first = true;; first = false) {
    for (auto& call : calls) {
      call = std::make_unique<RawCall>(socket, kReflection);
      call->Write(message);
    }
    Ready();
    if (first) Report(count, grpc::Status());
  }
}

// A session of a job of its own, as its rank 0. Null: refused; then *why says why.
std::unique_ptr<RawSession> OpenJob(const std::string& socket, std::size_t number,
                                    std::uint32_t world_size, const std::string& coordinator,
                                    RawStatus* why) {
  auto session = std::make_unique<RawSession>(socket);
  v1::SessionRequest request =
      RawSession::OpenRequest(0, world_size, "job" + std::to_string(number));
  request.mutable_open_session()->set_coordinator(coordinator);
  session->Send(request);
  if (session->Await(v1::SessionResponse::kSessionOpened).has_value()) return session;
  *why = session->End();
  return nullptr;
}

// Reads until the layout is agreed on or refused; in that case returns the reason. If the session
// has ended, *session becomes null.
std::optional<RawStatus> Answer(std::unique_ptr<RawSession>* session) {
  for (;;) {
    const auto response = (*session)->Receive();
    if (!response.has_value()) {
      const RawStatus why = (*session)->End();
      session->reset();
      return why;
    }
    if (response->has_layout_assigned()) return std::nullopt;
    if (response->has_operation_failed()) return RawStatusOf(response->operation_failed().status());
  }
}

// Sessions that each register one layout after the other.
struct Registering {
  std::size_t sessions = 0;
  std::size_t layouts = 0;  // of each session in a round
  std::uint32_t world_size = 1;
  std::string coordinator;
  // Asks for a layout of that name.
  std::function<void(RawSession* session, const std::string& name)> ask;
};

// It is at its full strength when the daemon refuses the first layout. The sessions stay.
[[noreturn]] void RegisterLayouts(const std::string& socket, const Registering& what) {
  std::vector<std::unique_ptr<RawSession>> open(what.sessions);
  std::size_t names = 0;
  for (bool first = true;; first = false) {
    std::size_t refused = 0;
    RawStatus last;
    for (std::size_t i = 0; i < what.sessions; ++i) {
      for (std::size_t layout = 0; layout < what.layouts; ++layout) {
        if (open[i] == nullptr) {
          open[i] = OpenJob(socket, i, what.world_size, what.coordinator, &last);
          if (open[i] == nullptr) {
            ++refused;
            break;
          }
        }
        what.ask(open[i].get(), "layout" + std::to_string(names++));
        if (const auto why = Answer(&open[i])) {
          ++refused;
          last = *why;
          Ready();
        }
      }
    }
    Ready();
    if (first) Report(refused, last);
  }
}

[[noreturn]] void RegisterLongNames(const std::string& socket, std::size_t sessions,
                                    std::size_t layouts, std::size_t parameters) {
  constexpr std::size_t kPerPart = 100;
  Registering what;
  what.sessions = sessions;
  what.layouts = layouts;
  what.ask = [parameters](RawSession* session, const std::string& name) {
    for (std::size_t first = 0; first < parameters; first += kPerPart) {
      v1::SessionRequest part;
      for (std::size_t p = first; p < first + kPerPart; ++p) {
        v1::Parameter& parameter = *part.mutable_layout_part()->add_parameters();
        parameter.set_name(std::to_string(p) + std::string(504, 'n'));
        parameter.set_dtype(v1::DATA_TYPE_FLOAT32);
      }
      if (!session->Send(part)) return;
    }
    v1::SessionRequest request;
    request.mutable_register_layout()->set_request_id(1);
    request.mutable_register_layout()->set_name(name);
    session->Send(request);
  };
  RegisterLayouts(socket, what);
}

[[noreturn]] void RegisterBuckets(const std::string& socket, std::size_t sessions,
                                  std::size_t layouts, std::size_t buckets,
                                  std::uint32_t world_size, const std::string& coordinator) {
  Registering what;
  what.sessions = sessions;
  what.layouts = layouts;
  what.world_size = world_size;
  what.coordinator = coordinator;
  what.ask = [buckets](RawSession* session, const std::string& name) {
    session->Send(RawSession::LayoutRequest(buckets, 1, name));
  };
  RegisterLayouts(socket, what);
}

// Each session runs steps until the daemon ends it. A round: 400 steps, or less if it ends.
[[noreturn]] void RunUnreadSteps(const std::string& socket, const std::string& side_socket,
                                 std::size_t sessions) {
  constexpr std::size_t kBuckets = 4096;
  constexpr std::uint64_t kSteps = 400;
  std::atomic<std::size_t> begun{0}, through{0};
  const auto attack = [&](std::size_t number) {
    const auto end_round = [&] {
      if (++through == sessions) Report(sessions, RawStatus());
    };
    for (bool first = true;; first = false) {
      RawStatus ignored;
      const auto session = OpenJob(socket, number, /*world_size=*/1, /*coordinator=*/"", &ignored);
      std::optional<RawLayout> layout;
      if (session != nullptr) {
        layout = session->JoinLayout(RawSession::LayoutRequest(kBuckets, 1), side_socket);
      }
      if (first && ++begun == sessions) Ready();
      std::uint64_t steps = 0;
      while (layout.has_value() &&
             session->EndStep(layout->channel, steps + 1, /*ready_rest=*/true)) {
        if (++steps == kSteps && first) end_round();
      }
      if (steps < kSteps && first) end_round();
    }
  };
  std::vector<std::thread> threads;
  for (std::size_t i = 0; i < sessions; ++i) threads.emplace_back(attack, i);
  for (;;) pause();
}

[[noreturn]] void RunJobs(const std::string& socket, std::size_t jobs, std::size_t layouts) {
  std::size_t refused = 0;
  RawStatus last;
  for (std::size_t i = 0;; ++i) {
    if (i == jobs) Report(refused, last);
    auto session = OpenJob(socket, i, /*world_size=*/1, /*coordinator=*/"", &last);
    if (session == nullptr) ++refused;
    for (std::size_t layout = 0; layout < layouts && session != nullptr; ++layout) {
      session->Send(RawSession::LayoutRequest(4096, 1, "layout" + std::to_string(layout)));
      if (const auto why = Answer(&session)) {
        ++refused;
        last = *why;
      }
    }
    Ready();
    if (session == nullptr) continue;
    session->Cancel();
    session->End();
  }
}

[[noreturn]] void BeginCollectives(const std::string& socket, std::size_t count) {
  std::vector<std::unique_ptr<RawSession>> sessions(count);
  v1::SessionRequest collective;
  collective.mutable_begin_collective()->set_description(std::string(kMaxCollectiveBytes, 'x'));
  for (bool first = true;; first = false) {
    std::size_t refused = 0;
    RawStatus last;
    for (std::size_t i = 0; i < count; ++i) {
      auto& session = sessions[i];
      if (session == nullptr) {
        session = OpenJob(socket, i, /*world_size=*/2, /*coordinator=*/"", &last);
      }
      for (std::size_t n = 0; session != nullptr && n < daemon::CollectiveOrder::kKept; ++n) {
        session->Send(collective);
      }
      if (first && session != nullptr) {
        // When this is answered, the collectives have been handled.
        session->Send(RawSession::LayoutRequest(1, 1, "layout"));
        if (const auto why = Answer(&session)) last = *why;
      }
      if (session == nullptr) ++refused;
    }
    Ready();
    if (first) Report(refused, last);
  }
}

// Null: there is no such attack.
std::function<void()> AttackOf(const std::vector<std::string>& arguments) {
  const std::string& socket = arguments.at(1);
  const std::string& attack = arguments.at(2);
  std::vector<std::size_t> numbers;
  for (std::size_t i = 3; i < arguments.size(); ++i)
    numbers.push_back(Number(arguments[i].c_str()));
  const auto number = [&](std::size_t i) { return numbers.at(i); };
  if (attack == "messages") {
    return [=, calls = number(0), bytes = number(1)] { SendMessages(socket, calls, bytes); };
  }
  if (attack == "streams") return [=, count = number(0)] { OpenStreams(socket, count); };
  if (attack == "reflection") return [=, count = number(0)] { AskForReflection(socket, count); };
  if (attack == "layouts") {
    return [=, sessions = number(0), layouts = number(1), parameters = number(2)] {
      RegisterLongNames(socket, sessions, layouts, parameters);
    };
  }
  if (attack == "buckets") {
    const std::string coordinator = arguments.size() > 7 ? arguments[7] : "";
    return [=, sessions = number(0), layouts = number(1), buckets = number(2), ranks = number(3)] {
      RegisterBuckets(socket, sessions, layouts, buckets, static_cast<std::uint32_t>(ranks),
                      coordinator);
    };
  }
  if (attack == "unread") {
    return [=, sessions = number(0)] { RunUnreadSteps(socket, SideSocketOf(socket), sessions); };
  }
  if (attack == "collectives") return [=, count = number(0)] { BeginCollectives(socket, count); };
  if (attack == "jobs") {
    return [=, jobs = number(0), layouts = number(1)] { RunJobs(socket, jobs, layouts); };
  }
  return nullptr;
}

int Run(const std::vector<std::string>& arguments) {
  const std::function<void()> attack = AttackOf(arguments);
  if (attack == nullptr) return 2;
  if (!BecomeUser(kUser)) return 1;
  std::thread(attack).detach();
  char byte = 0;
  while (read(STDIN_FILENO, &byte, 1) > 0) {
  }
  _exit(0);  // the attack may wait for the daemon
}

}  // namespace
}  // namespace gradsync::fault

int main(int argc, char** argv) {
  return gradsync::fault::Run(std::vector<std::string>(argv, argv + argc));
}
