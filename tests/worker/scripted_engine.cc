// An engine process without an engine. It says that it has connected, and does what SCRIPT says at
// the first exchange.

#include <fcntl.h>
#include <signal.h>
#include <sys/socket.h>
#include <unistd.h>

#include <cerrno>
#include <cstddef>
#include <cstdint>
#include <cstdlib>
#include <cstring>
#include <string>
#include <thread>
#include <utility>
#include <vector>

#include "daemon/worker/lane_socket.h"
#include "daemon/worker/message_socket.h"
#include "daemon/worker/worker.pb.h"
#include "daemon/worker/worker_process.h"

namespace gradsync::daemon {
namespace {

void Reply(const MessageSocket& socket, const worker::Reply& reply) {
  if (!socket.Send(reply, {}, MessageSocket::Wait::kYes).ok()) _exit(3);
}

// A request for the first chunk of the exchange, in order.
ChunkRequest Request(const worker::EngineExchange& exchange) {
  return {ChunkRequest::kGather, exchange.exchange(), 0, exchange.count(), 0};
}

void Act(const std::string& script, const worker::EngineExchange& exchange, const UniqueFd& fd,
         const LaneSocket& lane) {
  ChunkRequest request = Request(exchange);
  if (script == "dies") raise(SIGKILL);
  if (script == "stops") raise(SIGSTOP);
  if (script == "asks for an unknown exchange") request.exchange += 1;
  if (script == "asks for an unknown step") request.step = 3;
  if (script == "asks for nothing") request.count = 0;
  if (script == "asks beyond the bucket") request.count += 1;
  if (script == "asks far beyond the bucket") request.first = ~std::uint64_t{63};
  if (script == "asks for a part of a vector") request = {request.step, request.exchange, 1, 1, 0};
  if (script == "asks beyond the memory") request.offset = std::uint64_t{1} << 30;
  if (script == "asks at the memory's end") request.offset = ~std::uint64_t{63};
  if (script == "asks for another place") request.offset = 1;
  if (script == "asks twice") lane.Ask(request);
  if (script == "sends a short request") {
    send(fd.get(), "x", 1, MSG_NOSIGNAL);
    for (;;) pause();
  }
  // Refused, it gets no answer.
  lane.Ask(request);
}

// Whether the daemon's end of the socket lets a descriptor through.
bool CanPassDescriptor(int socket) {
  char byte = 'x';
  iovec part{&byte, 1};
  alignas(cmsghdr) char control[CMSG_SPACE(sizeof(int))] = {};
  msghdr message{};
  message.msg_iov = &part;
  message.msg_iovlen = 1;
  message.msg_control = control;
  message.msg_controllen = sizeof(control);
  cmsghdr* const rights = CMSG_FIRSTHDR(&message);
  rights->cmsg_level = SOL_SOCKET;
  rights->cmsg_type = SCM_RIGHTS;
  rights->cmsg_len = CMSG_LEN(sizeof(int));
  const int passed = STDERR_FILENO;
  std::memcpy(CMSG_DATA(rights), &passed, sizeof(passed));
  return sendmsg(socket, &message, MSG_NOSIGNAL) >= 0 || errno != EPERM;
}

// Stores a value and asks for it until the daemon has sent it as often as this.
void AskForOneValue(const MessageSocket& socket, int times) {
  worker::Reply reply;
  reply.mutable_engine_event()->mutable_set()->set_key("key");
  reply.mutable_engine_event()->mutable_set()->set_value("value");
  Reply(socket, reply);
  for (int i = 0; i < times; ++i) {
    reply.mutable_engine_event()->set_get("key");
    Reply(socket, reply);
    const auto received = socket.Receive();
    worker::Call call;
    if (!received.ok() || !call.ParseFromString(received->bytes) || !call.has_engine_value()) {
      _exit(8);
    }
  }
}

// Whether the first of these files can never be executed.
bool NeverExecuted(const std::vector<UniqueFd>& files, std::size_t first) {
  constexpr int kSealExec = 0x20;  // F_SEAL_EXEC: Debian 12's headers lack it
  for (std::size_t i = 0; i < first; ++i) {
    const int seals = fcntl(files.at(i).get(), F_GET_SEALS);
    if (seals < 0 || (seals & kSealExec) == 0) return false;
  }
  return true;
}

int Run(const std::string& script) {
  const MessageSocket socket{UniqueFd(kWorkerSocket)};
  std::vector<UniqueFd> descriptors;
  for (;;) {
    auto received = socket.Receive();
    if (!received.ok() || received->end) return 4;
    worker::Call call;
    if (!call.ParseFromString(received->bytes)) return 5;
    worker::Reply reply;
    if (call.has_engine_start()) {
      descriptors = std::move(received->descriptors);
      if (script == "dies while nodes connect") return 6;
      if (script == "checks its memory and keys" && !NeverExecuted(descriptors, 2)) return 7;
      if (script == "has another thread") std::thread([] { pause(); }).detach();
      if (script == "asks for one value") AskForOneValue(socket, 1);
      if (script == "asks for one value twice") AskForOneValue(socket, 2);
      if (script == "asks for too many values") {
        for (int i = 0; i < 5000; ++i) {
          reply.mutable_engine_event()->set_get("key" + std::to_string(i));
          Reply(socket, reply);
        }
        reply.Clear();
      }
    }
    if (call.has_engine_exchange() && script == "has another thread") continue;
    if (call.has_engine_exchange() && script == "passes descriptors") {
      return CanPassDescriptor(kWorkerSocket) || CanPassDescriptor(descriptors.at(1).get()) ? 8 : 9;
    }
    if (call.has_engine_exchange() && script != "finishes early") {
      const UniqueFd fd(dup(descriptors.at(1).get()));
      Act(script, call.engine_exchange(), fd, LaneSocket(UniqueFd(dup(fd.get()))));
    }
    reply.set_call(call.id());
    Reply(socket, reply);
    if (call.has_stop()) return 0;
  }
}

}  // namespace
}  // namespace gradsync::daemon

int main() {
  const char* const script = std::getenv("SCRIPT");
  return gradsync::daemon::Run(script != nullptr ? script : "");
}
