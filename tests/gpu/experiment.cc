#include "tests/gpu/experiment.h"

#include <sched.h>
#include <signal.h>
#include <sys/prctl.h>
#include <sys/socket.h>
#include <time.h>
#include <unistd.h>

#include <cstdio>
#include <cstdlib>
#include <cstring>
#include <iostream>
#include <utility>

namespace gradsync::gpu {
namespace {

constexpr char kRoleFlag[] = "--role=";
constexpr int kRoleSocket = 3;
constexpr std::size_t kMaxText = 1024;

nlohmann::json& Facts() {
  static auto* const facts = new nlohmann::json(nlohmann::json::object());
  return *facts;
}

std::string ThisProgram() {
  char path[4096];
  const ssize_t length = readlink("/proc/self/exe", path, sizeof(path));
  return length > 0 ? std::string(path, static_cast<std::size_t>(length)) : "";
}

int Print(const Answer& answer) {
  constexpr const char* kNames[] = {"holds", "does not hold", "not available"};
  constexpr int kStatuses[] = {0, 1, 77};
  const auto kind = static_cast<std::size_t>(answer.kind);
  const nlohmann::json line = {{"answer", kNames[kind]}, {"why", answer.why}, {"facts", Facts()}};
  std::cout << line.dump() << std::endl;
  return kStatuses[kind];
}

}  // namespace

void Line::Send(const std::string& text, int descriptor) const {
  iovec part{const_cast<char*>(text.data()), text.size()};
  msghdr message{};
  message.msg_iov = &part;
  message.msg_iovlen = 1;
  alignas(cmsghdr) char control[CMSG_SPACE(sizeof(int))] = {};
  if (descriptor >= 0) {
    message.msg_control = control;
    message.msg_controllen = sizeof(control);
    cmsghdr* const header = CMSG_FIRSTHDR(&message);
    header->cmsg_level = SOL_SOCKET;
    header->cmsg_type = SCM_RIGHTS;
    header->cmsg_len = CMSG_LEN(sizeof(int));
    std::memcpy(CMSG_DATA(header), &descriptor, sizeof(int));
  }
  if (sendmsg(socket_.get(), &message, MSG_NOSIGNAL) < 0) std::perror("sendmsg");
}

std::optional<Message> Line::Receive(int patience_ms) const {
  if (!AwaitReadable(socket_.get(), patience_ms)) return std::nullopt;
  char text[kMaxText];
  iovec part{text, sizeof(text)};
  msghdr message{};
  message.msg_iov = &part;
  message.msg_iovlen = 1;
  alignas(cmsghdr) char control[CMSG_SPACE(sizeof(int))] = {};
  message.msg_control = control;
  message.msg_controllen = sizeof(control);
  const ssize_t bytes = recvmsg(socket_.get(), &message, MSG_CMSG_CLOEXEC);
  if (bytes <= 0) return std::nullopt;
  Message received{std::string(text, static_cast<std::size_t>(bytes)), Descriptor()};
  if (const cmsghdr* const header = CMSG_FIRSTHDR(&message)) {
    int descriptor = -1;
    std::memcpy(&descriptor, CMSG_DATA(header), sizeof(int));
    received.descriptor = Descriptor(descriptor);
  }
  return received;
}

Message Line::Expect(const std::string& text) const {
  std::optional<Message> message = Receive();
  if (message.has_value() && message->text == text) return *std::move(message);
  std::fprintf(stderr, "expected \"%s\", got %s\n", text.c_str(),
               message.has_value() ? message->text.c_str() : "nothing");
  std::exit(2);
}

OtherProcess::OtherProcess(const std::string& role) {
  int ends[2];
  if (socketpair(AF_UNIX, SOCK_SEQPACKET | SOCK_CLOEXEC, 0, ends) != 0) {
    std::perror("socketpair");
    std::exit(2);
  }
  line_.emplace(Descriptor(ends[0]));
  const Descriptor theirs(ends[1]);
  ChildOptions options;
  options.arguments = {ThisProgram(), kRoleFlag + role};
  options.passed = {theirs.get()};
  process_.emplace(options);
}

void Fact(const std::string& name, const nlohmann::json& value) {
  std::cout << name << ": " << value.dump() << std::endl;
  Facts()[name] = value;
}

int RunExperiment(int argc, char** argv, const std::map<std::string, Role>& roles,
                  Answer (*ask)()) {
  constexpr std::size_t kFlagLength = sizeof(kRoleFlag) - 1;
  if (argc > 1 && std::strncmp(argv[1], kRoleFlag, kFlagLength) == 0) {
    prctl(PR_SET_PDEATHSIG, SIGKILL);
    const auto role = roles.find(argv[1] + kFlagLength);
    if (role == roles.end()) return 127;
    role->second(Line(Descriptor(kRoleSocket)));
    return 0;
  }
  return Print(ask());
}

double NowMs() {
  timespec now{};
  clock_gettime(CLOCK_MONOTONIC, &now);
  return static_cast<double>(now.tv_sec) * 1e3 + static_cast<double>(now.tv_nsec) / 1e6;
}

bool Await(const std::function<bool()>& condition, int patience_ms) {
  for (const double end = NowMs() + patience_ms; !condition(); sched_yield()) {
    if (NowMs() > end) return false;
  }
  return true;
}

}  // namespace gradsync::gpu
