// Statuses in messages between the daemon and a worker.

#ifndef DAEMON_WORKER_WORKER_ERROR_H_
#define DAEMON_WORKER_WORKER_ERROR_H_

#include "absl/status/status.h"
#include "daemon/worker/worker.pb.h"

namespace gradsync {

worker::Error EncodeError(const absl::Status& status);
absl::Status DecodeError(const worker::Error& error);

}  // namespace gradsync

#endif  // DAEMON_WORKER_WORKER_ERROR_H_
