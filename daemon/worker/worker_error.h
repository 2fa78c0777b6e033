// Statuses in messages between the daemon and a worker.

#ifndef DAEMON_WORKER_WORKER_ERROR_H_
#define DAEMON_WORKER_WORKER_ERROR_H_

#include "absl/status/status.h"
#include "daemon/worker/worker.pb.h"

namespace gradsync::daemon {

// An Error carries a status of MakeError: its code, reason, message and fields.
worker::Error EncodeError(const absl::Status& status);
absl::Status DecodeError(const worker::Error& error);

}  // namespace gradsync::daemon

#endif  // DAEMON_WORKER_WORKER_ERROR_H_
