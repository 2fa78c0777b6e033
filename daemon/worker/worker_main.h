// The main function of a worker process.

#ifndef DAEMON_WORKER_WORKER_MAIN_H_
#define DAEMON_WORKER_WORKER_MAIN_H_

namespace gradsync::daemon {

// Serves the calls that arrive on the descriptor kWorkerSocket, until Stop or until the daemon has
// ended. Returns the exit status. In a build without CUDA it refuses every call:
// FAILED_PRECONDITION CUDA_NOT_BUILT.
int RunWorker();

}  // namespace gradsync::daemon

#endif  // DAEMON_WORKER_WORKER_MAIN_H_
