// A job's message to a session, on the wire.

#ifndef DAEMON_RPC_ENCODE_H_
#define DAEMON_RPC_ENCODE_H_

#include "daemon/job/layout_plan.h"
#include "daemon/job/session_message.h"
#include "daemon/worker/gpu_arena.h"
#include "gradsync/v1/gradsync.pb.h"
#include "gradsync/v1/types.pb.h"

namespace gradsync {

// `response` is cleared first.
void Encode(const SessionMessage& message, v1::SessionResponse* response);
// Buckets, placements and size.
void Encode(const LayoutPlan& plan, v1::LayoutAssigned* assigned);
// Its size, and how it is shared; after the plan.
void Encode(const GpuArena& arena, v1::LayoutAssigned* assigned);
void Encode(const StepTimes& times, google::protobuf::RepeatedPtrField<v1::BucketTimes>* buckets);

}  // namespace gradsync

#endif  // DAEMON_RPC_ENCODE_H_
