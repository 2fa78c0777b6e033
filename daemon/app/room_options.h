// Translates the daemon's options into those of its rooms.

#ifndef DAEMON_APP_ROOM_OPTIONS_H_
#define DAEMON_APP_ROOM_OPTIONS_H_

#include "daemon/config/options.h"
#include "daemon/peer/peer_service.h"
#include "daemon/rpc/decode.h"
#include "daemon/session/session_table.h"
#include "daemon/worker/worker_supervisor.h"

namespace gradsync::daemon {

SessionPolicy SessionPolicyOf(const Options& options);
DecodeLimits DecodeLimitsOf(const Options& options);
PeerOptions PeerOptionsOf(const Options& options);
WorkerSupervisorOptions WorkerOptionsOf(const Options& options);

}  // namespace gradsync::daemon

#endif  // DAEMON_APP_ROOM_OPTIONS_H_
