// The main function of an engine process, and what the daemon needs to start one.

#ifndef DAEMON_WORKER_ENGINE_MAIN_H_
#define DAEMON_WORKER_ENGINE_MAIN_H_

namespace gradsync::daemon {

// The argument that makes main an engine process. Its socket is kWorkerSocket.
inline constexpr char kEngineArgument[] = "--engine";

// Runs the engine of one job for the daemon (EngineProcess), until Stop or until the daemon has
// ended. Returns the exit status.
int RunEngine();

}  // namespace gradsync::daemon

#endif  // DAEMON_WORKER_ENGINE_MAIN_H_
