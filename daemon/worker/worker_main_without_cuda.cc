#include "daemon/base/error.h"
#include "daemon/worker/message_socket.h"
#include "daemon/worker/worker.pb.h"
#include "daemon/worker/worker_error.h"
#include "daemon/worker/worker_main.h"
#include "daemon/worker/worker_process.h"

namespace gradsync::daemon {

int RunWorker() {
  const MessageSocket socket{UniqueFd(kWorkerSocket)};
  for (;;) {
    const auto received = socket.Receive();
    worker::Call call;
    if (!received.ok() || received->end || !call.ParseFromString(received->bytes)) return 1;
    worker::Reply reply;
    reply.set_call(call.id());
    if (!call.has_stop()) {
      *reply.mutable_error() = EncodeError(
          MakeError(absl::StatusCode::kFailedPrecondition, reason::kCudaNotBuilt,
                    "this gradsyncd was built without CUDA: tools/find_cuda found no compiler"));
    }
    if (!socket.Send(reply, {}, MessageSocket::Wait::kYes).ok()) return 1;
    if (call.has_stop()) return 0;
  }
}

}  // namespace gradsync::daemon
