// Writes jobs, their sessions, layouts and nodes for GetStatus and GetStats.

#ifndef DAEMON_RPC_JOB_STATUS_H_
#define DAEMON_RPC_JOB_STATUS_H_

#include <cstdint>
#include <string>

#include "daemon/job/job.h"
#include "daemon/rpc/node_status_source.h"
#include "daemon/session/session.h"
#include "gradsync/v1/introspection.pb.h"

namespace gradsync::daemon {

v1::JobState StateOf(JobPhase phase);
// The state of a rank with a session, in the words of SessionStatus.state.
const char* StateOf(RankState state);
// Seconds between two times in nanoseconds; 0 if `to_ns` is the earlier one.
double Seconds(std::uint64_t from_ns, std::uint64_t to_ns);

void Fill(const Session& session, std::uint64_t now_ns, v1::SessionStatus* out);
void Fill(const EngineSnapshot& engine, v1::EngineStatus* out);
void Fill(const HealingSnapshot& healing, v1::HealingStatus* out);
void Fill(const LayoutSnapshot& layout, v1::LayoutStatus* out);
void Fill(const LayoutSnapshot& layout, v1::LayoutStats* out);
// Writes the nodes of a job that spans several. `here` is the name of this node.
void FillNodes(const JobSnapshot& job, const JobNodes& nodes, const std::string& here,
               std::uint64_t now_ns, v1::JobStatus* out);

}  // namespace gradsync::daemon

#endif  // DAEMON_RPC_JOB_STATUS_H_
