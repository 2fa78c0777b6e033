// A worker without a GPU. It replies to every call, and does what SCRIPT says at the first Launch
// or Ping. The number of free bytes that it reports is the number of pings that did not ask for
// memory.

#include <fcntl.h>
#include <signal.h>
#include <unistd.h>

#include <cstdint>
#include <cstdlib>
#include <string>

#include "daemon/base/error.h"
#include "daemon/worker/message_socket.h"
#include "daemon/worker/worker.pb.h"
#include "daemon/worker/worker_error.h"
#include "daemon/worker/worker_process.h"

namespace gradsync::daemon {
namespace {

void Reply(const MessageSocket& socket, const worker::Reply& reply) {
  if (!socket.Send(reply, {}, MessageSocket::Wait::kYes).ok()) _exit(3);
}

// Sends events until it cannot, in a process that may outlive the worker. Writes a byte to the FIFO
// for each of them, so that the test knows how many it has sent.
void SendWithoutEnd(const MessageSocket& socket) {
  constexpr unsigned int kAtMostSeconds = 90;  // the end if the daemon reads for ever
  alarm(kAtMostSeconds);
  const int sent = open(std::getenv("FIFO"), O_WRONLY | O_CLOEXEC);
  worker::Reply event;
  event.mutable_engine_event();
  while (socket.Send(event, {}, MessageSocket::Wait::kYes).ok() && write(sent, "", 1) == 1) {
  }
  _exit(0);
}

int Run(const std::string& script) {
  const MessageSocket socket{UniqueFd(kWorkerSocket)};
  bool silent = script == "never starts";
  std::uint64_t pings = 0;
  for (;;) {
    const auto received = socket.Receive();
    if (!received.ok() || received->end) return 4;
    worker::Call call;
    if (!call.ParseFromString(received->bytes)) return 5;
    worker::Reply reply;
    reply.set_call(call.id());
    if (call.has_start()) {
      if (script == "dies at start") return 6;
      worker::Device* const device = reply.mutable_started()->add_devices();
      device->set_uuid(call.start().device());
      const char* const visible = std::getenv("CUDA_VISIBLE_DEVICES");
      device->set_name(visible != nullptr ? visible : "");
      if (script == "starts GPU-1 alone" && call.start().device() != "GPU-1") silent = true;
      if (script == "has no GPU") {
        *reply.mutable_error() = EncodeError(
            MakeError(absl::StatusCode::kFailedPrecondition, reason::kGpuNotVisible, "not there"));
      }
    }
    if (call.has_launch()) {
      if (script == "crashes") raise(SIGKILL);
      if (script == "exits") return 7;
      if (script == "leaves a child that sends") {
        if (fork() == 0) SendWithoutEnd(socket);
        return 7;
      }
      if (script == "hangs") silent = true;
      if (script == "closes its socket") {
        close(kWorkerSocket);
        for (;;) pause();
      }
      if (script == "refuses") {
        *reply.mutable_error() =
            EncodeError(MakeError(absl::StatusCode::kResourceExhausted, reason::kGpuOutOfMemory,
                                  "full", {{FieldName("k"), "v"}}));
      }
      if (script == "takes its time" || script == "starts GPU-1 alone") continue;
      if (script == "passes a descriptor") {
        const int passed = STDERR_FILENO;
        if (!socket.Send(reply, {passed}, MessageSocket::Wait::kYes).ok()) return 8;
        for (;;) pause();
      }
    }
    if ((call.has_launch() && (script == "fails" || script == "fails and stays")) ||
        (call.has_ping() && script == "has failed")) {
      reply.set_call(0);
      *reply.mutable_error() =
          EncodeError(MakeError(absl::StatusCode::kUnavailable, reason::kGpuFault, "cuCall: ECC"));
      Reply(socket, reply);
      while (script == "fails and stays") pause();
      return 1;
    }
    if (call.has_ping() && script == "answers no ping") continue;
    if (call.ping().memory()) {
      reply.mutable_pong()->set_arena_bytes(4096);
      reply.mutable_pong()->set_free_bytes(pings);
    } else if (call.has_ping()) {
      ++pings;
    }
    if (call.has_stop() && script == "does not stop") silent = true;
    if (!silent) Reply(socket, reply);
    if (call.has_stop() && !silent) return 0;
  }
}

}  // namespace
}  // namespace gradsync::daemon

int main() {
  const char* const script = std::getenv("SCRIPT");
  return gradsync::daemon::Run(script != nullptr ? script : "");
}
