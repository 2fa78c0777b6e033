#include "tools/gradsyncctl/help.h"

namespace gradsync {
namespace {

constexpr absl::string_view kProgram = R"(Usage: gradsyncctl COMMAND [OPTION...]

Asks a running gradsyncd what it does.

Commands:
  status     who is here: jobs, ranks, layouts, nodes, and who is waited for
  stats      what it costs: latencies, bandwidth, and which rank is late
  timeline   a picture of the last step: each bucket's way from ready to done
  health     whether the daemon serves; for probes and scripts
  doctor     whether machine, user and daemon have what training needs, and what to do; works
             without a daemon too

Options:
  --socket PATH      the daemon's socket; default $GRADSYNC_SOCKET, else
                     /run/gradsync/gradsyncd.sock
  --job ID           only this job; status then lists its ranks too
  --layout NAME      timeline: of this layout; needed if the job has several
  --steps N          timeline: the last N steps, 1-64; default 1
  --timeout SECONDS  how long to wait for the daemon; default 5
  --json             for programs: the messages of gradsync.v1.Introspection, under the names of
                     their fields, zeros included; 64-bit integers are strings, and so are
                     "NaN" and "Infinity"
  --version          print the version
  --help, -h         this text; after a command, what its columns mean

Exit status:
  0  OK
  1  WARN  the daemon warns or drains; for status and stats also: a job has failed
  2  ERR   the daemon cannot be asked or does not serve, or doctor finds what keeps it from that;
           or the command line is wrong

Root and the daemon's own user see every job, other users see theirs.

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
)";

constexpr absl::string_view kStatus =
    R"(Usage: gradsyncctl status [--job ID] [--socket PATH] [--timeout SECONDS] [--json]

Who is here: the daemon, its jobs and their layouts. Exit status 0: all is well; 1: a job has
failed (and no later generation of it is there), the daemon drains, or it warns; 2: it cannot be
asked.

Jobs:
  JOB          the id that its trainers gave
  USER         the user id that its trainers run as
  GEN          generation: how many lives the job has had, this one included
  STATE        forming: ranks are still joining; running; FAILED: a rank was lost; ended: every
               rank has left. Failed and ended jobs stay listed for a while
  RANKS        live ranks / world size; "+1 left": one more has finished its steps
  MISSING      ranks that have not joined
  WAITING FOR  what keeps the job from going on just now
and, of a job on several GPUs, the gate between them that is in force

Layouts of jobs that live (a layout is the buckets of one wrapped module):
  BUCKETS      reduced one by one, in this order of index
  BYTES        of one rank
  STEP         the step in progress, or the next one
  STATE        agreeing: not every rank has registered and mapped it yet; ready
  WAITING FOR  who is missing what in the step in progress; "-" between steps

Nodes of jobs that span several and are coordinated here:
  ADDRESS      from which its daemon called
  RANKS        that have joined from there
  HEARD        its daemon's last word: "now", since it is asked every second; GONE: it has left, or
               was lost
  WAITING FOR  the ranks there that the step or operation in progress waits for

Jobs elsewhere: ranks here whose job another node's daemon coordinates; ask that one for layouts,
steps and statistics:
  ADDRESS      of the coordinator, as the ranks gave it
  HEARD        its last word; NOT YET: it has not answered

Lanes: this node's connections to the other nodes of a job:
  SENT         payload, without headers; RECEIVED likewise
  BUSY         time with gradients in hand
  GBIT/S       sent while busy, 10^9 bits per second

GPUs, as the daemon's workers find them: driver and NCCL, or why there is none; the gate, which is
when an all-reduce between GPUs begins (auto: none where all of a job's share through MPS, else
all_nodes); then each GPU:
  FREE         of its memory, whoever has the rest; known while a worker is there
  OVERLAP      how kernels of trainers and of the daemon share it. MPS: beside each other;
               time-sliced: in turns, so that communication hides little behind computation

Workers, one process for each job on each GPU:
  WORKER       its process id
  STATE        running; starting: it opens its GPU; FAILED: it has ended, and is started again when
               a rank needs it
  ARENAS       memory of the GPU that ranks share with it; STAGING: in which buckets are summed;
               CONTEXT, NCCL: what its context and its connections took, approximately

Ranks (with --job):
  NODE         "-" columns of a rank on another node are known to its own daemon
  INCARNATION  number of the session; a rank that joins again gets a new one
  PID          "unknown": a process in another PID namespace
  STATE        live; left: it has finished its steps
  ARENA        host memory that holds its buckets and broadcasts; ON GPUS likewise

Examples:
  gradsyncctl status
  gradsyncctl status --job digits
  gradsyncctl status --json | jq -r '.jobs[] | select(.missing_ranks != []) | .job_id'
  gradsyncctl status --json | jq '.jobs[].nodes[] | select(.waiting_ranks != []) | .name'
  gradsyncctl status --json | jq '.cuda.workers[] | {job_id, gpu, last_failure}'
)";

constexpr absl::string_view kStats =
    R"(Usage: gradsyncctl stats [--job ID] [--socket PATH] [--timeout SECONDS] [--json]

What synchronization has cost since each job began. Exit status as of status.

Each layout:
  STEPS     committed complete: every rank got the average
  VOID      committed void: the gradients of that step were thrown away
  BUCKETS   reduced
  BYTES     reduced, of one rank
  GB/S      bytes / time spent reducing, 10^9 bytes per second

Latencies, per bucket; p50: half of the buckets were quicker, p99: 99 of 100 were:
  ready skew  from the first rank's gradients being ready to the last rank's: time that early
              ranks wait, whatever the daemon does
  queue       from the last rank's ready to the start of the reduction
  reduce      the reduction itself
  total       from the last rank's ready to done: queue + reduce
  exposed     per step: from its last bucket ready to its commit: what backward could not hide

The result of the last complete step, over all buckets:
  GRADIENT NORM     root of the sum of the squares; "nan" or "inf" if an element is
  NON-FINITE        elements that are NaN or Inf
  STEPS NON-FINITE  complete steps so far that had such elements

Stragglers: which rank was the last to have a bucket ready, most frequent first:
  LAST        buckets that it was last with
  OF ALL      their share
  BEHIND      by how much it was behind the rank before it, on average
  TOTAL       the same, summed up

Examples:
  gradsyncctl stats --job digits
  gradsyncctl stats --json | jq '.jobs[].layouts[] | {name, total}'
  gradsyncctl stats --json | jq '.jobs[].layouts[] | select(.steps_non_finite != "0") | .name'
)";

constexpr absl::string_view kTimeline =
    R"(Usage: gradsyncctl timeline [--job ID] [--layout NAME] [--steps N] [--socket PATH]
                            [--timeout SECONDS] [--json]

A picture of the last committed steps of a layout, oldest first. --job and --layout may be left
out where there is only one (of jobs: one that has not ended). Exit status 0: drawn, or no step is
committed yet; 2: the daemon cannot be asked or has no such job or layout.

One line per bucket and rank, from the step's first ready to its commit:
  r    the rank's gradients are ready
  .    they wait: for the other ranks, or for the buckets before
  #    the reduction runs
  d    done: the average is written back
Columns READY, REDUCE and DONE: the same moments (REDUCE: when it starts) since the step's first
ready. "-": it did not happen, as in a void step. With more than 64 lines the ranks of a bucket
share one: r is then the first rank, R the last.

Examples:
  gradsyncctl timeline
  gradsyncctl timeline --job digits --layout model --steps 3
)";

constexpr absl::string_view kHealth =
    R"(Usage: gradsyncctl health [--socket PATH] [--timeout SECONDS] [--json]

Whether the daemon serves, by grpc.health.v1 and its own warnings. Exit status:
  0  OK    serves, nothing to warn of
  1  WARN  drains, or warns of something (named)
  2  ERR   cannot be reached, or a service does not serve

A liveness probe that restarts the daemon should take 1 for alive:
  sh -c 'gradsyncctl health --timeout 2; [ $? -le 1 ]'

Examples:
  gradsyncctl health
  gradsyncctl health --json | jq -r .code
)";

constexpr absl::string_view kDoctor =
    R"(Usage: gradsyncctl doctor [--socket PATH] [--timeout SECONDS] [--json]

Checks what training with gradsync needs, one line each: ok, WARN or FAIL, why, and "->" what to do.
It changes nothing, and works without a daemon and without a GPU. Run it as the user who trains, in
the container where the trainers run: what it sees is what they see.

  kernel, shared memory, memory limit   Linux 5.14; memfds; what the cgroup leaves for gradients
  socket, fd socket, daemon's user      both sockets: there, open to this user, somebody listens
  PID namespace, user namespace         whether the daemon knows whose process a trainer is
  descriptors                           of this shell, and of the daemon if it shows
  GPUs                                  /dev/nvidia*: there, and this user may use them
  CUDA driver, NCCL                     versions, as a program here finds them
                                        ($GRADSYNC_CUDA_LIBRARY)
  MPS                                   whether it is on here and for the daemon's workers alike
                                        ($CUDA_MPS_PIPE_DIRECTORY), and for whom
  daemon, daemon's GPUs, workers        what the daemon says; whether it sees the GPUs that are here
  peer port                             of jobs that span nodes: whether it answers

Exit status:
  0  OK    nothing to do
  1  WARN  training works, less well or less safely than it could
  2  ERR   something keeps trainers from it

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
