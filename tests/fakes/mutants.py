#!/usr/bin/env python3
"""Removes waits and polls from the product, one at a time, and reports which tests notice.

    tests/fakes/mutants.py [--runs N] [WORD ...]   mutants whose description has every WORD, or all
    tests/fakes/mutants.py --check [WORD ...]      checks only that they apply and have their tests

A mutant replaces a text in one file. This tool changes the working tree, runs the mutant's test N
times (3), and restores the file. It prints a line of a table per mutant, with the number of runs
that failed. Exit status: 0 if a test noticed each mutant at least once; 1 if one went unnoticed,
does not apply or does not compile; 2 for wrong usage.
"""

import argparse
import pathlib
import re
import subprocess
import sys
from typing import List, NamedTuple, Optional

ROOT = pathlib.Path(__file__).resolve().parents[2]
TESTS_FAILED = 3  # bazel's exit status

QUEUE = "daemon/worker/cuda_launch_queue.cc"
WORKER = "daemon/worker/cuda_worker.cc"
COMMUNICATOR = "daemon/worker/cuda_communicator.cc"
STAGING = "daemon/worker/cuda_staging.cc"
SCHEDULER = "daemon/worker/nccl_launch_scheduler.cc"
READY_WAITS = "daemon/worker/cuda_ready_waits.cc"
REMOTE_WORKER = "daemon/peer/remote_worker.cc"
PROXY_SERVER = "daemon/peer/worker_proxy_server.cc"
HANDOFF = "client/src/cuda_handoff.cc"
DONE_WORDS = "client/src/done_words.cc"
DEVICE_STEPS = "client/src/device_steps.cc"


class Mutant(NamedTuple):
    removed: str
    path: str
    before: str
    after: str
    test: str


MUTANTS = [
    # ---- The worker
    Mutant(
        "reading the ready words before anything is enqueued",
        "daemon/arena/cuda_semaphore_page.cc",
        "return SemaphoreReleased(semaphore->ready.load(std::memory_order_acquire), step);",
        "return SemaphoreReleased(semaphore->ready.load(), step) || true;",
        "CudaLaunch.EnqueuesNothingBeforeEveryReadyWord",
    ),
    Mutant(
        "the write-back's wait for the sum",
        QUEUE,
        "if (status.ok()) status = driver_->cuStreamWaitEvent(stream, summed, 0);",
        "static_cast<void>(summed);",
        "NcclLaunch.AveragesOverTheTrainersOfEveryGpu",
    ),
    Mutant(
        "the collective's wait for the combine",
        QUEUE,
        "const absl::Status status = driver_->cuStreamWaitEvent(stream, one.piece->combined, 0);",
        "const absl::Status status;",
        "NcclLaunch.AveragesOverTheTrainersOfEveryGpu",
    ),
    Mutant(
        "polling until the all-reduce is on its stream, before the write-back and the next one",
        QUEUE,
        "while (settled.ok() && *settled && !combined_.empty()) {",
        "while (settled.ok() && !combined_.empty()) {",
        "NcclLaunch.AveragesOverTheTrainersOfEveryGpu",
    ),
    Mutant(
        "adding up the next bucket while NCCL has the last one",
        QUEUE,
        "while (status.ok() && !paused_ && !waiting_.empty() &&",
        "while (status.ok() && !paused_ && !summing_ && !waiting_.empty() &&",
        "NcclLaunch.CombinesNextBucketsWhileNcclSettles",
    ),
    Mutant(
        "the order of a bucket's done words behind its average",
        QUEUE,
        "CUstream stream = context_->write_back_stream();\n  for (",
        "CUstream stream = context_->memory_stream();\n  for (",
        "CudaLaunch.AveragesOverTheTrainersOfAGpu",
    ),
    Mutant(
        "writing the verdict with the last bucket alone",
        QUEUE,
        "  if (one.last) {\n    output.verdict",
        "  if (one.last || true) {\n    output.verdict",
        "CudaLaunch.VerdictComesWithTheLastBucket",
    ),
    Mutant(
        "adding up one GPU's ranks without staging",
        QUEUE,
        "return communicator_ == nullptr &&\n",
        "return communicator_ == nullptr && false &&\n",
        "CudaLaunch.OneGpuMovesNoByteThroughStaging",
    ),
    Mutant(
        "staging where the sum is rounded twice",
        "daemon/reduce/cuda_combine.cc",
        "return !rounds_twice && ",
        "return (!rounds_twice || true) && ",
        "CudaLaunch.StagesFloatsInSixteenBits",
    ),
    Mutant(
        "looking less often the longer it takes",
        "daemon/worker/poll_pace.h",
        "return std::clamp((now_ns - since_ns_) / 16, kLeastNs, kMostNs);",
        "return std::clamp((now_ns - since_ns_) / 16 * 0, kLeastNs, kMostNs);",
        "NcclLaunch.WorkerLooksLessOftenDuringALongWait",
    ),
    Mutant(
        "keeping a step void to its last bucket",
        QUEUE,
        "layout.is_void = layout.is_void || launch.void_contributions > 0;",
        "layout.is_void = launch.void_contributions > 0;",
        "CudaLaunch.VoidStepStaysVoidToItsLastBucket",
    ),
    Mutant(
        "the wait for the write-back before a launch is over",
        QUEUE,
        """    if (result == CUDA_ERROR_NOT_READY) break;
    if (result != CUDA_SUCCESS) return driver_->StatusOf(result, "cuEventQuery");
""",
        "    static_cast<void>(result);\n",
        "CudaLaunch.AveragesOverTheTrainersOfAGpu",
    ),
    Mutant(
        "the same before staging is used again",
        QUEUE,
        "  absl::Status status = in_place ? Average(next) : Combine(next);\n",
        """  next.piece->free = true;
  absl::Status status = in_place ? Average(next) : Combine(next);
""",
        "NcclLaunch.AveragesOverTheTrainersOfEveryGpu",
    ),
    Mutant(
        "releasing the launches of a step that is given up",
        QUEUE,
        "if (launch.layout != layout || launch.step != step) continue;",
        "if (launch.layout != layout || launch.step <= step) continue;",
        "CudaBadInput.MissingReadyWordVoidsTheStep",
    ),
    Mutant(
        "releasing the launches of a rank that is lost",
        QUEUE,
        "[&](const auto& other) { return other.get() == rank; });\n    launch.void",
        "[&](const auto& other) { return other.get() == rank && false; });\n    launch.void",
        "CudaLaunch.LostRankMakesTheStepVoid",
    ),
    Mutant(
        "the limit of what is on the GPU",
        QUEUE,
        "return status.ok() ? CheckDeadline() : status;",
        "return status;",
        "NcclLaunch.WorkerEndsAfterTheLossOfARankInAnAllReduce",
    ),
    Mutant(
        "the current context of the issuing thread",
        "daemon/worker/cuda_context.cc",
        "  status = driver_->cuCtxSetCurrent(primary);\n",
        "",
        "CudaStart.OpensTheGpuOfAUuidAndLoadsEveryKernel",
    ),
    Mutant(
        "loading every kernel before there are collectives",
        "daemon/reduce/cuda_combine.cc",
        "    if (status.ok()) status = driver_->cuFuncLoad(*kernel);\n",
        "",
        "CudaStart.OpensTheGpuOfAUuidAndLoadsEveryKernel",
    ),
    Mutant(
        "the kernels that are for the type of staging",
        "daemon/reduce/cuda_combine.cc",
        "  return kernels_[static_cast<std::size_t>(dtype)][static_cast<std::size_t>(staging)];\n",
        """  static_cast<void>(staging);
  return kernels_[static_cast<std::size_t>(dtype)][static_cast<std::size_t>(dtype)];
""",
        "NcclLaunch.SumsFloatsInSixteenBits",
    ),
    Mutant(
        "the wait for a new arena's zeros",
        "daemon/arena/cuda_arena.cc",
        "return status.ok() ? driver_->cuStreamSynchronize(stream) : status;",
        "return status;",
        "CudaLaunch.ArenaIsZeroedBeforeTheTrainerGetsIt",
    ),
    Mutant(
        "the wait for what is on the GPU before staging grows",
        WORKER,
        "if (launches_ != nullptr && !launches_->at_rest() &&",
        "if (launches_ != nullptr && !launches_->at_rest() && false &&",
        "NcclLaunch.StagingGrowsOnlyBetweenBuckets",
    ),
    Mutant(
        "holding buckets back while the worker connects",
        WORKER,
        "launches_->SetPaused(communicator_->connecting() ||",
        "launches_->SetPaused(",
        "NcclLaunch.NoLaunchBeginsWhileConnecting",
    ),
    Mutant(
        "finishing what is on the GPU at Stop",
        WORKER,
        "while (launches_ != nullptr && !launches_->at_rest()) {",
        "while (launches_ != nullptr && !launches_->at_rest() && false) {",
        "CudaLaunch.StopFinishesLaunchesOnTheGpu",
    ),
    Mutant(
        "deregistering staging before it is freed",
        COMMUNICATOR,
        "absl::Status registered = communicator_->Deregister();",
        "absl::Status registered;",
        "NcclLaunch.StagingGrowsWhileConnected",
    ),
    Mutant(
        "pieces of staging that are as far apart on every GPU",
        STAGING,
        "piece.address = memory_ + next_ * stride_;",
        "piece.address = memory_ + next_ * piece_bytes_;",
        "NcclLaunch.BucketsLieAtTheSameOffsetOnEveryGpu",
    ),
    Mutant(
        "beginning with the first piece on every GPU",
        QUEUE,
        "  staging_->Restart();\n",
        "",
        "NcclLaunch.BucketsLieAtTheSameOffsetOnEveryGpu",
    ),
    Mutant(
        "the wait for the other pieces before they are farther apart",
        STAGING,
        "(AllFree() || (Aligned(bytes) <= stride_ && pieces_[next_].free))",
        "pieces_[next_].free",
        "NcclLaunch.BucketsLieAtTheSameOffsetOnEveryGpu",
    ),
    Mutant(
        "having NCCL connect before the first all-reduce",
        "daemon/engine/nccl_communicator.cc",
        '  setenv("NCCL_RUNTIME_CONNECT", "0", /*overwrite=*/0);\n',
        "",
        "NcclLaunch.ReportsTheMemoryThatNcclTakes",
    ),
    Mutant(
        "flagging every communicator before one is freed",
        "daemon/engine/nccl_communicator.cc",
        "  nccl->ncclGroupStart();\n",
        "  static_cast<void>(nccl->ncclGroupStart);\n",
        "NcclCommunicator.AbortFlagsAllBeforeItFreesAny",
    ),
    # ---- The daemon
    Mutant(
        "keeping the driver out of the daemon",
        "daemon/app/daemon.cc",
        "  r.workers->Probe(LogGpus);",
        """  void* open_library(const char*, int) __asm__("dlopen");
  open_library(r.options.cuda_library.c_str(), 2);
  r.workers->Probe(LogGpus);""",
        "CudaDeath.TrainerDiesWithKernelsThatNeverEnd",
    ),
    Mutant(
        "remembering that a step was given up, when a launch of it comes later",
        SCHEDULER,
        "given_up_[step.layout] = step.step;",
        "",
        "NcclLaunchScheduler.LaunchOfAGivenUpStepIsVoidAtOnce",
    ),
    Mutant(
        "rounding for the wire only where there is one",
        SCHEDULER,
        "IsOfOneGpu(*operation)",
        "!IsOfOneGpu(*operation) && false",
        "WireType.OneGpuRoundsNothing",
    ),
    Mutant(
        "ending the workers that wait for one that has failed",
        SCHEDULER,
        "if (other != nullptr) kills_.push_back({std::move(other), reply.status()});",
        "",
        "CudaDeath.WorkersDeathEndsTheOtherGpusWorker",
    ),
    # ---- The gate
    Mutant(
        "reading the ready words before AwaitReady is answered",
        READY_WAITS,
        "if (!AllReady(wait.ranks, wait.bucket, wait.step)) return false;",
        "static_cast<void>(AllReady);",
        "CudaLaunch.AwaitReadyEnqueuesNothing",
    ),
    Mutant(
        "ending the waits for a step that is given up",
        READY_WAITS,
        "if (wait.layout == layout && wait.step == step) wait.ranks.clear();",
        "if (wait.layout == layout && wait.step > step) wait.ranks.clear();",
        "CudaLaunch.AwaitReadyEndsForALostRankOrAGivenUpStep",
    ),
    Mutant(
        "ending the waits for a rank that is lost",
        READY_WAITS,
        "[&](const auto& other) { return other.get() == rank; }),",
        "[&](const auto& other) { return other.get() == rank && false; }),",
        "CudaLaunch.AwaitReadyEndsForALostRankOrAGivenUpStep",
    ),
    Mutant(
        "asking every GPU before a launch",
        SCHEDULER,
        "for (const auto& pending : pending_) AskLocked(pending);",
        "",
        "GpuGate.AutoIsAllNodesWithoutMps",
    ),
    Mutant(
        "the wait for all of their answers",
        SCHEDULER,
        "while (!pending_.empty() && pending_.front()->left == 0) {",
        "while (!pending_.empty()) {",
        "GpuGate.AutoIsAllNodesWithoutMps",
    ),
    Mutant(
        "closing the gate for GPUs without MPS",
        SCHEDULER,
        "time_sliced_ = time_sliced_ || !reply->message.connected().mps();",
        "",
        "GpuGate.AutoIsAllNodesWithoutMps",
    ),
    Mutant(
        "dropping what waits at the gate when its step is given up",
        SCHEDULER,
        "if (operation->device().layout != step.layout || operation->number != step.step) {",
        "if (operation->device().layout != step.layout || operation->number <= step.step) {",
        "GpuGate.AbandonedStepIsLaunchedNowhere",
    ),
    Mutant(
        "failing what waits at the gate for a worker that dies",
        SCHEDULER,
        "    if (!status.ok()) {\n      // The bucket is launched nowhere",
        "    if (!status.ok() && false) {\n      // The bucket is launched nowhere",
        "GpuGate.WorkerThatDiesBeforeALaunchEndsNoOtherWorker",
    ),
    # ---- Workers of other nodes
    Mutant(
        "answering what a lost node's worker owes",
        REMOTE_WORKER,
        "for (auto& [id, call] : unanswered) call.answered(why);",
        "",
        "RemoteWorkerTest.LossAnswersEveryOpenCall",
    ),
    Mutant(
        "waiting for the end of a worker of another node that is killed",
        REMOTE_WORKER,
        "if (!end_.ok()) return;\n    end_ = why;",
        """if (!end_.ok()) return;
    end_ = why;
    for (auto& [id, call] : unanswered_) call.answered(why);""",
        "RemoteWorkerTest.CallsOfAKilledWorkerAreAnsweredWhenItHasEnded",
    ),
    Mutant(
        "ending the worker that another one on its GPU replaces",
        REMOTE_WORKER,
        "if (other) ended.push_back",
        "if (other && false) ended.push_back",
        "RemoteWorkerTest.NewWorkerOnAGpuReplacesTheOld",
    ),
    Mutant(
        "releasing a worker of another node that nobody needs",
        REMOTE_WORKER,
        "entry.idle_since_ns = now_ns;",
        "entry.idle_since_ns = 0;",
        "RemoteWorkerTest.UnusedWorkerIsReleasedAfterTheIdleLimit",
    ),
    Mutant(
        "keeping a worker that is connected to another node's",
        PROXY_SERVER,
        "if (call.has_connect()) found->second.kept = worker;",
        "",
        "WorkerProxyServerTest.ConnectedWorkerIsKeptUntilReleased",
    ),
    Mutant(
        "checking where another node's launch lies",
        PROXY_SERVER,
        "bucket->dtype != dtype || bucket->count != launch->count() ||",
        "bucket->dtype != dtype ||",
        "WorkerProxyServerTest.MalformedCallsAreRefusedAndAnswered",
    ),
    Mutant(
        "killing the worker whose communicator another node's loss has broken",
        PROXY_SERVER,
        "  if (!why.ok() && port != nullptr) {\n    port->Kill(why);",
        "  if (!why.ok() && port != nullptr) {",
        "WorkerProxyServerTest.ReleaseWithAnErrorKillsTheWorker",
    ),
    Mutant(
        "killing the busy workers of a lost coordinator",
        PROXY_SERVER,
        "    if (entry.owed > 0) {\n      port->Kill(why);",
        "    if (entry.owed > 0) {\n      static_cast<void>(why);",
        "WorkerProxyServerTest.LossOfTheCoordinatorKillsBusyWorkersOnly",
    ),
    Mutant(
        "telling the coordinator that a worker has ended",
        PROXY_SERVER,
        "if (has_ended) ended.push_back(it->first);",
        "static_cast<void>(has_ended);",
        "WorkerProxyServerTest.EndedWorkerIsReportedOnce",
    ),
    # ---- The client
    Mutant(
        "joining the streams before the ready words",
        HANDOFF,
        "for (void* const stream : streams.subspan(1)) {",
        "for (void* const stream : streams.subspan(streams.size())) {",
        "CudaHandoff.StreamsAreJoinedBeforeReady",
    ),
    Mutant(
        "the refusal of capturing streams",
        HANDOFF,
        "if (capture == CU_STREAM_CAPTURE_STATUS_NONE) return absl::OkStatus();",
        "if (capture >= CU_STREAM_CAPTURE_STATUS_NONE) return absl::OkStatus();",
        "CudaHandoff.CapturingStreamsAreRefused",
    ),
    Mutant(
        "enqueueing the ready word before BucketReady is sent",
        DEVICE_STEPS,
        """  auto status = handoff_->EnqueueReady(step, {bucket}, zeros, streams);
  if (!status.ok()) return steps_->errors().With(status, step, bucket);
""",
        """  steps_->CommitMark(step, bucket, start).IgnoreError();
  auto status = handoff_->EnqueueReady(step, {bucket}, zeros, streams);
  if (!status.ok()) return steps_->errors().With(status, step, bucket);
  return absl::OkStatus();
""",
        "CudaHandoff.CapturingStreamsAreRefused",
    ),
    Mutant(
        "making a step's verdict void until it is complete",
        HANDOFF,
        "if (step != last_begun_) {",
        "if (step != last_begun_ && step == 0) {",
        "CudaHandoff.VerdictIsVoidUntilTheStepIsComplete",
    ),
    Mutant(
        "the waiting stream's wait for that mark",
        HANDOFF,
        "driver_.Check(driver_.cuStreamWaitEvent(waiting, voided(step), CU_EVENT_WAIT_DEFAULT),",
        "driver_.Check(CUDA_SUCCESS,",
        "CudaHandoff.ReleasedStreamDoesNotOvertakeTheMark",
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
        "GpuJob.AveragesOnTheTrainersStreams",
    ),
    Mutant(
        "poison when the session ends",
        "client/src/done_wait.cc",
        "word->store(kPoison + step, std::memory_order_release);",
        "static_cast<void>(step);",
        "CudaHandoff.SessionEndReleasesStreamsAsVoid",
    ),
    Mutant(
        "keeping the words poisoned",
        DONE_WORDS,
        "if (on_device_) KeepPoisoned(step);",
        "",
        "CudaHandoff.StepNumberAfterPoisonParksNoStream",
    ),
    Mutant(
        "poison when the layout is destroyed",
        DEVICE_STEPS,
        "steps_->BeginRelease();",
        "",
        "CudaHandoff.DestructorReleasesParkedStreams",
    ),
    Mutant(
        "the wait for the streams before the words are unregistered",
        HANDOFF,
        "if (words_ != 0 && driver_.cuCtxSynchronize() == CUDA_SUCCESS) {",
        "if (words_ != 0) {",
        "CudaHandoff.DestructorReleasesParkedStreams",
    ),
    Mutant(
        "the wait for the streams before the arena is unmapped",
        "client/src/cuda_arena.cc",
        "if (!scope.status().ok() || driver.cuCtxSynchronize() != CUDA_SUCCESS) return;",
        "if (!scope.status().ok()) return;",
        "CudaArena.ViewKeepsTheMapping",
    ),
    Mutant(
        "the layout's context around the client's calls",
        "client/src/cuda_context.cc",
        'driver_.Check(driver_.cuCtxPushCurrent(context.context_), "cuCtxPushCurrent")',
        'context.context_ == nullptr ? absl::UnknownError("") : absl::OkStatus()',
        "CudaHandoff.ReadyFollowsTheGradients",
    ),
    Mutant(
        "polling a done word that no futex announces",
        DONE_WORDS,
        "if (on_device_) slice = std::min(slice, kDeviceWordPeriod);",
        "",
        "CudaHandoff.WaitMayComeBeforeOrAfterTheSignal",
    ),
]


def target_of(test: str) -> Optional[str]:
    """The target that has a test, given as SUITE.TEST; None if there is no such test."""
    suite, name = test.split(".")
    definition = re.compile(rf"TEST(_[A-Z]+)?\(\s*{suite},\s*{name}\b")
    for source in (ROOT / "tests").glob("*/*_test.cc"):
        if definition.search(source.read_text()):
            return f"//tests/{source.parent.name}:{source.stem}"
    return None


def check(mutant: Mutant) -> str:
    """Returns "applies", or why the mutant cannot run."""
    count = (ROOT / mutant.path).read_text().count(mutant.before)
    if count != 1:
        return f"its text occurs {count} times in {mutant.path}"
    if target_of(mutant.test) is None:
        return f"there is no test {mutant.test}"
    return "applies"


def run(mutant: Mutant, runs: int) -> str:
    """Returns how many of the runs noticed the mutant: "2 of 3"; or why it could not run."""
    path = ROOT / mutant.path
    text = path.read_text()
    if text.count(mutant.before) != 1:
        return "does not apply"
    command = [
        "bazel",
        "test",
        target_of(mutant.test),
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
    parser.add_argument("--check", action="store_true")
    parser.add_argument("--runs", type=int, default=3)
    parser.add_argument("words", nargs="*", metavar="WORD")
    options = parser.parse_args(arguments)
    noticed = True
    for mutant in MUTANTS:
        if not all(word in mutant.removed for word in options.words):
            continue
        outcome = check(mutant) if options.check else run(mutant, options.runs)
        print(f"| {mutant.removed} | `{mutant.test}` | {outcome} |", flush=True)
        noticed = noticed and (outcome == "applies" or outcome[0] in "123456789")
    return 0 if noticed else 1


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
