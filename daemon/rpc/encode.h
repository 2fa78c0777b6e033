// Writes a job's messages to a session in the form of the wire.

#ifndef DAEMON_RPC_ENCODE_H_
#define DAEMON_RPC_ENCODE_H_

#include <cstddef>

#include "daemon/job/layout_plan.h"
#include "daemon/job/layout_set.h"
#include "daemon/job/session_message.h"
#include "daemon/worker/gpu_arena.h"
#include "gradsync/v1/gradsync.pb.h"
#include "gradsync/v1/types.pb.h"

namespace gradsync::daemon {

// Clears `response` first.
void Encode(const SessionMessage& message, v1::SessionResponse* response);
// Estimates, in bytes, the memory of a message while it is queued. Allocates nothing. Takes
// constant time.
std::size_t QueuedBytes(const SessionMessage& message);
// The same for an answer. Takes constant time for LayoutAssigned. The other answers are short, or
// there is one per session: it visits each part of them.
std::size_t QueuedBytes(const v1::SessionResponse& answer);
// Writes buckets and size.
void EncodeBuckets(const LayoutPlan& plan, v1::LayoutAssigned* assigned);
// Writes buckets, placements and size.
void Encode(const LayoutPlan& plan, v1::LayoutAssigned* assigned);
// Writes the layout as a rank that came back after a loss has to register it.
void Encode(const CurrentLayout& layout, v1::CurrentLayout* out);
// Writes size and kind of sharing. Called after the Encode() of the plan.
void Encode(const GpuArena& arena, v1::LayoutAssigned* assigned);
void Encode(const StepTimes& times, google::protobuf::RepeatedPtrField<v1::BucketTimes>* buckets);

}  // namespace gradsync::daemon

#endif  // DAEMON_RPC_ENCODE_H_
