#!/usr/bin/env python3
"""Takes waits and polls out of the product, one at a time, and says which test notices.

    tests/fakes/mutants.py [--runs N] [WORD ...]   those whose description has every WORD, or all

Each mutant is a text of one file and what stands there instead. It is applied to the working tree,
its test is run N times (3), and the file is put back. Prints the lines of the table in README.md,
with how many of the runs failed. Exit status: 0 if each mutant was noticed at least once, 1 if one
was not or does not apply or compile, 2 for wrong usage.
"""

import argparse
import pathlib
import subprocess
import sys
from typing import List, NamedTuple

ROOT = pathlib.Path(__file__).resolve().parents[2]
TESTS_FAILED = 3  # bazel's exit status

QUEUE = "daemon/worker/cuda_launch_queue.cc"
WORKER = "daemon/worker/cuda_worker.cc"
STAGING = "daemon/worker/cuda_staging.cc"
TEAM = "daemon/worker/gpu_team.cc"
READY_WAITS = "daemon/worker/cuda_ready_waits.cc"
ATTACHED = "daemon/peer/attached_worker.cc"
LENT = "daemon/peer/lent_workers.cc"
HANDOFF = "client/src/cuda_handoff.cc"
STEPS = "client/src/step_sequence.cc"

LAUNCH = "//tests/worker:cuda_launch_test"
NCCL = "//tests/worker:nccl_launch_test"
LAYOUT = "//tests/client:cuda_layout_test"
JOB = "//tests/cuda:cuda_job_test"
DEATH = "//tests/cuda:cuda_death_test"
BAD_INPUT = "//tests/cuda:cuda_bad_input_test"
ATTACHED_TEST = "//tests/peer:attached_worker_test"
LENT_TEST = "//tests/peer:lent_workers_test"


class Mutant(NamedTuple):
    removed: str
    path: str
    before: str
    after: str
    target: str
    test: str


MUTANTS = [
    # ---- The worker
    Mutant(
        "the look at ready words before anything is enqueued",
        "daemon/arena/cuda_semaphore_page.cc",
        "return SemaphoreReleased(semaphore->ready.load(std::memory_order_acquire), step);",
        "return SemaphoreReleased(semaphore->ready.load(), step) || true;",
        LAUNCH,
        "CudaLaunch.EnqueuesNothingBeforeEveryReadyWordIsThere",
    ),
    Mutant(
        "the write-back's wait for the sum",
        QUEUE,
        "if (status.ok()) status = driver_->cuStreamWaitEvent(stream, summed, 0);",
        "static_cast<void>(summed);",
        LAUNCH,
        "CudaLaunch.AveragesOverTheTrainersOfAGpu",
    ),
    Mutant(
        "the collective's wait for the combine",
        QUEUE,
        "status = driver_->cuStreamWaitEvent(collective, one.piece->combined, 0);",
        "",
        NCCL,
        "NcclLaunch.AveragesOverTheTrainersOfEveryGpu",
    ),
    Mutant(
        "polling until the all-reduce is on its stream, before the write-back",
        QUEUE,
        "if (!*settled || !summing_.has_value())",
        "if (!summing_.has_value())",
        NCCL,
        "NcclLaunch.AveragesOverTheTrainersOfEveryGpu",
    ),
    Mutant(
        "the same before the next bucket",
        QUEUE,
        "!paused_ && !summing_.has_value()",
        "!paused_",
        NCCL,
        "NcclLaunch.AveragesOverTheTrainersOfEveryGpu",
    ),
    Mutant(
        "the order of a bucket's done words behind its write-back",
        QUEUE,
        "status = driver_->cuStreamWriteValue64(stream, rank",
        "status = driver_->cuStreamWriteValue64(context_->memory_stream(), rank",
        LAUNCH,
        "CudaLaunch.AveragesOverTheTrainersOfAGpu",
    ),
    Mutant(
        "the order of the verdict behind the write-back",
        QUEUE,
        "sizeof(float), stream);",
        "sizeof(float), context_->memory_stream());",
        LAUNCH,
        "CudaLaunch.KeepsAStepVoidToItsLastBucket",
    ),
    Mutant(
        "the order of the last done words behind the verdict",
        QUEUE,
        "    if (status.ok() && one.last) {\n",
        """    const CUdeviceptr done = rank->semaphores->DoneAddress(launch.bucket);
    status = driver_->cuStreamWriteValue64(stream, done, launch.step, 0);
    if (status.ok() && one.last) {
""",
        JOB,
        "GpuJob.AveragesOnTheTrainersStreams",
    ),
    Mutant(
        "keeping a step void to its last bucket",
        QUEUE,
        "layout.is_void = layout.is_void || launch.void_contributions > 0;",
        "layout.is_void = launch.void_contributions > 0;",
        LAUNCH,
        "CudaLaunch.KeepsAStepVoidToItsLastBucket",
    ),
    Mutant(
        "the wait for the write-back before a launch is over",
        QUEUE,
        """    if (result == CUDA_ERROR_NOT_READY) break;
    if (result != CUDA_SUCCESS) return driver_->StatusOf(result, "cuEventQuery");
""",
        "    static_cast<void>(result);\n",
        LAUNCH,
        "CudaLaunch.AveragesOverTheTrainersOfAGpu",
    ),
    Mutant(
        "the same before staging is used again",
        QUEUE,
        "  if (const absl::Status status = Sum(next); !status.ok()) return status;\n",
        """  next.piece->free = true;
  if (const absl::Status status = Sum(next); !status.ok()) return status;
""",
        LAUNCH,
        "CudaLaunch.HasMoreBucketsUnderWayThanPiecesOfStaging",
    ),
    Mutant(
        "releasing the launches of a step that is given up",
        QUEUE,
        "if (launch.layout != layout || launch.step != step) continue;",
        "if (launch.layout != layout || launch.step <= step) continue;",
        BAD_INPUT,
        "CudaBadInput.AReadyWordThatNeverComesIsAVoidStep",
    ),
    Mutant(
        "releasing the launches of a rank that is lost",
        QUEUE,
        "[&](const auto& other) { return other.get() == rank; });\n    launch.void",
        "[&](const auto& other) { return other.get() == rank && false; });\n    launch.void",
        LAUNCH,
        "CudaLaunch.GoesOnWithoutALostRankAsAVoidStep",
    ),
    Mutant(
        "the limit of what is on the GPU",
        QUEUE,
        "return status.ok() ? CheckDeadline() : status;",
        "return status;",
        NCCL,
        "NcclLaunch.AWorkerWhosePeerDiesInAnAllReduceEndsByItself",
    ),
    Mutant(
        "the current context of the issuing thread",
        "daemon/worker/cuda_context.cc",
        "  status = driver_->cuCtxSetCurrent(primary);\n",
        "",
        "//tests/worker:cuda_start_test",
        "CudaStart.OpensTheGpuOfAUuidAndLoadsEveryKernel",
    ),
    Mutant(
        "loading every kernel before there are collectives",
        "daemon/reduce/cuda_combine.cc",
        "    if (status.ok()) status = driver_->cuFuncLoad(*kernel);\n",
        "",
        "//tests/worker:cuda_start_test",
        "CudaStart.OpensTheGpuOfAUuidAndLoadsEveryKernel",
    ),
    Mutant(
        "the kernels that are for the type of staging",
        "daemon/reduce/cuda_combine.cc",
        "  return kernels_[static_cast<std::size_t>(dtype)][static_cast<std::size_t>(staging)];\n",
        """  static_cast<void>(staging);
  return kernels_[static_cast<std::size_t>(dtype)][static_cast<std::size_t>(dtype)];
""",
        NCCL,
        "NcclLaunch.SumsFloatsInSixteenBits",
    ),
    Mutant(
        "the wait for a new arena's zeros",
        "daemon/arena/cuda_arena.cc",
        "return status.ok() ? driver_->cuStreamSynchronize(stream) : status;",
        "return status;",
        LAUNCH,
        "CudaLaunch.AnArenaIsZeroedBeforeItsTrainerHasIt",
    ),
    Mutant(
        "the wait for what is on the GPU before staging grows",
        WORKER,
        "if (launches_ != nullptr && !launches_->at_rest() &&",
        "if (launches_ != nullptr && !launches_->at_rest() && false &&",
        NCCL,
        "NcclLaunch.StagingGrowsOnlyBetweenBuckets",
    ),
    Mutant(
        "holding buckets back while the worker connects",
        WORKER,
        "launches_->SetPaused(connecting_.has_value() ||",
        "launches_->SetPaused(",
        NCCL,
        "NcclLaunch.NothingBeginsWhileItConnects",
    ),
    Mutant(
        "finishing what is on the GPU at Stop",
        WORKER,
        "while (launches_ != nullptr && !launches_->at_rest()) {",
        "while (launches_ != nullptr && !launches_->at_rest() && false) {",
        LAUNCH,
        "CudaLaunch.WhatIsOnTheGpuIsFinishedAtStop",
    ),
    Mutant(
        "deregistering staging before it is freed",
        WORKER,
        "absl::Status registered = communicators_.front()->Deregister();",
        "absl::Status registered;",
        NCCL,
        "NcclLaunch.StagingGrowsWhileConnected",
    ),
    Mutant(
        "pieces of staging that are as far apart on every GPU",
        STAGING,
        "piece.address = memory_ + next_ * stride_;",
        "piece.address = memory_ + next_ * piece_bytes_;",
        NCCL,
        "NcclLaunch.BucketsLieAtTheSameOffsetOnEveryGpu",
    ),
    Mutant(
        "beginning with the first piece on every GPU",
        QUEUE,
        "  staging_->Restart();\n",
        "",
        NCCL,
        "NcclLaunch.BucketsLieAtTheSameOffsetOnEveryGpu",
    ),
    Mutant(
        "the wait for the other pieces before they are farther apart",
        STAGING,
        "(AllFree() || (Aligned(bytes) <= stride_ && pieces_[next_].free))",
        "pieces_[next_].free",
        NCCL,
        "NcclLaunch.BucketsLieAtTheSameOffsetOnEveryGpu",
    ),
    Mutant(
        "having NCCL connect before the first all-reduce",
        "daemon/engine/nccl_communicator.cc",
        '  setenv("NCCL_RUNTIME_CONNECT", "0", /*overwrite=*/0);\n',
        "",
        NCCL,
        "NcclLaunch.TellsOfAllThatNcclTakesOfTheGpu",
    ),
    Mutant(
        "flagging every communicator before one is freed",
        "daemon/engine/nccl_communicator.cc",
        "  nccl->ncclGroupStart();\n",
        "  static_cast<void>(nccl->ncclGroupStart);\n",
        "//tests/engine:nccl_communicator_test",
        "NcclCommunicator.AbortTellsAllBeforeItFreesAny",
    ),
    # ---- The daemon
    Mutant(
        "keeping the driver out of the daemon",
        "daemon/app/daemon.cc",
        "  r.workers->Probe(LogGpus);",
        """  void* open_library(const char*, int) __asm__("dlopen");
  open_library(r.options.cuda_library.c_str(), 2);
  r.workers->Probe(LogGpus);""",
        DEATH,
        "CudaDeath.WithKernelsThatNeverEnd",
    ),
    Mutant(
        "remembering that a step was given up, when a launch of it comes later",
        TEAM,
        "given_up_[step.layout] = step.step;",
        "",
        "//tests/worker:gpu_team_test",
        "GpuTeam.ALaunchOfAStepThatWasGivenUpIsDoneAtOnceAndVoid",
    ),
    Mutant(
        "rounding for the wire only where there is one",
        TEAM,
        "IsOfOneGpu(*operation)",
        "!IsOfOneGpu(*operation) && false",
        "//tests/cuda:cuda_wire_test",
        "WireType.RoundsNothingOnAGpuAlone",
    ),
    Mutant(
        "ending the workers that wait for one that has failed",
        TEAM,
        "if (worker != nullptr) kills_.push_back({std::move(worker), reply.status()});",
        "",
        DEATH,
        "CudaDeath.OfAWorkerOnOneOfTwoGpus",
    ),
    # ---- The gate
    Mutant(
        "looking at ready words before it says that gradients are there",
        READY_WAITS,
        "if (!AllReady(wait.ranks, wait.bucket, wait.step)) return false;",
        "static_cast<void>(AllReady);",
        LAUNCH,
        "CudaLaunch.SaysWhenTheGradientsAreThereAndEnqueuesNothing",
    ),
    Mutant(
        "ending the waits for a step that is given up",
        READY_WAITS,
        "if (wait.layout == layout && wait.step == step) wait.ranks.clear();",
        "if (wait.layout == layout && wait.step > step) wait.ranks.clear();",
        LAUNCH,
        "CudaLaunch.WaitsForNoGradientsThatWillNotCome",
    ),
    Mutant(
        "ending the waits for a rank that is lost",
        READY_WAITS,
        "[&](const auto& other) { return other.get() == rank; }),",
        "[&](const auto& other) { return other.get() == rank && false; }),",
        LAUNCH,
        "CudaLaunch.WaitsForNoGradientsThatWillNotCome",
    ),
    Mutant(
        "asking every GPU before a launch",
        TEAM,
        "for (const auto& pending : pending_) AskLocked(pending);",
        "",
        JOB,
        "GpuGate.WithoutMpsNothingIsLaunchedBeforeEveryGpusGradientsAreThere",
    ),
    Mutant(
        "the wait for all of their answers",
        TEAM,
        "while (!pending_.empty() && pending_.front()->left == 0) {",
        "while (!pending_.empty()) {",
        JOB,
        "GpuGate.WithoutMpsNothingIsLaunchedBeforeEveryGpusGradientsAreThere",
    ),
    Mutant(
        "closing the gate for GPUs without MPS",
        TEAM,
        "time_sliced_ = time_sliced_ || !reply->message.connected().mps();",
        "",
        JOB,
        "GpuGate.WithoutMpsNothingIsLaunchedBeforeEveryGpusGradientsAreThere",
    ),
    Mutant(
        "letting go of what waits at the gate when its step is given up",
        TEAM,
        "if (operation->gpu.layout != step.layout || operation->number != step.step) {",
        "if (operation->gpu.layout != step.layout || operation->number <= step.step) {",
        JOB,
        "GpuGate.IsReleasedByAnAbandonedStep",
    ),
    Mutant(
        "failing what waits at the gate for a worker that dies",
        TEAM,
        "    if (!status.ok()) {\n      // It is launched nowhere",
        "    if (!status.ok() && false) {\n      // It is launched nowhere",
        JOB,
        "GpuGate.AWorkerThatDiesBeforeALaunchTakesNoOtherWithIt",
    ),
    # ---- Workers of other nodes
    Mutant(
        "answering what a lost node's worker owes",
        ATTACHED,
        "for (auto& [id, call] : unanswered) call.answered(why);",
        "",
        ATTACHED_TEST,
        "AttachedWorkerTest.ALostOneAnswersEverything",
    ),
    Mutant(
        "waiting for the end of a worker of another node that is killed",
        ATTACHED,
        "if (!over_.ok()) return;\n    over_ = why;",
        """if (!over_.ok()) return;
    over_ = why;
    for (auto& [id, call] : unanswered_) call.answered(why);""",
        ATTACHED_TEST,
        "AttachedWorkerTest.AKilledOneAnswersWhenItsNodeHasEndedIt",
    ),
    Mutant(
        "ending the worker that another one on its GPU replaces",
        ATTACHED,
        "if (other) ended.push_back",
        "if (other && false) ended.push_back",
        ATTACHED_TEST,
        "AttachedWorkerTest.AnotherOneOnTheGpuTakesItsPlace",
    ),
    Mutant(
        "releasing a worker of another node that nobody needs",
        ATTACHED,
        "entry.idle_since_ns = now_ns;",
        "entry.idle_since_ns = 0;",
        ATTACHED_TEST,
        "AttachedWorkerTest.IsReleasedWhenNobodyNeedsItForAWhile",
    ),
    Mutant(
        "keeping a worker that is connected to another node's",
        LENT,
        "if (call.has_connect()) found->second.kept = worker;",
        "",
        LENT_TEST,
        "LentWorkersTest.AConnectedWorkerStaysUntilItIsReleased",
    ),
    Mutant(
        "the look where another node's launch lies",
        LENT,
        "bucket->dtype != dtype || bucket->count != launch.count() ||",
        "bucket->dtype != dtype ||",
        LENT_TEST,
        "LentWorkersTest.WhatCannotBeRightIsRefusedAndAnswered",
    ),
    Mutant(
        "killing the worker whose communicator another node's loss has broken",
        LENT,
        "  if (!why.ok() && port != nullptr) {\n    port->Kill(why);",
        "  if (!why.ok() && port != nullptr) {",
        LENT_TEST,
        "LentWorkersTest.ABrokenCommunicatorsWorkerIsKilled",
    ),
    Mutant(
        "killing the workers that are at work for a coordinator that is lost",
        LENT,
        "    if (lent.owed > 0) {\n      port->Kill(why);",
        "    if (lent.owed > 0) {\n      static_cast<void>(why);",
        LENT_TEST,
        "LentWorkersTest.WithoutACoordinatorOnlyWhatIsAtWorkIsKilled",
    ),
    Mutant(
        "telling the coordinator of a worker that has ended",
        LENT,
        "if (ended) gone.push_back(it->first);",
        "static_cast<void>(ended);",
        LENT_TEST,
        "LentWorkersTest.AWorkerThatEndsIsToldOfOnce",
    ),
    # ---- The client
    Mutant(
        "joining the streams before the ready words",
        HANDOFF,
        "for (void* const stream : streams.subspan(1)) {",
        "for (void* const stream : streams.subspan(streams.size())) {",
        LAYOUT,
        "CudaHandoff.StreamsAreJoinedBeforeReady",
    ),
    Mutant(
        "the refusal of capturing streams",
        HANDOFF,
        "if (capture == CU_STREAM_CAPTURE_STATUS_NONE) return absl::OkStatus();",
        "if (capture >= CU_STREAM_CAPTURE_STATUS_NONE) return absl::OkStatus();",
        LAYOUT,
        "CudaHandoff.CapturingStreamsAreRefused",
    ),
    Mutant(
        "enqueueing the ready word before BucketReady is sent",
        STEPS,
        """OnDevice(handoff_->EnqueueReady(step, {bucket}, zeros, streams), step, bucket);
      !status.ok()) {
    return status;
  }
  absl::MutexLock lock(&mutex_);
""",
        """absl::OkStatus(); !status.ok()) {
    return status;
  }
  absl::MutexLock lock(&mutex_);
  SendMark(step, bucket, start);
  return OnDevice(handoff_->EnqueueReady(step, {bucket}, zeros, streams), step, bucket);
""",
        LAYOUT,
        "CudaHandoff.CapturingStreamsAreRefused",
    ),
    Mutant(
        "making a step's verdict void until it is complete",
        HANDOFF,
        "if (step != last_begun_) {",
        "if (step != last_begun_ && step == 0) {",
        LAYOUT,
        "CudaHandoff.TheVerdictIsVoidUntilTheStepIsComplete",
    ),
    Mutant(
        "the waiting stream's wait for that mark",
        HANDOFF,
        "driver_.Check(driver_.cuStreamWaitEvent(waiting, voided(step), CU_EVENT_WAIT_DEFAULT),",
        "driver_.Check(CUDA_SUCCESS,",
        LAYOUT,
        "CudaHandoff.AReleasedStreamDoesNotOvertakeTheMark",
    ),
    Mutant(
        "the trainer's stream's wait for the done words",
        HANDOFF,
        """  for (const std::size_t bucket : buckets) {
    if (auto status =
            driver_.Check(driver_.cuStreamWaitValue64(""",
        """  for (const std::size_t bucket : buckets.subspan(buckets.size())) {
    if (auto status =
            driver_.Check(driver_.cuStreamWaitValue64(""",
        JOB,
        "GpuJob.AveragesOnTheTrainersStreams",
    ),
    Mutant(
        "poison when the session ends",
        "client/src/done_wait.cc",
        "word->store(kPoison + step, std::memory_order_release);",
        "static_cast<void>(step);",
        LAYOUT,
        "CudaHandoff.TheEndOfTheSessionReleasesParkedStreamsAsVoid",
    ),
    Mutant(
        "keeping the words poisoned",
        STEPS,
        "if (on_device_ && !handoff_closed_) KeepPoisoned();",
        "",
        LAYOUT,
        "CudaHandoff.ANumberThatComesAfterThePoisonParksNobody",
    ),
    Mutant(
        "poison when the layout is destroyed",
        STEPS,
        "    KeepPoisoned();\n    handoff_closed_ = true;",
        "    handoff_closed_ = true;",
        LAYOUT,
        "CudaHandoff.DestroyingTheLayoutReleasesParkedStreams",
    ),
    Mutant(
        "the wait for the streams before the words are unregistered",
        HANDOFF,
        "if (words_ != 0 && driver_.cuCtxSynchronize() == CUDA_SUCCESS) {",
        "if (words_ != 0) {",
        LAYOUT,
        "CudaHandoff.DestroyingTheLayoutReleasesParkedStreams",
    ),
    Mutant(
        "the wait for the streams before the arena is unmapped",
        "client/src/cuda_arena.cc",
        "if (!scope.status().ok() || driver.cuCtxSynchronize() != CUDA_SUCCESS) return;",
        "if (!scope.status().ok()) return;",
        LAYOUT,
        "CudaArena.AViewKeepsTheMapping",
    ),
    Mutant(
        "the layout's context around the client's calls",
        "client/src/cuda_context.cc",
        'driver_.Check(driver_.cuCtxPushCurrent(context.context_), "cuCtxPushCurrent")',
        'context.context_ == nullptr ? absl::UnknownError("") : absl::OkStatus()',
        LAYOUT,
        "CudaHandoff.ReadyIsSeenBehindTheGradients",
    ),
    Mutant(
        "looking at a done word again that no futex announces",
        STEPS,
        "if (on_device_) slice = std::min(slice, kDeviceWordPeriod);",
        "",
        LAYOUT,
        "CudaHandoff.AWaitMayComeBeforeOrAfterTheSignal",
    ),
]


def run(mutant: Mutant, runs: int) -> str:
    """What became of it: "2 of 3", or why nothing can be said."""
    path = ROOT / mutant.path
    text = path.read_text()
    if text.count(mutant.before) != 1:
        return "does not apply"
    command = [
        "bazel",
        "test",
        mutant.target,
        f"--test_filter={mutant.test}",
        f"--runs_per_test={runs}",
        "--test_timeout=100",
        "--test_output=summary",
        "--test_summary=terse",
        "--cache_test_results=no",
    ]
    try:
        path.write_text(text.replace(mutant.before, mutant.after))
        result = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, check=False)
    finally:
        path.write_text(text)
    if result.returncode == 0:
        return f"0 of {runs}"
    if result.returncode != TESTS_FAILED:
        return "does not compile:\n" + result.stderr[-2000:]
    failed = sum(line.startswith(("FAIL: ", "TIMEOUT: ")) for line in result.stderr.splitlines())
    return f"{failed} of {runs}"


def main(arguments: List[str]) -> int:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--runs", type=int, default=3)
    parser.add_argument("words", nargs="*", metavar="WORD")
    options = parser.parse_args(arguments)
    noticed = True
    for mutant in MUTANTS:
        if not all(word in mutant.removed for word in options.words):
            continue
        outcome = run(mutant, options.runs)
        print(f"| {mutant.removed} | `{mutant.test}` | {outcome} |", flush=True)
        noticed = noticed and outcome[0] in "123456789"
    return 0 if noticed else 1


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
