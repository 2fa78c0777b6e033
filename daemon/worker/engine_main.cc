#include "daemon/worker/engine_main.h"

#include <signal.h>
#include <sys/prctl.h>
#include <unistd.h>

#include <memory>
#include <utility>

#include "daemon/worker/engine_server.h"
#include "daemon/worker/message_socket.h"
#include "daemon/worker/worker.pb.h"
#include "daemon/worker/worker_process.h"

namespace gradsync::daemon {

int RunEngine() {
  prctl(PR_SET_NAME, "gradsync-engine");
  signal(SIGPIPE, SIG_IGN);
  const MessageSocket socket{UniqueFd(kWorkerSocket)};
  auto server = std::make_unique<EngineServer>(&socket);
  for (;;) {
    auto received = socket.Receive();
    worker::Call call;
    // _exit: other threads may wait for the daemon, which has ended.
    if (!received.ok() || received->end || !call.ParseFromString(received->bytes)) _exit(1);
    if (call.has_stop()) {
      if (server->connecting()) _exit(1);
      server.reset();
      worker::Reply reply;
      reply.set_call(call.id());
      socket.Send(reply, {}, MessageSocket::Wait::kYes).IgnoreError();
      _exit(0);
    }
    if (!server->Take(call, std::move(received->descriptors))) _exit(1);
  }
}

}  // namespace gradsync::daemon
