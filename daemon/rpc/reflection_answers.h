// Answers gRPC's reflection: which services there are, and the descriptors of their messages.

#ifndef DAEMON_RPC_REFLECTION_ANSWERS_H_
#define DAEMON_RPC_REFLECTION_ANSWERS_H_

#include <string>
#include <vector>

#include "grpc/reflection/v1alpha/reflection.pb.h"

namespace gradsync::daemon {

// Describes what is linked into the program. `services`: the full names of those that the server
// has. A name of more than 512 bytes is refused. Thread-safe.
grpc::reflection::v1alpha::ServerReflectionResponse AnswerReflection(
    const grpc::reflection::v1alpha::ServerReflectionRequest& request,
    const std::vector<std::string>& services);

}  // namespace gradsync::daemon

#endif  // DAEMON_RPC_REFLECTION_ANSWERS_H_
