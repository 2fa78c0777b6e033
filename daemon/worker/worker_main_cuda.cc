#include <sys/prctl.h>
#include <unistd.h>

#include "daemon/worker/cuda_worker.h"
#include "daemon/worker/message_socket.h"
#include "daemon/worker/worker.pb.h"
#include "daemon/worker/worker_main.h"
#include "daemon/worker/worker_process.h"

namespace gradsync::daemon {

int RunWorker() {
  prctl(PR_SET_NAME, "gradsync-worker");
  const MessageSocket socket{UniqueFd(kWorkerSocket)};
  CudaWorker worker(&socket);
  // This thread never calls CUDA, so it sees the daemon's end even while a call of the driver
  // blocks.
  for (;;) {
    auto received = socket.Receive();
    worker::Call call;
    if (!received.ok() || received->end || !call.ParseFromString(received->bytes)) break;
    worker.Post(std::move(call), std::move(received->descriptors));
  }
  // Stop has been carried out, or the daemon has ended. _exit runs no exit handlers, which would
  // wait for the driver.
  _exit(worker.stopped() ? 0 : 1);
}

}  // namespace gradsync::daemon
