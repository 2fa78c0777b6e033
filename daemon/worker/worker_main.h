// What gradsyncd runs as when it is started as a worker.

#ifndef DAEMON_WORKER_WORKER_MAIN_H_
#define DAEMON_WORKER_WORKER_MAIN_H_

namespace gradsync {

// Serves the calls that come on the descriptor kWorkerSocket, until Stop or until the daemon is
// gone. Returns the exit status. In a build without CUDA every call is refused, FAILED_PRECONDITION
// CUDA_NOT_BUILT.
int RunWorker();

}  // namespace gradsync

#endif  // DAEMON_WORKER_WORKER_MAIN_H_
