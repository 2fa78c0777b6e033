// Golden text: what an operator sees for fixed answers.

#include "tools/gradsyncctl/render.h"

#include <google/protobuf/text_format.h>

#include <cstdint>
#include <limits>
#include <string>
#include <vector>

#include "absl/strings/str_cat.h"
#include "gmock/gmock.h"
#include "gtest/gtest.h"
#include "tools/gradsyncctl/json.h"

namespace gradsync {
namespace {

using grpc::health::v1::HealthCheckResponse;
using ::testing::ContainsRegex;
using ::testing::HasSubstr;
using ::testing::Not;
using ::testing::StartsWith;

template <typename Message>
Message FromText(const std::string& text) {
  Message message;
  EXPECT_TRUE(google::protobuf::TextFormat::ParseFromString(text, &message));
  return message;
}

v1::GetStatusResponse EmptyStatus() {
  return FromText<v1::GetStatusResponse>(R"pb(
    version: "0.1.0"
    pid: 4711
    uptime_s: 7985.5
    socket: "/run/gradsync/gradsyncd.sock"
    state: DAEMON_STATE_SERVING
    reduce_threads: 1
    simd: "AVX2"
  )pb");
}

v1::GetStatusResponse BusyStatus() {
  v1::GetStatusResponse status = EmptyStatus();
  status.MergeFrom(FromText<v1::GetStatusResponse>(R"pb(
    reduce_threads: 4
    arena_bytes: 432328704
    jobs {
      job_id: "digits"
      uid: 1000
      generation: 1
      world_size: 2
      state: JOB_STATE_RUNNING
      gate: "all_nodes"
      sessions {
        rank: 0
        incarnation: 41
        pid: 812
        state: "live"
        client: "gradsync-c++/0.1.0"
        connected_s: 62
        arena_bytes: 103424
        gpu_bytes: 25165824
      }
      sessions { rank: 1 incarnation: 42 state: "left" client: "\033[31mevil" connected_s: 3 }
      layouts {
        name: "model"
        channel: 1
        parameters: 6
        buckets: 4
        bytes: 103424
        step: 318
        waiting_for: "rank 1 has not marked bucket 3 ready"
        ready: true
      }
      layouts { name: "head" channel: 2 parameters: 1 buckets: 1 bytes: 512 step: 1 }
    }
    jobs {
      job_id: "wide"
      uid: 0
      generation: 3
      world_size: 8
      state: JOB_STATE_FORMING
      sessions { rank: 0 incarnation: 43 pid: 900 state: "live" }
      missing_ranks: [ 1, 2, 3, 5, 6, 7 ]
      missing_ranks_total: 6
    }
    jobs {
      job_id: "old"
      uid: 1001
      generation: 12
      world_size: 2
      state: JOB_STATE_FAILED
      missing_ranks: [ 0, 1 ]
      missing_ranks_total: 2
      failure: "rank 1 was lost in step 17 (its process 77 has ended)"
      layouts { name: "model" step: 17 waiting_for: "rank 1 has not ended the step" ready: true }
    }
    warnings: "job old has failed"
  )pb"));
  return status;
}

TEST(RenderStatusTest, CountsAFinishedRankAsLeft) {
  v1::GetStatusResponse status = BusyStatus();
  status.mutable_jobs(0)->mutable_sessions(1)->set_state("finished");
  const std::string text = RenderStatus(status, false, Length::kShort);
  EXPECT_NE(text.find("1/2 +1 left"), std::string::npos) << text;
}

TEST(RenderStatusTest, SaysThatThereAreNoJobs) {
  EXPECT_EQ("\n" + RenderStatus(EmptyStatus(), false, Length::kShort), R"(
gradsyncd 0.1.0: serving, up 2 h 13 min, pid 4711, socket /run/gradsync/gradsyncd.sock
1 reduce thread (AVX2), arenas 0 B

no jobs
)");
}

TEST(RenderStatusTest, ShowsJobsLayoutsAndWarnings) {
  EXPECT_EQ("\n" + RenderStatus(BusyStatus(), false, Length::kShort), R"(
gradsyncd 0.1.0: serving, up 2 h 13 min, pid 4711, socket /run/gradsync/gradsyncd.sock
4 reduce threads (AVX2), arenas 412.3 MiB
3 jobs: 1 FAILED, 1 forming, 1 running

JOB     USER  GEN  STATE    RANKS        MISSING   WAITING FOR
digits  1000    1  running  1/2 +1 left  -         step 318 of model
  gate between its GPUs: all_nodes
wide       0    3  forming  1/8          1-3, 5-7  ranks 1-3, 5-7 to join
old     1001   12  FAILED   0/2          0-1       -
  failed: rank 1 was lost in step 17 (its process 77 has ended)

LAYOUT  JOB     BUCKETS      BYTES  STEP  STATE     WAITING FOR
model   digits        4  101.0 KiB   318  ready     rank 1 has not marked bucket 3 ready
head    digits        1      512 B     1  agreeing  -

WARN  job old has failed
)");
}

TEST(RenderStatusTest, ShowsWhatEachUserHolds) {
  v1::GetStatusResponse status = EmptyStatus();
  status.MergeFrom(FromText<v1::GetStatusResponse>(R"pb(
    users {
      uid: 0
      control_bytes: 1536
      control_quota_bytes: 268435456
      connections: 2
      calls: 3
      connections_refused: 17
    }
    users {
      uid: 1000
      arena_bytes: 103424
      gpu_bytes: 50331648
      control_bytes: 1048576
      control_quota_bytes: 268435456
      engine_bytes: 29360128
      engine_quota_bytes: 2147483648
    }
  )pb"));
  const std::string text = RenderStatus(status, false, Length::kShort);
  EXPECT_EQ(text.substr(text.find("USER") - 1), R"(
USER     ARENAS   ON GPUS   ENGINES  ENGINE QUOTA  IN THE DAEMON  DAEMON QUOTA  CONNECTIONS  CALLS  REFUSED
   0        0 B       0 B       0 B           0 B        1.5 KiB     256.0 MiB            2      3       17
1000  101.0 KiB  48.0 MiB  28.0 MiB       2.0 GiB        1.0 MiB     256.0 MiB            0      0        0
)");
}

TEST(RenderStatusTest, NamesTheRanksThatTheJobHolds) {
  v1::GetStatusResponse status = BusyStatus();
  status.mutable_jobs(0)->add_held_ranks(1);
  const std::string text = RenderStatus(status, false, Length::kShort);
  EXPECT_NE(text.find("1/2 +1 left +1 held  -         replacement of rank 1"), std::string::npos)
      << text;
}

// The daemon lists the lowest missing ranks, and counts all.
TEST(RenderStatusTest, SaysHowManyMoreRanksAreMissing) {
  v1::GetStatusResponse status = EmptyStatus();
  v1::JobStatus* const job = status.add_jobs();
  job->set_job_id("wide");
  job->set_world_size(65'536);
  job->set_state(v1::JOB_STATE_FORMING);
  job->set_missing_ranks_total(65'535);
  for (std::uint32_t rank = 1; rank <= 1024; ++rank) job->add_missing_ranks(rank);
  const std::string text = RenderStatus(status, false, Length::kShort);
  EXPECT_THAT(text, HasSubstr("1-1024, 64511 more  ranks 1-1024, 64511 more to join\n")) << text;
}

TEST(RenderStatusTest, SaysThatNodesThatAreGoneMayNotBeListed) {
  v1::GetStatusResponse status = EmptyStatus();
  v1::JobStatus* const job = status.add_jobs();
  job->set_job_id("wide");
  job->add_nodes()->set_name("beta");
  EXPECT_THAT(RenderStatus(status, false, Length::kShort), Not(HasSubstr("no session now")));
  job->set_former_ranks_unlisted(76);
  EXPECT_THAT(
      RenderStatus(status, false, Length::kShort),
      HasSubstr("\n  wide: 76 more ranks have no session now. If their nodes have ENDED, this "
                "table may lack those nodes\n"));
}

TEST(RenderStatusTest, NamesTheFirstOfManyRangesOfMissingRanks) {
  v1::GetStatusResponse status = EmptyStatus();
  v1::JobStatus* const job = status.add_jobs();
  job->set_state(v1::JOB_STATE_FORMING);
  job->set_missing_ranks_total(20);
  for (std::uint32_t rank = 1; rank < 40; rank += 2) job->add_missing_ranks(rank);
  EXPECT_THAT(RenderStatus(status, false, Length::kShort),
              HasSubstr("1, 3, 5, 7, 9, 11, 13, 15, 12 more  ranks 1, "));
  EXPECT_THAT(RenderStatus(status, false, Length::kFull), HasSubstr(", 37, 39 to join\n"));
}

TEST(RenderStatusTest, ShowsTheProgressOfAHealing) {
  v1::GetStatusResponse status = BusyStatus();
  v1::HealingStatus* const healing = status.mutable_jobs(0)->mutable_healing();
  healing->set_rank(1);
  const auto shows = [&status](const std::string& part) {
    const std::string text = RenderStatus(status, false, Length::kShort);
    EXPECT_NE(text.find(part), std::string::npos) << text;
  };
  shows("state of rank 1 from rank 0\n");
  healing->set_bytes_total(4 << 20);
  healing->set_bytes(1 << 20);
  shows("state of rank 1 from rank 0, 1.0 MiB of 4.0 MiB\n");
}

TEST(RenderStatusTest, ShowsRanksOnDemand) {
  const std::string text = RenderStatus(BusyStatus(), true, Length::kShort);
  EXPECT_EQ(text.substr(text.find("RANK  JOB") - 1), R"(
RANK  JOB     STATE  NODE  PID      INCARNATION  CONNECTED      ARENA   ON GPUS  CLIENT
   0  digits  live   here  812               41  1 min 2 s  101.0 KiB  24.0 MiB  gradsync-c++/0.1.0
   1  digits  left   here  unknown           42  3 s              0 B         -  ?[31mevil
   0  wide    live   here  900               43  0 s              0 B         -

WARN  job old has failed
)");
}

std::string RenderGpus(const v1::GetStatusResponse& status) {
  LeftOut left_out;
  return RenderSections(GpuSections(status), 0, Length::kFull, &left_out);
}

TEST(RenderGpusTest, ShowsNothingForADaemonWithoutGpus) {
  EXPECT_EQ(RenderGpus(EmptyStatus()), "");
}

TEST(RenderGpusTest, SaysWhyThereAreNone) {
  EXPECT_EQ(RenderGpus(FromText<v1::GetStatusResponse>(R"pb(
              cuda { driver_error: "no CUDA driver: libcuda.so.1: cannot open" }
            )pb")),
            "\nno GPUs: no CUDA driver: libcuda.so.1: cannot open\n");
  EXPECT_EQ(RenderGpus(FromText<v1::GetStatusResponse>(R"pb(
              cuda { driver_version: "13.0" nccl_error: "libnccl.so.2 is version 2.18.5" }
            )pb")),
            "\ndriver for CUDA 13.0, no NCCL, so that a job's ranks here must share one GPU: "
            "libnccl.so.2 is version 2.18.5, arenas on GPUs 0 B\n");
}

TEST(RenderGpusTest, ShowsGpusAndWorkers) {
  const auto status = FromText<v1::GetStatusResponse>(R"pb(
    cuda {
      driver_version: "13.0"
      nccl_version: "2.28.9"
      arena_bytes: 50331648
      gate: "auto"
      gpus {
        uuid: "GPU-1"
        name: "NVIDIA H200"
        memory_bytes: 150754820096
        free_bytes: 1073741824
        sharing: GPU_SHARING_MPS
      }
      gpus {
        uuid: "GPU-2"
        name: "NVIDIA H200"
        memory_bytes: 150754820096
        sharing: GPU_SHARING_TIME_SLICED
      }
      workers {
        job_id: "digits"
        uid: 1000
        gpu: "GPU-1"
        state: WORKER_STATE_RUNNING
        pid: 812
        restarts: 1
        last_failure: "the GPU's worker process was killed by signal 9 (Killed)"
        arena_bytes: 50331648
        staging_bytes: 104857600
        nccl_bytes: 16777216
        context_bytes: 536870912
        legacy_arenas: 2
        why_legacy: "the device exports no allocation as a file descriptor"
      }
      workers { job_id: "wide" uid: 0 gpu: "GPU-2" state: WORKER_STATE_FAILED }
    }
  )pb");
  EXPECT_EQ(RenderGpus(status), R"(
driver for CUDA 13.0, NCCL 2.28.9, gate auto, arenas on GPUs 48.0 MiB

GPU    NAME            MEMORY     FREE  OVERLAP
GPU-1  NVIDIA H200  140.4 GiB  1.0 GiB  MPS
GPU-2  NVIDIA H200  140.4 GiB        -  time-sliced

WORKER  JOB     USER  GPU    STATE    RESTARTS    ARENAS    STAGING    CONTEXT      NCCL
812     digits  1000  GPU-1  running         1  48.0 MiB  100.0 MiB  512.0 MiB  16.0 MiB
  last failure: the GPU's worker process was killed by signal 9 (Killed)
  2 shared by legacy IPC: the device exports no allocation as a file descriptor
-       wide       0  GPU-2  FAILED          0       0 B        0 B          -       0 B
)");
}

TEST(RenderStatusTest, ShowsNodesAndLanesOfAJobThatIsCoordinatedHere) {
  v1::GetStatusResponse status = EmptyStatus();
  status.MergeFrom(FromText<v1::GetStatusResponse>(R"pb(
    node_name: "alpha"
    peer_address: "10.0.0.1:7417"
    jobs {
      job_id: "digits"
      generation: 1
      world_size: 6
      state: JOB_STATE_RUNNING
      sessions { rank: 0 incarnation: 1 pid: 812 state: "live" client: "c++" connected_s: 9 }
      sessions { rank: 2 incarnation: 7 state: "live" node: "beta" }
      nodes {
        name: "alpha"
        connected: true
        ranks: [ 0, 1 ]
      }
      nodes {
        name: "beta"
        address: "10.0.0.2"
        connected: true
        heard_s: 4.2
        ranks: [ 2, 3 ]
        waiting_ranks: 3
      }
      nodes {
        name: "gamma"
        ranks: [ 4, 5 ]
      }
      engine {
        epoch: 2
        connected: true
        nodes: [ "alpha", "beta" ]
        wire_type: WIRE_TYPE_BFLOAT16
        lanes { bytes_sent: 26214400 bytes_received: 26214400 busy_s: 0.21 gbit_per_s: 0.99864 }
        lanes { bytes_sent: 512 busy_s: 0.0001 gbit_per_s: 0.04096 }
      }
    }
    warnings: "peer port is open"
    notices: "gradients travel in clear text"
  )pb"));
  const std::string text = RenderStatus(status, true, Length::kShort);
  EXPECT_EQ("\n" + text.substr(0, text.find("\nJOB")), R"(
gradsyncd 0.1.0: serving, up 2 h 13 min, pid 4711, socket /run/gradsync/gradsyncd.sock
1 reduce thread (AVX2), arenas 0 B
node alpha, listens for other nodes at 10.0.0.1:7417
)");
  EXPECT_EQ(text.substr(text.find("NODE   JOB") - 1), R"(
NODE   JOB     ADDRESS   RANKS  HEARD    WAITING FOR
alpha  digits  here      0-1    -        -
beta   digits  10.0.0.2  2-3    4 s ago  rank 3
gamma  digits  -         4-5    ENDED    -

LANE  JOB         SENT  RECEIVED    BUSY  GBIT/S
   0  digits  25.0 MiB  25.0 MiB  210 ms   0.999
   1  digits     512 B       0 B  100 us   0.041
  digits: between alpha, beta; float32 gradients travel as bfloat16, in clear text

RANK  JOB     STATE  NODE  PID  INCARNATION  CONNECTED  ARENA  ON GPUS  CLIENT
   0  digits  live   here  812            1  9 s          0 B        -  c++
   2  digits  live   beta  -              -  -              -        -

WARN  peer port is open
NOTE  gradients travel in clear text
)");
}

TEST(RenderStatusTest, ShowsJobsThatAreCoordinatedElsewhere) {
  v1::GetStatusResponse status = EmptyStatus();
  status.MergeFrom(FromText<v1::GetStatusResponse>(R"pb(
    remote_jobs {
      job_id: "digits"
      uid: 1000
      coordinator: "10.0.0.1:7417"
      node_name: "alpha"
      connected: true
      heard_s: 0.4
      sessions { rank: 3 incarnation: 2 pid: 77 state: "live" }
      sessions { rank: 2 incarnation: 1 pid: 76 state: "live" }
      engine { nodes: [ "alpha", "beta" ] }
    }
    remote_jobs { job_id: "other" coordinator: "10.0.0.9:7417" heard_s: 12 }
  )pb"));
  const std::string text = RenderStatus(status, false, Length::kShort);
  EXPECT_EQ(text.substr(text.find("\nJOB ELSEWHERE")), R"(
JOB ELSEWHERE  USER  COORDINATOR  ADDRESS        RANKS HERE  HEARD
digits         1000  alpha        10.0.0.1:7417  2-3         now
other             0  -            10.0.0.9:7417  -           NOT YET, called for 12 s

LANE  JOB  SENT  RECEIVED  BUSY  GBIT/S
  digits: alpha, beta have not met yet
)");
}

v1::GetStatsResponse SomeStats() {
  return FromText<v1::GetStatsResponse>(R"pb(
    sessions_opened: 12
    sessions_lost: 1
    jobs_failed: 1
    jobs {
      job_id: "digits"
      uid: 1000
      generation: 1
      operations: 5
      layouts {
        name: "model"
        steps_complete: 1100
        steps_void: 1
        buckets_reduced: 4400
        bytes_reduced: 114400000
        reduce_gbps: 8.1249
        gradient_norm: 2.71828
        steps_non_finite: 3
        ready_skew { p50_us: 121.3 p99_us: 3120 max_us: 18200 }
        queue { p50_us: 8.25 p99_us: 90 max_us: 412 }
        reduce { p50_us: 40 p99_us: 88 max_us: 1304 }
        total { p50_us: 49.5 p99_us: 170 max_us: 1410 }
        exposed { p50_us: 180 p99_us: 1200 max_us: 2000 }
        stragglers { rank: 1 times_last: 3012 behind_us_total: 813240 }
        stragglers { rank: 0 times_last: 1388 behind_us_total: 2776 }
      }
      layouts { name: "head" }
    }
    jobs { job_id: "wide" generation: 3 operations: 1 operations_failed: 1 }
  )pb");
}

TEST(RenderStatsTest, ShowsLatenciesAndStragglers) {
  EXPECT_EQ("\n" + RenderStats(SomeStats(), {}, Length::kShort), R"(
since the daemon started: 12 sessions opened, 1 lost; 1 job failed

job digits (user 1000, generation 1): 5 operations, 0 failed
  LAYOUT  STEPS  VOID  BUCKETS      BYTES  GB/S
  model    1100     1     4400  109.1 MiB  8.12
  head        0     0        0        0 B  0.00

  layout model
  LATENCY         P50      P99      MAX
  ready skew   121 us  3.12 ms  18.2 ms
  queue       8.25 us  90.0 us   412 us
  reduce      40.0 us  88.0 us  1.30 ms
  total       49.5 us   170 us  1.41 ms
  exposed      180 us  1.20 ms  2.00 ms

  GRADIENT NORM  NON-FINITE  STEPS NON-FINITE
          2.718           0                 3

  STRAGGLER  LAST  OF ALL   BEHIND    TOTAL
  rank 1     3012    68 %   270 us   813 ms
  rank 0     1388    32 %  2.00 us  2.78 ms

job wide (user 0, generation 3): 1 operation, 1 failed
  no layouts
)");
}

TEST(RenderStatsTest, ShowsANormThatIsNotFinite) {
  v1::GetStatsResponse stats = SomeStats();
  v1::LayoutStats* const layout = stats.mutable_jobs(0)->mutable_layouts(0);
  layout->set_gradient_norm(std::numeric_limits<double>::quiet_NaN());
  layout->set_non_finite(12);
  EXPECT_NE(RenderStats(stats, {}, Length::kShort)
                .find("            nan          12                 3\n"),
            std::string::npos)
      << RenderStats(stats, {}, Length::kShort);
  // No step is complete: there is no result.
  layout->set_steps_complete(0);
  EXPECT_EQ(RenderStats(stats, {}, Length::kShort).find("GRADIENT NORM"), std::string::npos);
}

TEST(RenderStatsTest, SaysThatThereAreNoJobs) {
  EXPECT_EQ(RenderStats({}, {}, Length::kShort),
            "since the daemon started: 0 sessions opened, 0 lost; 0 jobs failed\n\nno jobs\n");
}

v1::GetTimelineResponse TwoSteps() {
  return FromText<v1::GetTimelineResponse>(R"pb(
    steps {
      step: 17
      verdict: VERDICT_COMPLETE
      commit_ns: 5200000
      buckets {
        bucket: 0
        ready_ns: [ 1000000, 1300000 ]
        start_ns: 1310000
        finish_ns: 2000000
      }
      buckets {
        bucket: 1
        ready_ns: [ 3000000, 2000000 ]
        start_ns: 3005000
        finish_ns: 3006000
      }
      buckets {
        bucket: 2
        ready_ns: [ 4000000, 4900000 ]
        start_ns: 4900000
        finish_ns: 5150000
      }
    }
    steps {
      step: 18
      verdict: VERDICT_VOID
      commit_ns: 9000000
      buckets {
        bucket: 0
        ready_ns: [ 6000000, 7000000 ]
        start_ns: 7000000
        finish_ns: 7500000
      }
      buckets {
        bucket: 1
        ready_ns: [ 8000000, 0 ]
      }
    }
  )pb");
}

TEST(RenderTimelineTest, ShowsCompleteAndVoidSteps) {
  EXPECT_EQ("\n" + RenderTimeline("digits", "model", TwoSteps(), Length::kShort), R"(
step 17 of model, job digits: complete, 3 buckets in 4.20 ms; exposed 300 us
BUCKET  0 ms       1           2           3           4        READY     DONE  LATE RANK
     0  0..1#######d                                           300 us  1.00 ms  1 by 300 us
     1             1...........0#d                            2.00 ms  2.01 ms  0 by 1.00 ms
     2                                     0..........1##d    3.90 ms  4.15 ms  1 by 900 us

step 18 of model, job digits: VOID, 2 buckets in 3.00 ms; exposed 1.00 ms
BUCKET  0 ms            1                2               3      READY     DONE  LATE RANK
     0  0...............1########d                            1.00 ms  1.50 ms  1 by 1.00 ms
     1                                   0................    2.00 ms        -  1 missing

0-1 that rank is ready (+ several)  . waiting  # reducing  d done
)");
}

TEST(RenderTimelineTest, ShowsTheFirstAndLastOfManyRanks) {
  v1::GetTimelineResponse timeline;
  v1::StepTimeline* step = timeline.add_steps();
  step->set_step(1);
  step->set_verdict(v1::VERDICT_COMPLETE);
  step->set_commit_ns(200'000);
  for (std::uint32_t bucket = 0; bucket < 2; ++bucket) {
    v1::BucketTimes* times = step->add_buckets();
    times->set_bucket(bucket);
    for (std::uint64_t rank = 0; rank < 64; ++rank) {
      times->add_ready_ns(1000 + bucket * 60'000 + rank * 1000);
    }
    times->set_start_ns(1000 + bucket * 60'000 + 70'000);
    times->set_finish_ns(1000 + bucket * 60'000 + 120'000);
  }
  EXPECT_EQ("\n" + RenderTimeline("wide", "model", timeline, Length::kShort), R"(
step 1 of model, job wide: complete, 2 buckets in 199 us; exposed 76.0 us
BUCKET  0 us        50           100         150                READY    DONE  LATE RANK
     0  r..............R.#############d                       63.0 us  120 us  63 by 1.00 us
     1                 r..............R.#############d         123 us  180 us  63 by 1.00 us

r first rank ready  R last rank ready  . waiting  # reducing  d done
)");
}

// 64 jobs with 4 layouts each. Job 7 has failed, job 9 waits for rank 1.
v1::GetStatusResponse ManyJobs() {
  v1::GetStatusResponse status = EmptyStatus();
  for (int number = 0; number < 64; ++number) {
    v1::JobStatus* job = status.add_jobs();
    job->set_job_id(absl::StrCat("job-", number));
    job->set_world_size(2);
    job->set_state(number == 7 ? v1::JOB_STATE_FAILED : v1::JOB_STATE_RUNNING);
    if (number == 7) job->set_failure("rank 1 was lost");
    for (int i = 0; i < 4; ++i) {
      v1::LayoutStatus* layout = job->add_layouts();
      layout->set_name(absl::StrCat("layout-", i));
      layout->set_buckets(2000);
      layout->set_ready(true);
      if (number == 9) layout->set_waiting_for("rank 1 has not marked bucket 3 ready");
    }
    status.add_warnings(absl::StrCat("warning ", number));
  }
  return status;
}

TEST(ShortAnswerTest, StatusOf64JobsShowsTheWorst) {
  const std::string text = RenderStatus(ManyJobs(), false, Length::kShort);
  EXPECT_LE(CountLines(text), 42u) << text;
  EXPECT_THAT(text, HasSubstr("64 jobs: 1 FAILED, 63 running\n"));
  EXPECT_THAT(text, ContainsRegex("JOB .*\njob-7 .*\n  failed: rank 1 was lost\njob-9 "));
  EXPECT_THAT(text, ContainsRegex("LAYOUT .*\nlayout-0  job-9 "));
  EXPECT_THAT(text, ContainsRegex("\nleft out: [0-9]+ jobs, [0-9]+ layouts, [0-9]+ warnings and "
                                  "notices \\(--all shows them\\)\n$"));
  const std::string all = RenderStatus(ManyJobs(), false, Length::kFull);
  EXPECT_THAT(all, HasSubstr("job-63"));
  EXPECT_THAT(all, HasSubstr("warning 63"));
  EXPECT_THAT(all, Not(HasSubstr("left out")));
}

TEST(ShortAnswerTest, StatusOfManyRanksSaysHowManyItLeavesOut) {
  v1::GetStatusResponse status = EmptyStatus();
  v1::JobStatus* job = status.add_jobs();
  for (int rank = 0; rank < 2000; ++rank) job->add_sessions()->set_rank(rank);
  const std::string text = RenderStatus(status, true, Length::kShort);
  EXPECT_LE(CountLines(text), 42u) << text;
  EXPECT_THAT(text, ContainsRegex("left out: 19[0-9][0-9] ranks"));
}

v1::GetStatsResponse ManyStats() {
  v1::GetStatsResponse stats;
  for (int number = 0; number < 64; ++number) {
    v1::JobStats* job = stats.add_jobs();
    *job = SomeStats().jobs(0);
    job->set_job_id(absl::StrCat("job-", number));
    job->mutable_layouts(0)->mutable_exposed()->set_p99_us(number == 40 ? 9e6 : number);
    for (int rank = 2; rank < 64; ++rank) {
      job->mutable_layouts(0)->add_stragglers()->set_rank(rank);
    }
  }
  return stats;
}

TEST(ShortAnswerTest, StatsOf64JobsShowTheWorst) {
  const std::vector<std::string> warnings(64, "job has failed");
  const std::string text = RenderStats(ManyStats(), warnings, Length::kShort);
  EXPECT_LE(CountLines(text), 50u) << text;
  EXPECT_THAT(text, HasSubstr("64 jobs, 128 layouts: 70400 steps complete, 64 void, 6.8 GiB "
                              "averaged\n"));
  EXPECT_THAT(text, ContainsRegex("JOB +LAYOUT .*\njob-40 +model .* 9.00 s +rank 1\njob-63 "));
  EXPECT_THAT(text, ContainsRegex("\njob job-40 .*\n\n  layout model\n"));
  EXPECT_THAT(text, HasSubstr("\nleft out: 58 stragglers, 116 layouts, 127 layouts' details, "
                              "59 warnings (--all shows them)\n"));
  const std::string all = RenderStats(ManyStats(), warnings, Length::kFull);
  EXPECT_GT(CountLines(all), 64u * 64);
  EXPECT_THAT(all, Not(HasSubstr("left out")));
}

// Steps of 2,000 buckets. In step 5 bucket 1234 takes longest.
v1::GetTimelineResponse ManySteps(int steps) {
  v1::GetTimelineResponse timeline;
  for (int number = 1; number <= steps; ++number) {
    v1::StepTimeline* step = timeline.add_steps();
    step->set_step(number);
    step->set_verdict(v1::VERDICT_COMPLETE);
    step->set_commit_ns(10'000'000);
    for (std::uint32_t i = 0; i < 2000; ++i) {
      v1::BucketTimes* bucket = step->add_buckets();
      bucket->set_bucket(i);
      bucket->add_ready_ns(1000 + i * 1000);
      bucket->add_ready_ns(1500 + i * 1000);
      bucket->set_start_ns(2000 + i * 1000);
      bucket->set_finish_ns(3000 + i * 1000);
    }
  }
  if (steps >= 5) {
    timeline.mutable_steps(4)->mutable_buckets(1234)->set_finish_ns(99'000'000);
  }
  return timeline;
}

TEST(ShortAnswerTest, TimelineOf2000BucketsShowsTheWorst) {
  const std::string text = RenderTimeline("digits", "model", ManySteps(1), Length::kShort);
  EXPECT_LE(CountLines(text), 40u) << text;
  EXPECT_THAT(text, StartsWith("step 1 of model, job digits: complete, 2000 buckets in 10.0 ms;"));
  EXPECT_THAT(text, HasSubstr("\nleft out: 1976 buckets (--all shows them)\n"));
  EXPECT_EQ(CountLines(RenderTimeline("digits", "model", ManySteps(1), Length::kFull)), 2004u);
}

TEST(ShortAnswerTest, TimelineOf64StepsShowsTheLongestStepAndBucket) {
  const std::string text = RenderTimeline("digits", "model", ManySteps(64), Length::kShort);
  EXPECT_LE(CountLines(text), 40u) << text;
  EXPECT_THAT(text, ContainsRegex("STEP  VERDICT .*\n   5  complete  99.0 ms .* 1234  1 by"));
  EXPECT_THAT(text, ContainsRegex("\nstep 5 of model.*\nBUCKET .*\n  1234  "));
  EXPECT_THAT(text, HasSubstr("\nleft out: 52 steps, 1984 buckets, 63 steps' pictures (--all"));
}

TEST(ShortAnswerTest, HealthWithManyReasonsSaysHowManyItLeavesOut) {
  const HealthReport report = {HealthCode::kWarn, std::vector<std::string>(64, "a warning")};
  const std::string text = RenderHealth(report, {}, EmptyStatus(), Length::kShort);
  EXPECT_LE(CountLines(text), 40u) << text;
  EXPECT_THAT(text, HasSubstr("\nleft out: 44 reasons (--all shows them)\n"));
}

TEST(RenderTimelineTest, SaysThatThereIsNoStepYet) {
  EXPECT_EQ(RenderTimeline("digits", "model", {}, Length::kShort),
            "no step of model of job digits is decided yet\n");
}

TEST(RenderTimelineTest, ExtremeTimesStayWithinThePicture) {
  // A step without times, one whose commit comes before its last bucket, and extremes.
  const auto timeline = FromText<v1::GetTimelineResponse>(R"pb(
    steps {
      step: 1
      verdict: VERDICT_VOID
      buckets {
        bucket: 0
        ready_ns: [ 0, 0 ]
      }
      buckets {}
    }
    steps {
      step: 2
      verdict: VERDICT_COMPLETE
      commit_ns: 5
      buckets {
        bucket: 0
        ready_ns: [ 10, 90 ]
        start_ns: 3
        finish_ns: 18446744073709551615
      }
      buckets {
        bucket: 1
        ready_ns: [ 90, 90 ]
        start_ns: 95
        finish_ns: 94
      }
    }
    steps {
      step: 3
      verdict: VERDICT_COMPLETE
      commit_ns: 10
      buckets {
        bucket: 0
        ready_ns: [ 10 ]
        start_ns: 10
        finish_ns: 10
      }
    }
  )pb");
  const std::string text = RenderTimeline("digits", "model", timeline, Length::kShort);
  for (std::size_t begin = 0; begin < text.size(); begin = text.find('\n', begin) + 1) {
    EXPECT_LE(text.find('\n', begin) - begin, 100u) << text.substr(begin);
  }
}

TEST(RenderHealthTest, ShowsCodeReasonsAndServices) {
  EXPECT_EQ(
      "\n" + RenderHealth({HealthCode::kWarn, {"the daemon drains: it takes no new sessions"}},
                          {{"", HealthCheckResponse::NOT_SERVING},
                           {"gradsync.v1.GradientSync", HealthCheckResponse::SERVING}},
                          EmptyStatus(), Length::kShort),
      R"(
WARN  gradsyncd 0.1.0, up 2 h 13 min, jobs: 0, socket /run/gradsync/gradsyncd.sock
  the daemon drains: it takes no new sessions

SERVICE                   STATE
(the daemon)              NOT_SERVING
gradsync.v1.GradientSync  SERVING
)");
}

TEST(JsonTest, FieldsKeepTheirNamesAndZeros) {
  const std::string json = MessageToJson(FromText<v1::GetTimelineResponse>(R"pb(
    steps {
      step: 18
      verdict: VERDICT_VOID
      buckets {
        bucket: 0
        ready_ns: [ 8, 0 ]
      }
    }
  )pb"));
  EXPECT_EQ("\n" + json, R"(
{
 "steps": [
  {
   "step": "18",
   "verdict": "VERDICT_VOID",
   "commit_ns": "0",
   "buckets": [
    {
     "bucket": 0,
     "ready_ns": [
      "8",
      "0"
     ],
     "start_ns": "0",
     "finish_ns": "0"
    }
   ]
  }
 ]
}
)");
}

TEST(JsonTest, HealthHasCodeReasonsAndServices) {
  EXPECT_EQ("\n" + HealthToJson({HealthCode::kErr, {"the daemon is \"NOT_SERVING\""}}, "/d.sock",
                                {{"", HealthCheckResponse::NOT_SERVING}}),
            R"(
{
 "code": "ERR",
 "exit_status": 2,
 "reasons": [
  "the daemon is \"NOT_SERVING\""
 ],
 "socket": "/d.sock",
 "services": {
  "": "NOT_SERVING"
 }
}
)");
}

}  // namespace
}  // namespace gradsync
