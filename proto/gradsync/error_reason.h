// The names of the reasons for which calls fail, and of an error's fields. Shared by the client and
// the daemon; the texts are those of google.rpc.ErrorInfo (reason, metadata, domain) on the wire.
//
// Every reason has a comment of one form. A test compares its codes with docs/errors.md:
//
//   // STATUS_CODE[, STATUS_CODE]. What happened. What fails or ends.
//
// "A call" fails alone. After "The session" every later call of the rank fails until it joins
// again. "The job" ends every rank's session. Other last parts say where the reason is shown.

#ifndef PROTO_GRADSYNC_ERROR_REASON_H_
#define PROTO_GRADSYNC_ERROR_REASON_H_

#include <string_view>

namespace gradsync {

// A name from one of the lists below. No string converts to it, so a misspelled name does not
// compile. It refers to the text that it was made from.
template <class Kind>
class ErrorWord {
 public:
  explicit constexpr ErrorWord(std::string_view text) : text_(text) {}
  constexpr std::string_view text() const { return text_; }

  friend constexpr bool operator==(std::string_view text, ErrorWord word) {
    return text == word.text_;
  }
  friend constexpr bool operator!=(std::string_view text, ErrorWord word) {
    return text != word.text_;
  }

 private:
  std::string_view text_;
};

// Why a call failed.
using Reason = ErrorWord<struct ReasonKind>;
// The name of a value in an error's metadata.
using FieldName = ErrorWord<struct FieldNameKind>;

inline constexpr char kErrorDomain[] = "gradsync";

namespace field {

inline constexpr FieldName kAddress("address");       // of the coordinator, "host:port"
inline constexpr FieldName kBucket("bucket");         // index in its layout
inline constexpr FieldName kChannel("channel");       // number; 0: the job's own
inline constexpr FieldName kDevice("device");         // UUID of the GPU
inline constexpr FieldName kError("error");           // name of a CUDA error
inline constexpr FieldName kJob("job");               // job_id
inline constexpr FieldName kNode("node");             // node_name of its daemon
inline constexpr FieldName kOtherRank("other_rank");  // the rank that `rank` disagrees with
inline constexpr FieldName kRank("rank");             // the rank that the error is about
inline constexpr FieldName kStep("step");             // number in its layout

}  // namespace field

namespace reason {

// ---- Joining

// PERMISSION_DENIED, UNAVAILABLE. A job token is missing, the user is not allowed, or the process
// behind the connection has ended. The session.
inline constexpr Reason kCredentials("CREDENTIALS");
// FAILED_PRECONDITION. World size or job options differ from the other ranks'. The session.
inline constexpr Reason kJobMismatch("JOB_MISMATCH");
// UNIMPLEMENTED. The daemon does not have the loss policy that the job asks for, or the policy does
// not allow what a rank asks for. The session; a registration; the job after BeginCollective.
inline constexpr Reason kLossPolicy("LOSS_POLICY");
// ALREADY_EXISTS. A live session has the rank, and the job is still forming or has the loss policy
// hold. The session.
inline constexpr Reason kRankOccupied("RANK_OCCUPIED");
// FAILED_PRECONDITION, UNIMPLEMENTED. Client and daemon, or two daemons, have no protocol version
// in common. The session.
inline constexpr Reason kVersion("VERSION");

// ---- What a call may ask for

// INVALID_ARGUMENT, FAILED_PRECONDITION. An argument, an option, an environment variable or a
// message is not valid. A call of the client library; the session if the daemon finds it.
inline constexpr Reason kMalformed("MALFORMED");
// RESOURCE_EXHAUSTED. The system has no more memory or threads for this process. A call; the
// session if FetchState has too little for the state of the model.
inline constexpr Reason kMemory("MEMORY");
// RESOURCE_EXHAUSTED. This process, or the daemon, has as many open files as its limit allows. A
// call.
inline constexpr Reason kOpenFiles("OPEN_FILES");
// FAILED_PRECONDITION, INTERNAL, NOT_FOUND, PERMISSION_DENIED, UNIMPLEMENTED. A call or message
// came out of order, or the other side does not speak this protocol. The session; a call if the
// client library finds it.
inline constexpr Reason kProtocolViolation("PROTOCOL_VIOLATION");
// RESOURCE_EXHAUSTED. A quota of the daemon is used up. A registration, a question of gradsyncctl,
// or the session.
inline constexpr Reason kQuota("QUOTA");

// ---- The end of a session or a job

// FAILED_PRECONDITION. The trainer destroyed the session before this call. A call.
inline constexpr Reason kClosed("CLOSED");
// UNAVAILABLE. The daemon is not there, or its stream ended without saying why. The session.
inline constexpr Reason kDaemonLost("DAEMON_LOST");
// UNAVAILABLE. The daemon has said nothing for two leases, or has not sent the verdict of a decided
// step in time. A wait, which can be repeated; an operation, after which the session takes no more.
inline constexpr Reason kDaemonSilent("DAEMON_SILENT");
// UNAVAILABLE. The daemon drains or stops. The session.
inline constexpr Reason kDraining("DRAINING");
// FAILED_PRECONDITION. A forked child uses its parent's session. Every call in the child.
inline constexpr Reason kForked("FORKED");
// ABORTED. The trainer's process did not answer within its lease. The session.
inline constexpr Reason kLeaseExpired("LEASE_EXPIRED");
// FAILED_PRECONDITION. This rank has left the job. A call.
inline constexpr Reason kLeft("LEFT");
// ABORTED. The trainer's process ended. The daemon's log, and the message of RANK_LOST.
inline constexpr Reason kProcessEnded("PROCESS_ENDED");
// ABORTED. A rank's process came to a good end without leaving the job, and another rank began a
// step, an operation, a layout or a collective that needs it. With policy hold also if the rank has
// left, and another rank began a step or a layout. The job.
inline constexpr Reason kRankFinished("RANK_FINISHED");
// ABORTED. A rank of the job was lost. The job.
inline constexpr Reason kRankLost("RANK_LOST");
// ABORTED. The session ended before its memory was handed out. The trainer of that session.
inline constexpr Reason kSessionEnded("SESSION_ENDED");
// ABORTED, CANCELLED. The trainer's connection closed. The daemon's log, and the message of
// RANK_LOST.
inline constexpr Reason kStreamEnded("STREAM_ENDED");
// ABORTED. A newer generation of the job has begun. Every session of the old generation.
inline constexpr Reason kSuperseded("SUPERSEDED");

// ---- Layouts

// FAILED_PRECONDITION. This rank already has a layout of that name. A registration.
inline constexpr Reason kAlreadyRegistered("ALREADY_REGISTERED");
// FAILED_PRECONDITION. The trainer did not populate or did not seal pages of shared memory, or sent
// a step's message before LayoutReady. The session.
inline constexpr Reason kArenaNotPopulated("ARENA_NOT_POPULATED");
// FAILED_PRECONDITION. Ranks registered different layouts under one name. A registration, on every
// rank; only that of the replacement if it differs from the job's layout.
inline constexpr Reason kLayoutMismatch("LAYOUT_MISMATCH");
// RESOURCE_EXHAUSTED, FAILED_PRECONDITION, UNAVAILABLE. Another rank could not get its memory. A
// registration, with the other rank's status code.
inline constexpr Reason kLayoutRefused("LAYOUT_REFUSED");
// FAILED_PRECONDITION. A rank has released the layout. A step that another rank begins, or a call
// on a layout that this rank has released.
inline constexpr Reason kLayoutReleased("LAYOUT_RELEASED");
// FAILED_PRECONDITION. The layout was replaced. A call on the old layout.
inline constexpr Reason kLayoutReplaced("LAYOUT_REPLACED");
// DEADLINE_EXCEEDED. Not every rank registered and mapped the layout in time. A registration.
inline constexpr Reason kLayoutTimeout("LAYOUT_TIMEOUT");
// FAILED_PRECONDITION. Some ranks have left and stay, or with policy hold a rank was lost and has
// not completed a step since, so that not all can agree. A registration.
inline constexpr Reason kRanksLeft("RANKS_LEFT");
// INVALID_ARGUMENT. The layout has no such bucket. A call of the client library; the session if the
// daemon finds it.
inline constexpr Reason kUnknownBucket("UNKNOWN_BUCKET");
// INVALID_ARGUMENT. The job has no layout on that channel. The session.
inline constexpr Reason kUnknownChannel("UNKNOWN_CHANNEL");
// NOT_FOUND. No job has a layout of that name. A call of gradsyncctl.
inline constexpr Reason kUnknownLayout("UNKNOWN_LAYOUT");
// INVALID_ARGUMENT. The layout has no such parameter. A call.
inline constexpr Reason kUnknownParameter("UNKNOWN_PARAMETER");

// ---- Steps

// FAILED_PRECONDITION. The bucket is already ready in this step. A call of the client library; the
// session if the daemon finds it.
inline constexpr Reason kAlreadyReady("ALREADY_READY");
// FAILED_PRECONDITION. The step is already decided. A call of the client library; the session if
// the daemon finds it.
inline constexpr Reason kStaleStep("STALE_STEP");
// ABORTED. A rank abandoned the step. The step, on every rank.
inline constexpr Reason kStepAbandoned("STEP_ABANDONED");
// ABORTED, UNAVAILABLE. The verdict cannot be known: the step may be complete on some ranks and
// void on others. The session.
inline constexpr Reason kStepInDoubt("STEP_IN_DOUBT");
// DEADLINE_EXCEEDED. The step was not finished within step_timeout. The step, on every rank.
inline constexpr Reason kStepTimeout("STEP_TIMEOUT");
// ABORTED. The step is void. The step, on every rank.
inline constexpr Reason kStepVoid("STEP_VOID");
// DEADLINE_EXCEEDED, UNAVAILABLE. The time-out of this wait has expired; nothing else has
// changed. A wait, which can be repeated. Or the daemon did not answer another call in time.
inline constexpr Reason kWaitTimeout("WAIT_TIMEOUT");

// ---- The state of the model

// FAILED_PRECONDITION. Two ranks gave different positions in one step. The session of the rank that
// gave its position last.
inline constexpr Reason kPositionMismatch("POSITION_MISMATCH");
// FAILED_PRECONDITION. Ranks that should have one state of the model have different ones. The
// session of a replacement, or the job; check_in_sync alone otherwise.
inline constexpr Reason kRanksDiverged("RANKS_DIVERGED");
// ABORTED. The step became void, or a rank that took part was lost or refused, while a replacement
// loaded the state. A call; FetchState comes first again.
inline constexpr Reason kStateInterrupted("STATE_INTERRUPTED");
// FAILED_PRECONDITION. A replacement cannot load the state of the model. The session.
inline constexpr Reason kStateRefused("STATE_REFUSED");
// DEADLINE_EXCEEDED, UNAVAILABLE. No rank gave the state of the model in time. A call, which can be
// repeated.
inline constexpr Reason kStateUnavailable("STATE_UNAVAILABLE");

// ---- Barrier, Broadcast, AllReduce

// FAILED_PRECONDITION. Ranks called different operations. The operation, on every rank; the job if
// their collectives differ.
inline constexpr Reason kOperationMismatch("OPERATION_MISMATCH");
// DEADLINE_EXCEEDED. Not every rank came in time. The operation, on every rank.
inline constexpr Reason kOperationTimeout("OPERATION_TIMEOUT");
// INVALID_ARGUMENT. The root is no rank of the job. The session.
inline constexpr Reason kUnknownRank("UNKNOWN_RANK");

// ---- GPUs

// INVALID_ARGUMENT. CUDA's driver refused the stream, for example one of another device. It need
// not notice that a stream was destroyed. A call.
inline constexpr Reason kBadStream("BAD_STREAM");
// FAILED_PRECONDITION. The CUDA stream is being captured into a graph. A call.
inline constexpr Reason kCapturing("CAPTURING");
// FAILED_PRECONDITION. There is no CUDA driver. A registration.
inline constexpr Reason kCudaDriverMissing("CUDA_DRIVER_MISSING");
// FAILED_PRECONDITION. The CUDA driver is too old. A registration.
inline constexpr Reason kCudaDriverTooOld("CUDA_DRIVER_TOO_OLD");
// INTERNAL. The CUDA driver reported an error that has no other reason here. A call, or the job.
inline constexpr Reason kCudaError("CUDA_ERROR");
// FAILED_PRECONDITION. The daemon was built without CUDA and cannot run a worker. A registration.
inline constexpr Reason kCudaNotBuilt("CUDA_NOT_BUILT");
// UNIMPLEMENTED. The daemon or the client library was built without CUDA. A registration.
inline constexpr Reason kCudaUnavailable("CUDA_UNAVAILABLE");
// FAILED_PRECONDITION. The GPU's compute mode admits no second process. A registration.
inline constexpr Reason kGpuExclusive("GPU_EXCLUSIVE");
// UNAVAILABLE. The GPU reported an error that only the end of the process clears. The job if it is
// the worker's process, else a call.
inline constexpr Reason kGpuFault("GPU_FAULT");
// FAILED_PRECONDITION. The process does not see the GPU. A registration.
inline constexpr Reason kGpuNotVisible("GPU_NOT_VISIBLE");
// RESOURCE_EXHAUSTED. The GPU has too little free memory. A registration, or the job.
inline constexpr Reason kGpuOutOfMemory("GPU_OUT_OF_MEMORY");
// DEADLINE_EXCEEDED. A bucket stayed on the GPU for too long. The message of WORKER_LOST.
inline constexpr Reason kGpuTimeout("GPU_TIMEOUT");
// FAILED_PRECONDITION. The GPU lacks a feature that gradsync needs. A registration.
inline constexpr Reason kGpuUnsupported("GPU_UNSUPPORTED");
// FAILED_PRECONDITION. The CUDA driver cannot use the GPU. A registration.
inline constexpr Reason kGpuUnusable("GPU_UNUSABLE");
// RESOURCE_EXHAUSTED. MPS serves as many processes as it can. A registration.
inline constexpr Reason kMpsFull("MPS_FULL");
// FAILED_PRECONDITION. MPS serves another user. A registration.
inline constexpr Reason kMpsOtherUser("MPS_OTHER_USER");
// UNAVAILABLE. NCCL failed in a call to CUDA. The job.
inline constexpr Reason kNcclCudaError("NCCL_CUDA_ERROR");
// INTERNAL. NCCL reported an error that has no other reason here. The job.
inline constexpr Reason kNcclError("NCCL_ERROR");
// FAILED_PRECONDITION. There is no NCCL. The job.
inline constexpr Reason kNcclMissing("NCCL_MISSING");
// UNAVAILABLE. NCCL lost another GPU of the job. The job.
inline constexpr Reason kNcclRemoteLost("NCCL_REMOTE_LOST");
// DEADLINE_EXCEEDED. Not every GPU of the job connected in time. The job.
inline constexpr Reason kNcclTimeout("NCCL_TIMEOUT");
// FAILED_PRECONDITION. NCCL is too old. The job.
inline constexpr Reason kNcclTooOld("NCCL_TOO_OLD");
// UNAVAILABLE. The process that reduces on a GPU was lost. The job; a registration if the process
// was still starting.
inline constexpr Reason kWorkerLost("WORKER_LOST");
// UNAVAILABLE. The GPU's worker failed before and is started again after a pause. A registration.
inline constexpr Reason kWorkerRestarting("WORKER_RESTARTING");
// RESOURCE_EXHAUSTED. Too many workers of the user are starting or ending on this node. A
// registration.
inline constexpr Reason kWorkersStarting("WORKERS_STARTING");

// ---- Several nodes

// UNAVAILABLE. The connection to the coordinator's daemon broke. The session.
inline constexpr Reason kCoordinatorLost("COORDINATOR_LOST");
// PERMISSION_DENIED. `peer_coordinators` of the daemon's configuration does not list this
// coordinator, or what answers there is no daemon of this cluster. The session.
inline constexpr Reason kCoordinatorRefused("COORDINATOR_REFUSED");
// UNAVAILABLE. The coordinator's daemon does not answer. The session.
inline constexpr Reason kCoordinatorUnreachable("COORDINATOR_UNREACHABLE");
// INTERNAL. A node sent other data than the engine expected. The job.
inline constexpr Reason kEngineBroken("ENGINE_BROKEN");
// CANCELLED. The daemon closed the engine. The daemon's log.
inline constexpr Reason kEngineClosed("ENGINE_CLOSED");
// UNAVAILABLE. The engine failed without a reason of its own. The job.
inline constexpr Reason kEngineFailed("ENGINE_FAILED");
// UNAVAILABLE. The engine's process on a node was lost. The job.
inline constexpr Reason kEngineLost("ENGINE_LOST");
// UNAVAILABLE. The engine lost a node. The job.
inline constexpr Reason kEnginePeerLost("ENGINE_PEER_LOST");
// DEADLINE_EXCEEDED, UNAVAILABLE. A node did not take part in an exchange within engine_timeout.
// The job.
inline constexpr Reason kEngineTimeout("ENGINE_TIMEOUT");
// UNAVAILABLE. Another node's daemon was lost. The daemon's log, and the message of RANK_LOST; the
// job if it is on GPUs.
inline constexpr Reason kNodeLost("NODE_LOST");
// FAILED_PRECONDITION. Two daemons of one job are configured differently. The session.
inline constexpr Reason kNodeMismatch("NODE_MISMATCH");
// PERMISSION_DENIED. A process that is neither root's nor of the daemon's user called the peer port
// from the daemon's own network namespace, without TLS. The session.
inline constexpr Reason kPeerRefused("PEER_REFUSED");

}  // namespace reason
}  // namespace gradsync

#endif  // PROTO_GRADSYNC_ERROR_REASON_H_
