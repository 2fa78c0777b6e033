// Writes what gRPC and Protocol Buffers log into the daemon's log.

#ifndef DAEMON_RPC_GRPC_LOG_H_
#define DAEMON_RPC_GRPC_LOG_H_

namespace gradsync::daemon {

// Their lines may hold what clients have sent, such as the values of headers, and a client can
// cause many of them. The daemon writes such text as a field of its own lines: there it is escaped,
// cut and limited in rate. Called before gRPC is used.
void LogWhatGrpcSays();

}  // namespace gradsync::daemon

#endif  // DAEMON_RPC_GRPC_LOG_H_
