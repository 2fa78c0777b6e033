#include "tools/gradsyncctl/help.h"

namespace gradsync {
namespace {

constexpr absl::string_view kProgram = R"(Usage: gradsyncctl COMMAND [OPTION...]

Asks a running gradsyncd what it does.

Commands:
  status     jobs, ranks, layouts, nodes and GPUs, and which rank is waited for
  stats      what synchronization costs: latencies, bandwidth, late ranks
  timeline   a picture of the last step: when each bucket was ready, reduced and done
  health     whether the daemon serves; for probes and scripts
  doctor     whether this machine, user and daemon have what training needs, and what to do; works
             without a daemon

Where to look first:
  A job does not go on       gradsyncctl status: the column WAITING FOR
  A job is slow              gradsyncctl stats: "exposed" is what the backward pass does not hide;
                             STRAGGLER is the rank that the others wait for
  A trainer cannot join      gradsyncctl doctor, as the user and in the container of the trainer

Options:
  --socket PATH      the daemon's socket; default $GRADSYNC_SOCKET, else
                     /run/gradsync/gradsyncd.sock
  --job ID           only this job; status then lists its ranks too
  --layout NAME      timeline: of this layout; needed if the job has several
  --steps N          timeline: the last N steps, 1 to 64; default 1
  --step N           timeline: step N, if it is among the last 64
  --all              everything; default: totals and the worst rows, in about 50 lines
  --timeout SECONDS  how long to wait for the daemon; default 5
  --json             everything, for programs: the messages of gradsync.v1.Introspection with the
                     names of their fields, zeros included; 64-bit integers, "NaN" and "Infinity"
                     are strings
  --version          print the version
  --help, -h         this text; after a command: what its columns mean

Exit status:
  0  OK
  1  WARN  the daemon warns or drains; for status and stats also: a job has failed; for doctor: a
           check ends with WARN
  2  ERR   the daemon does not answer or does not serve, doctor finds a failure, or the command
           line is wrong

Root and the daemon's own user see every job. Other users see their own jobs. In a pod of Kubernetes
other than the daemon's, users see their own jobs in that pod, and root sees all jobs in that pod.
With the daemon's option pod_root_sees_all, root and the daemon's own user see every job of the node
from any pod.

Examples:
  gradsyncctl status
  gradsyncctl stats --job digits
  gradsyncctl timeline --job digits --layout model --steps 3
  gradsyncctl health --timeout 1
  gradsyncctl doctor
  gradsyncctl stats --json | jq '.jobs[].layouts[].reduce_gbps'

The same questions without this program, where SOCKET is the path (grpcurl 1.9.2 and 1.9.3:
unix://SOCKET without -unix):
  grpcurl -plaintext -unix SOCKET gradsync.v1.Introspection/GetStatus
grpcurl refuses answers above 4 MiB, unless -max-msg-sz BYTES allows more.
)";

constexpr absl::string_view kStatus =
    R"(Usage: gradsyncctl status [--job ID] [--all] [--socket PATH] [--timeout SECONDS] [--json]

The daemon, its jobs and their layouts. Exit status 0: all is well; 1: a job has failed (and has no
later generation), the daemon drains, or it warns; 2: the daemon does not answer. Without --all,
long tables show the rows that need a look first: failed jobs, then those that wait.

Jobs:
  JOB          the id that its trainers gave
  USER         the user id that its trainers run as
  GEN          generation: 1 in a job's first life, 2 when its ranks have joined again
  STATE        forming: ranks are still joining; running; FAILED: ended with an error, such as a
               lost rank; ended: every rank has left. Failed and ended jobs stay listed for a while
  RANKS        live ranks / world size; "+1 left": one more has left or finished, and waits for
               the others; "+1 held": one more was lost, and the job waits for its replacement
  MISSING      ranks that have not joined; "1-1024, 64511 more": so many more. With --json
               missing_ranks lists the lowest 1,024, and missing_ranks_total counts all
  WAITING FOR  what the job waits for now; "state of rank 1 from rank 0": rank 1 replaces a lost
               one, and gets the state of the model
  For a job on several GPUs, a line names the gate between them that is in force.

Layouts of jobs that have not ended (a layout is the buckets of one wrapped module):
  BUCKETS      reduced one by one, in this order of index
  BYTES        of one rank
  STEP         the step in progress, or the next one
  STATE        agreeing: not every rank has registered and mapped it yet; ready
  WAITING FOR  the rank that the step in progress waits for, and why; "-" between steps

Nodes of the jobs that span nodes and that this daemon coordinates:
  ADDRESS      of the node's daemon, as it connected
  RANKS        that have joined on the node
  HEARD        when its daemon last answered; this daemon asks every second. ENDED: it has left,
               or was lost. Such nodes are shown for the lowest 1,024 ranks without a session; a
               line says how many more such ranks there are
  WAITING FOR  the ranks there that the step or operation in progress waits for

Jobs elsewhere have ranks here, but another node's daemon coordinates them; ask that daemon for
layouts, steps and statistics:
  ADDRESS      of the coordinator, as the ranks gave it
  HEARD        when it last answered; NOT YET: it has not answered

Lanes: this node's connections to the other nodes of a job:
  SENT         payload, without headers; RECEIVED: the same, from the other nodes
  BUSY         time with gradients in hand
  GBIT/S       sent while busy, 10^9 bits per second

GPUs, as the daemon's workers find them. First driver and NCCL, or why there is none. Then the gate:
when an all-reduce between GPUs begins. The gate "auto" is "none" if MPS shares all GPUs of a job,
else "all_nodes". Then each GPU:
  FREE         memory that no process uses; known while a worker runs
  OVERLAP      how trainers' kernels and the daemon's share it. MPS: at the same time; time-sliced:
               in turns, so that computation hides little communication

Workers, one process for each job on each GPU:
  WORKER       its process id
  STATE        running; starting: it opens its GPU; FAILED: it has ended, and is started again when
               a rank needs it
  ARENAS       memory of the GPU that ranks share with it
  STAGING      memory in which buckets are summed
  CONTEXT      memory of its context, about; NCCL: of its connections, about

Users for whom the daemon holds memory, or who have connections or calls. The connection and the
call of this question count, too:
  USER           the user id, and in Kubernetes the pod: each pod of a user has quotas of its own
  ARENAS         host memory of its ranks' buckets and broadcasts; ON GPUS: their memory there
  ENGINES        memory of its jobs' engines between nodes on this node; near ENGINE QUOTA
                 (quota_engine_bytes_per_user) its next job between nodes is refused
  IN THE DAEMON  what the daemon itself keeps for it: layouts, steps, timelines, unread messages;
                 near DAEMON QUOTA (quota_control_bytes_per_user) its requests are refused
  CONNECTIONS    open ones to the daemon's socket
  CALLS          open ones, as gRPC counts them; with too many, connections of the user end
  REFUSED        connections that the daemon has refused since it started: too many, too often, or
                 the daemon had no room

Ranks (with --job):
  NODE         for a rank on another node the other columns are "-": ask its own daemon
  INCARNATION  number of the session; a rank that joins again gets a new one
  PID          "unknown": a process in another PID namespace
  STATE        live. left: it has called Leave or LeaveAndStay, and waits for the other ranks.
               finished: it has called Finish, and waits likewise. loading: it replaces a lost
               session, and does not have the state of the model yet. healing: it replaces a lost
               session, and takes part in steps, but not yet in operations
  ARENA        host memory of its buckets and broadcasts; ON GPUS: its memory there

Examples:
  gradsyncctl status
  gradsyncctl status --job digits
  gradsyncctl status --json | jq -r '.jobs[] | select(.missing_ranks != []) | .job_id'
  gradsyncctl status --json | jq '.jobs[].nodes[] | select(.waiting_ranks != []) | .name'
  gradsyncctl status --json | jq '.cuda.workers[] | {job_id, gpu, last_failure}'
)";

constexpr absl::string_view kStats =
    R"(Usage: gradsyncctl stats [--job ID] [--all] [--socket PATH] [--timeout SECONDS] [--json]

What synchronization has cost since each job began. Exit status: the same as of status.
Without --all, many layouts are shortened to the totals, the layouts with the longest exposed times
(p99), and all numbers of the first of these.

Each layout:
  STEPS     complete: every rank got the average
  VOID      void: the gradients of these steps were thrown away, on every rank
  BUCKETS   reduced
  BYTES     reduced, of one rank
  GB/S      bytes / time spent reducing, 10^9 bytes per second

Latencies, per bucket; p50: half of the buckets took less, p99: 99 of 100 did:
  ready skew  from the first rank's gradients ready to the last rank's: early ranks wait this long,
              whatever the daemon does
  queue       from the last rank's ready to the start of the reduction
  reduce      the reduction itself
  total       from the last rank's ready to done: queue + reduce
  exposed     per step, from its last bucket ready to its commit: what the backward pass does not
              hide

The result of the last complete step, over all buckets:
  GRADIENT NORM     root of the sum of the squares; "nan" or "inf" if an element is
  NON-FINITE        elements that are NaN or Inf
  STEPS NON-FINITE  complete steps so far that had such elements

Stragglers, the ranks that were last to have a bucket ready, most frequent first:
  LAST        buckets that this rank was the last to mark ready
  OF ALL      their share of all buckets
  BEHIND      how long after the rank before it, on average
  TOTAL       the same, summed up

Examples:
  gradsyncctl stats --job digits
  gradsyncctl stats --json | jq '.jobs[].layouts[] | {name, total}'
  gradsyncctl stats --json | jq '.jobs[].layouts[] | select(.steps_non_finite != "0") | .name'
)";

constexpr absl::string_view kTimeline =
    R"(Usage: gradsyncctl timeline [--job ID] [--layout NAME] [--steps N | --step N] [--all]
                            [--socket PATH] [--timeout SECONDS] [--json]

A picture of the last decided steps of a layout, oldest first. Without --job: of the only job, or
of the only one that has not ended. Without --layout: of the job's only layout. Exit status 0:
drawn, or no step is decided yet; 2: the daemon does not answer, or there is no such job, layout
or step.

One line for each bucket, from the step's first ready to its verdict:
  0-9  the gradients of this rank are ready; + those of several ranks
  .    the bucket waits: for other ranks, or for the buckets before it
  #    the reduction runs
  d    done: the average is written back
With more than 10 ranks only the first rank (r) and the last rank (R) are drawn.

  READY      when the last rank's gradients are ready, counted from the step's first ready
  DONE       when the average is written back, counted likewise; "-": never, as in a void step
  LATE RANK  the last rank, and how long after the rank before it
  exposed    in the title: from the last ready to the verdict; the backward pass does not hide it

Without --all, a step of many buckets shows those that took longest. Many steps are a table, void
and long ones first, with a picture of the first.

Examples:
  gradsyncctl timeline
  gradsyncctl timeline --job digits --layout model --steps 3
  gradsyncctl timeline --steps 64
  gradsyncctl timeline --step 1234 --all
)";

constexpr absl::string_view kHealth =
    R"(Usage: gradsyncctl health [--all] [--socket PATH] [--timeout SECONDS] [--json]

Whether the daemon serves: its answer to grpc.health.v1, and its own warnings. Exit status:
  0  OK    it serves and does not warn
  1  WARN  it drains, or it warns, or it does not tell its state; the text says which
  2  ERR   it does not answer, or a service does not serve

For a liveness probe, which restarts the daemon, 1 is alive:
  sh -c 'gradsyncctl health --timeout 2; [ $? -le 1 ]'

Examples:
  gradsyncctl health
  gradsyncctl health --json | jq -r .code
)";

constexpr absl::string_view kDoctor =
    R"(Usage: gradsyncctl doctor [--socket PATH] [--timeout SECONDS] [--json]

Checks what training with gradsync needs, one line each: ok, WARN or FAIL, why, and after "->" what
to do. It changes nothing, and works without a daemon and without a GPU. Run it as the user who
trains, in the container where the trainers run: it sees what they see.

  kernel, shared memory, memory limit   Linux 5.14; memfds; what the cgroup leaves for gradients
  socket, fd socket, daemon's user      both sockets exist, this user may connect, somebody listens
  PID namespace, user namespace         whether the daemon can tell which process a trainer is
  descriptors                           open files: the limit here; the daemon's if it is too low
  GPUs                                  /dev/nvidia* exist, and this user may use them
  CUDA driver, NCCL                     versions, as a program here finds them
                                        ($GRADSYNC_CUDA_LIBRARY)
  MPS                                   whether it is on both here and for the daemon's workers
                                        ($CUDA_MPS_PIPE_DIRECTORY), and which users it serves
  daemon, daemon's GPUs, workers        what the daemon reports; whether it sees this machine's GPUs
  peer port                             for jobs that span nodes: whether it answers

Exit status:
  0  OK    nothing to do
  1  WARN  training works, less well or less safely than it could
  2  ERR   training does not work

Examples:
  gradsyncctl doctor
  gradsyncctl doctor --json | jq -r '.findings[] | select(.verdict != "ok") | .remedy'
)";

}  // namespace

absl::string_view HelpText(CtlCommand command) {
  switch (command) {
    case CtlCommand::kNone:
      return kProgram;
    case CtlCommand::kStatus:
      return kStatus;
    case CtlCommand::kStats:
      return kStats;
    case CtlCommand::kTimeline:
      return kTimeline;
    case CtlCommand::kHealth:
      return kHealth;
    case CtlCommand::kDoctor:
      return kDoctor;
  }
  return kProgram;
}

}  // namespace gradsync
