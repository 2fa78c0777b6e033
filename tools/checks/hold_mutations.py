"""Undoes one line of policy `hold` after the other, and checks that a test fails each time.

    .venv/bin/python tools/checks/hold_mutations.py [WORD...]

Runs in a copy of the committed tree and takes an hour. First runs the tests on the tree as
it is: they must pass. With words, only the mutations whose names contain one of them. Prints a
table. Exit status: 0 every mutation made a test fail, 1 some mutation did not, or its line is not
in the tree, or there more than once.
"""

import subprocess
import sys
import tempfile
from pathlib import Path
from typing import NamedTuple

TESTS = (
    "hold_model_test",
    "hold_test",
    "position_test",
    "running_step_test",
    "state_healing_test",
)
JOB = "daemon/job/"


class Mutation(NamedTuple):
    name: str
    file: str
    line: str
    instead: str = ""


MUTATIONS = (
    Mutation(
        "calls of a lost session count",
        "job.cc",
        " ||\n         member.incarnation != session.incarnation;",
        ";",
    ),
    Mutation(
        "a rank whose process lives is held",
        "hold_policy.cc",
        "if (!harmless && DetailsOf(why).reason != reason::kProcessEnded.text()) {",
        "if (!harmless && why.ok()) {",
    ),
    Mutation(
        "a lost session is lost again",
        "job.cc",
        "if (member.incarnation != session.incarnation || member.sink == nullptr) return;",
        "if (member.sink == nullptr) return;",
    ),
    Mutation(
        "a held rank is not in steps",
        "membership.h",
        "state == RankState::kLive || state == RankState::kHeld || state == RankState::kLoading ||",
        "state == RankState::kLive || state == RankState::kLoading ||",
    ),
    Mutation(
        "marks are not taken back",
        "running_step.cc",
        "  if (ranks_[rank].ended) return;\n",
        "  return;\n",
    ),
    Mutation(
        "marks of a rank that ended are taken back",
        "running_step.cc",
        "  if (ranks_[rank].ended) return;\n",
    ),
    Mutation(
        "marks of submitted buckets are taken back",
        "running_step.cc",
        "if (!Waiting(bucket) || Ready(bucket, rank) == 0) continue;",
        "if (Ready(bucket, rank) == 0) continue;",
    ),
    Mutation(
        "a lost session's marks stay the rank's",
        "running_step.cc",
        "  ranks_[rank].marked.assign(buckets_.size(), false);\n",
    ),
    Mutation(
        "a mark takes over a submitted bucket",
        "running_step.cc",
        "  if (ready != 0) return;\n  ready = session.incarnation;\n"
        "  ++buckets_[bucket].ready_ranks;",
        "  if (ready == 0) ++buckets_[bucket].ready_ranks;\n  ready = session.incarnation;",
    ),
    Mutation(
        "an average comes before the mark",
        "running_step.cc",
        "rank.incarnation == session.incarnation && rank.marked[bucket] &&",
        "rank.incarnation == session.incarnation &&",
    ),
    Mutation(
        "a lost session's mark asks for an average",
        "running_step.cc",
        "rank.incarnation == session.incarnation && rank.marked[bucket] &&",
        "rank.marked[bucket] &&",
    ),
    Mutation(
        "a copy does not keep the step open",
        "running_step.h",
        "void CopyBegun() { ++in_flight_; }\n  void CopyDone() { --in_flight_; }",
        "void CopyBegun() {}\n  void CopyDone() {}",
    ),
    Mutation(
        "a bucket is bound to the present session",
        "bucket_reductions.cc",
        "*agreement_.memory({rank, step.ReadySession(index, rank)})",
        "*(agreement_.memory(rank) != nullptr\n             ? agreement_.memory(rank)\n"
        "             : agreement_.memory({rank, step.ReadySession(index, rank)}))",
    ),
    Mutation(
        "lost memory is released at once",
        "layout_channel.cc",
        "return Touches(session) ||\n               std::find(",
        "return std::find(",
    ),
    Mutation(
        "an average goes with its last contributor",
        "layout_channel.cc",
        "return Touches(session) ||\n"
        "               std::find(sources.begin(), sources.end(), session) != sources.end();",
        "return Touches(session);",
    ),
    Mutation(
        "an average comes from a lost session",
        "layout_channel.cc",
        "    if (members_->MayMark(rank) && "
        "session.incarnation == (*members_)[rank].incarnation) break;\n",
    ),
    Mutation(
        "lost memory is never released",
        "layout_channel.cc",
        "  // No bucket is bound to it: losses and reductions have seen to that.\n"
        "  agreement_.ReleaseLostMemory([](RankSession) { return false; }, actions);\n",
    ),
    Mutation(
        "done words of a lost session are written",
        "layout_agreement.cc",
        "  if (mine.memory->semaphores != nullptr) mine.memory->semaphores->Close();\n",
    ),
    Mutation(
        "memory is found by its rank alone",
        "layout_agreement.cc",
        "if (mine.memory.has_value() && mine.incarnation == session.incarnation) return",
        "if (mine.memory.has_value()) return",
    ),
    Mutation(
        "no average of a reduced bucket",
        "layout_channel.cc",
        "    if (step_.Reduced(index)) CopyAverage(index, rank, actions);\n",
    ),
    Mutation(
        "no average of a bucket that was in flight",
        "layout_channel.cc",
        "      CopyAverage(index, rank, actions);\n    } else if",
        "    } else if",
    ),
    Mutation(
        "an average is copied before there is one",
        "layout_channel.cc",
        "    if (step_.Reduced(index)) CopyAverage(index, rank, actions);\n",
        "    CopyAverage(index, rank, actions);\n",
    ),
    Mutation(
        "a copied average is not signalled",
        "layout_channel.cc",
        "    memory->semaphores->SignalDone(copy->bucket, step());\n",
    ),
    Mutation(
        "a copied average is not measured",
        "layout_channel.cc",
        "if (running && copy->check.measure && copy->state == AverageCopy::State::kCopying) {",
        "if (false) {",
    ),
    Mutation(
        "an average that a trainer has changed counts",
        "layout_channel.cc",
        "if (running && copy->check.measure &&\n      !Equal",
        "if (false && !Equal",
    ),
    Mutation(
        "the next session gets the lost one's verdict",
        "layout_channel.cc",
        "if (tell && !began_later) members",
        "if (tell) members",
    ),
    Mutation(
        "a session has a step before it has memory",
        "layout_channel.cc",
        "  first_step_[rank] = kNoStep;\n",
    ),
    Mutation(
        "the next session begins with an ended step",
        "layout_channel.cc",
        "step() + (step_.Ended(rank) ? 1 : 0);",
        "step();",
    ),
    Mutation(
        "the lost session's step heals the next one",
        "layout_channel.cc",
        "if (complete && step_.Ended(rank) && !began_later) members_->Stepped(rank);",
        "if (complete && step_.Ended(rank)) members_->Stepped(rank);",
    ),
    Mutation(
        "a rank never heals",
        "layout_set.cc",
        "    members_->Heal(rank);\n",
    ),
    Mutation(
        "the deadline passes",
        "layout_channel.cc",
        "  if (!step_.Ended(rank)) step_.Suspend(now_ns);\n",
        "  (void)now_ns;\n",
    ),
    Mutation(
        "the deadline of a step that begins later passes",
        "layout_channel.cc",
        "  if (members_->AnyIsMissing()) step_.Suspend(now_ns);\n",
    ),
    Mutation(
        "the deadline does not go on",
        "job.cc",
        "    layouts_.ResumeDeadlines(environment_.clock->NowNs());\n",
    ),
    Mutation(
        "the last rank with the state is held",
        "hold_policy.cc",
        'return "no other rank has the state of the model";',
        'return "";',
    ),
    Mutation(
        "hold_timeout runs while nobody waits",
        "hold_policy.cc",
        "if (!leaver_waits && !layouts_.RankWaits()) {",
        "if (!leaver_waits && members_.Count(RankState::kHeld) == 0) {",
    ),
    Mutation(
        "hold_timeout forgets the waits before",
        "hold_policy.cc",
        "wait_.waited_ns += now_ns - *wait_.since_ns;",
        "(void)now_ns;",
    ),
    Mutation(
        "hold_timeout goes on after a verdict",
        "hold_policy.cc",
        "if (all_live || decided != wait_.steps_decided)",
        "if (all_live)",
    ),
    Mutation(
        "hold_timeout ends at a join",
        "layout_channel.cc",
        "(state == RankState::kHealing && first_step_[rank] == kNoStep);",
        "false;",
    ),
    Mutation(
        "hold_timeout does not run for ranks that leave",
        "hold_policy.cc",
        "members_.AnyIsMissing() && members_.AnyIsLeaving();",
        "false;",
    ),
    Mutation(
        "a rank heals before it has every layout",
        "layout_channel.cc",
        "return first_step_[rank] <= step() && !HasGradientsOfEarlier(rank);",
        "return !HasGradientsOfEarlier(rank);",
    ),
    Mutation(
        "a rank heals while a step has its lost gradients",
        "layout_channel.cc",
        "return first_step_[rank] <= step() && !HasGradientsOfEarlier(rank);",
        "return first_step_[rank] <= step();",
    ),
    Mutation(
        "a rank heals only with a layout that it had released",
        "layout_channel.cc",
        "  if (released_[rank]) return !step_.Has(rank);\n",
    ),
    Mutation(
        "a rank heals before its step is complete",
        "layout_set.cc",
        "member.state != RankState::kHealing || !member.stepped",
        "member.state != RankState::kHealing",
    ),
    Mutation(
        "lost memory stays when its bucket is reduced",
        "running_step.cc",
        "    if (Reduced(bucket)) continue;\n",
    ),
    Mutation(
        "lost memory goes while it is copied from",
        "layout_channel.cc",
        "(copy->state == AverageCopy::State::kCopying && copy->from == session);",
        "false;",
    ),
    Mutation(
        "a bucket keeps lost memory for the next step",
        "layout_channel.cc",
        "  // Buckets that were bound before must not refer to this memory in the next step.\n"
        "  reductions_.Rebind();\n",
    ),
    Mutation(
        "a rank stays while another one is lost",
        "job.cc",
        "  if (!exit) StopIf(hold_.StaysDuringLoss(rank), actions);\n",
    ),
    Mutation(
        "a rank leaves before the others",
        "job.cc",
        "  if (hold_.LeaversWait()) return;\n",
    ),
    Mutation(
        "a rank that cannot be replaced is waited for",
        "hold_policy.cc",
        " && members_.Formed() && layouts_.WhyNoReplacement().empty();",
        ";",
    ),
    Mutation(
        "a leaving rank that dies is lost",
        "job.cc",
        "  if (members_.IsLeaving(session.rank)) {\n",
        "  if (false) {\n",
    ),
    Mutation(
        "a leaving rank leaves twice",
        "rank_rules.cc",
        "members_.IsLeaving(rank) || (members_[rank].state",
        "(members_[rank].state",
    ),
    Mutation(
        "a leaving rank gets the job's failure",
        "job.cc",
        "    if (members_.IsLeaving(rank)) status = absl::OkStatus();\n",
    ),
    Mutation(
        "a leaving rank has the averages of a step",
        "hold_policy.cc",
        "if (!members_.IsLeaving(rank) || layouts_.StepRunning()) return false;",
        "if (!members_.IsLeaving(rank)) return false;",
    ),
    Mutation(
        "a replacement leaves with its lost gradients",
        "rank_rules.cc",
        "(!exit || layouts_.HasGradientsOfEarlier(rank))",
        "!exit",
    ),
    Mutation(
        "a replacement cannot leave without a step",
        "rank_rules.cc",
        "(!exit || layouts_.HasGradientsOfEarlier(rank))",
        "(!exit || exit)",
    ),
    Mutation(
        "a session registers its layout twice",
        "layout_agreement.cc",
        "  ranks_[rank].registered = true;\n  request.spec = LayoutSpec{};\n"
        "  ranks_[rank].request = std::move(request);\n  return absl::OkStatus();\n}\n\n"
        "void",
        "  request.spec = LayoutSpec{};\n  ranks_[rank].request = std::move(request);\n"
        "  return absl::OkStatus();\n}\n\nvoid",
    ),
    Mutation(
        "the next session hears of a lost one's operation",
        "operation_channel.cc",
        "    if (!ranks_[rank].waiting || ranks_[rank].excused) continue;\n"
        "    members_->Send(rank, OperationDoneMessage",
        "    if (!ranks_[rank].waiting) continue;\n    members_->Send(rank, OperationDoneMessage",
    ),
    Mutation(
        "an operation waits for a held rank",
        "operation_channel.cc",
        "      ranks_[other].excused = IsRecovering((*members_)[other].state);\n",
    ),
    Mutation(
        "an operation in progress waits for a lost rank",
        "operation_channel.cc",
        "  mine.excused = true;\n",
    ),
    Mutation(
        "a sum is finished without a lost rank",
        "operation_channel.cc",
        "if (state_ == State::kIdle || ranks_[rank].excused || DoesWithout(rank, spec_)) "
        'return "";',
        'if (rank < ranks_.size()) return "";',
    ),
    Mutation(
        "a whole sum is given up",
        "operation_channel.cc",
        '  if (state_ == State::kMoving && spec_.kind == OperationKind::kAllReduce) return "";\n',
    ),
    Mutation(
        "the next session repeats old operations",
        "operation_channel.h",
        "ranks_[rank].sequence = sequence_;",
        "(void)rank;",
    ),
    # ---- A rank that loads the state of the model
    Mutation(
        "a replacement needs no state",
        "job.cc",
        "/*loads=*/terms_.options.HealsFromSurvivors()",
        "/*loads=*/false",
    ),
    Mutation(
        "a rank that loads is not in steps",
        "membership.h",
        "state == RankState::kHeld || state == RankState::kLoading ||\n",
        "state == RankState::kHeld ||\n",
    ),
    Mutation(
        "a rank that loads marks buckets",
        "membership.h",
        "return state == RankState::kLive || state == RankState::kHealing;",
        "return state == RankState::kLive || CameBack(state);",
    ),
    Mutation(
        "a rank that loads begins an agreement",
        "layout_set.cc",
        "if (CameBack((*members_)[rank].state)) return Rejoin(rank, std::move(request));",
        "if ((*members_)[rank].state == RankState::kHealing) {\n"
        "    return Rejoin(rank, std::move(request));\n  }",
    ),
    Mutation(
        "layouts are agreed while a rank loads",
        "layout_set.cc",
        "if (!IsRecovering((*members_)[rank].state)) continue;",
        "if ((*members_)[rank].state != RankState::kHeld &&\n"
        "        (*members_)[rank].state != RankState::kHealing) {\n      continue;\n    }",
    ),
    Mutation(
        "a rank that loads leaves",
        "rank_rules.cc",
        "  if (members_[rank].state == RankState::kLoading) {\n",
        "  if (false) {\n",
    ),
    Mutation(
        "a rank that loads is held only after its process",
        "hold_policy.cc",
        "harmless = members_[rank].state == RankState::kLoading;",
        "harmless = false;",
    ),
    Mutation(
        "the deadline passes while a rank loads",
        "job.cc",
        "comes_back && !members_.AnyIsMissing()",
        "comes_back && members_.Count(RankState::kHeld) == 0",
    ),
    Mutation(
        "the deadline does not go on after an admission",
        "job.cc",
        "  if (missing && !members_.AnyIsMissing()) layouts_.ResumeDeadlines(now_ns);\n",
        "  (void)missing;\n",
    ),
    Mutation(
        "hold_timeout does not run while a rank loads",
        "layout_channel.cc",
        "IsMissing(state) || (state == RankState::kHealing",
        "state == RankState::kHeld || (state == RankState::kHealing",
    ),
    Mutation(
        "a drain waits for a rank that loads",
        "job.cc",
        "if (layouts_.StepRunning() && !members_.AnyIsMissing()) return false;",
        "if (layouts_.StepRunning() && members_.Count(RankState::kHeld) == 0) return false;",
    ),
    Mutation(
        "an admitted rank has not the state",
        "hold_policy.cc",
        "    if (terms_.options.HealsFromSurvivors() && "
        'members_[other].state == RankState::kHealing) {\n      return "";\n    }\n',
    ),
    # ---- Which ranks have the state, and do not change it
    Mutation(
        "a rank is read before it has ended the step",
        "layout_channel.cc",
        "step_.phase() == Phase::kRunning && step_.Ended(rank) &&",
        "step_.phase() == Phase::kRunning &&",
    ),
    Mutation(
        "a rank is read in a void step",
        "layout_channel.cc",
        "return step_.phase() == Phase::kRunning && step_.Ended(rank) &&",
        "return step_.begun() && step_.Ended(rank) &&",
    ),
    Mutation(
        "a rank is healed before its first step",
        "layout_channel.cc",
        "step_.Ended(rank) && !step_.Ended(replacement);",
        "step_.Ended(rank) && replacement < members_->world_size();",
    ),
    Mutation(
        "a rank is read in the middle of another layout's step",
        "layout_set.cc",
        "    if (!layout->IsFrozenFor(rank, replacement)) return false;\n    in_step = true;\n",
        "    if (layout->IsFrozenFor(rank, replacement)) in_step = true;\n",
    ),
    Mutation(
        "a rank that left before the last step is a source",
        "hold_policy.cc",
        "return !terms_.options.HealsFromSurvivors() || "
        "members_[rank].left_at == layouts_.StepsDecided();",
        "return true;",
    ),
    Mutation(
        "a rank is healed between the ends of two steps",
        "job.cc",
        "      job_->StopIf(job_->hold_.StepsOverlap(), &actions_);\n",
    ),
    # ---- Transfers
    Mutation(
        "a fetch that crosses the admission is a breach",
        "state_healing.cc",
        "  if ((*members_)[rank].state == RankState::kHealing) return absl::OkStatus();\n",
    ),
    Mutation(
        "a repeated fetch goes on with the old transfer",
        "state_healing.cc",
        "  if (transfer_.has_value() && transfer_->replacement() == session) Cancel(actions);\n"
        "  const auto",
        "  const auto",
    ),
    Mutation(
        "a repeated fetch keeps its deadline",
        "state_healing.cc",
        "    before->deadline_ns = deadline_ns;\n",
    ),
    Mutation(
        "messages of an ended transfer count",
        "state_healing.cc",
        "*current = transfer_.has_value() && transfer == transfer_->number();",
        "*current = transfer_.has_value();",
    ),
    Mutation(
        "any rank offers",
        "state_healing.cc",
        "transfer_->source().rank != rank || transfer_->phase() != StateTransfer::Phase::kOffering",
        "transfer_->phase() != StateTransfer::Phase::kOffering",
    ),
    Mutation(
        "a source offers twice",
        "state_healing.cc",
        "transfer_->source().rank != rank || transfer_->phase() != StateTransfer::Phase::kOffering",
        "transfer_->source().rank != rank",
    ),
    Mutation(
        "any rank writes",
        "state_healing.cc",
        "transfer_->source().rank != rank || transfer_->phase() != StateTransfer::Phase::kWriting",
        "transfer_->phase() != StateTransfer::Phase::kWriting",
    ),
    Mutation(
        "any chunk is written",
        "state_healing.cc",
        "kWriting ||\n      chunk != transfer_->chunk()) {",
        "kWriting) {",
    ),
    Mutation(
        "any rank reads",
        "state_healing.cc",
        "transfer_->replacement().rank != rank ||\n      transfer_->phase()",
        "transfer_->phase()",
    ),
    Mutation(
        "any chunk is read",
        "state_healing.cc",
        "kReading || chunk != transfer_->chunk()) {",
        "kReading) {",
    ),
    Mutation(
        "a chunk is not copied",
        "state_healing.cc",
        "    std::memcpy(to.data, from.data, bytes);\n",
        "    (void)bytes;\n",
    ),
    Mutation(
        "the next transfer begins in mid-copy",
        "state_healing.cc",
        "if (!transfer_.has_value() && !copying_) BeginNext",
        "if (!transfer_.has_value()) BeginNext",
    ),
    Mutation(
        "the job ends in mid-copy",
        "job.cc",
        "layouts_.in_flight() || healing_.busy();",
        "layouts_.in_flight();",
    ),
    Mutation(
        "a copy does not end",
        "state_healing.cc",
        "  copying_ = false;\n",
    ),
    Mutation(
        "a request outlives its session",
        "state_healing.cc",
        "[this](const Request& request) { return !IsLoading(request.replacement); }",
        "[](const Request&) { return false; }",
    ),
    Mutation(
        "a transfer outlives its replacement",
        "state_healing.cc",
        "bool goes_on = RequestOf(replacement) != requests_.end();",
        "bool goes_on = true;",
    ),
    Mutation(
        "a transfer outlives the frozen state",
        "state_healing.cc",
        "standing_of(asked.session.rank, replacement.rank) == Standing::kFrozen;",
        "standing_of(asked.session.rank, replacement.rank) != Standing::kNone;",
    ),
    Mutation(
        "ranks that end the step later are not asked",
        "state_healing.cc",
        "    AskFrozen(standing_of, actions);\n    MaybeAdmit(actions);",
        "    MaybeAdmit(actions);",
    ),
    Mutation(
        "a rank is asked again and again",
        "state_healing.cc",
        " || transfer_->FindAsked(rank) != nullptr) continue;",
        ") continue;",
    ),
    Mutation(
        "a rank that refused is asked for digests",
        "state_healing.cc",
        "    if (HasGivenUp(*RequestOf(replacement), session)) continue;\n",
    ),
    Mutation(
        "a rank is admitted before all have answered",
        "state_healing.cc",
        "if (!transfer_->loaded.has_value() || !transfer_->AllAnswered()) return;",
        "if (!transfer_->loaded.has_value() || !transfer_->living.has_value()) return;",
    ),
    Mutation(
        "any digests are admitted",
        "state_healing.cc",
        "  if (difference.empty()) {\n    members_->Admit",
        "  if (difference.empty() || !difference.empty()) {\n    members_->Admit",
    ),
    Mutation(
        "digests of living ranks are not compared",
        "state_healing.cc",
        "  if (difference.empty()) return absl::OkStatus();\n  diverged_",
        "  if (difference.size() != 1) return absl::OkStatus();\n  diverged_",
    ),
    Mutation(
        "names of items are not compared",
        "state_healing.cc",
        "if (a.items[i].name != b[i].name) {",
        "if (false) {",
    ),
    Mutation(
        "an admitted rank is not told",
        "state_healing.cc",
        "    members_->Send(replacement.rank, StateAdmittedMessage{transfer_->number()}, "
        "actions);\n",
    ),
    Mutation(
        "a request that cannot be served blocks the others",
        "state_healing.cc",
        "      if (transfer_.has_value()) return;\n      ++request;",
        "      return;\n      ++request;",
    ),
    Mutation(
        "a request waits for nobody",
        "state_healing.cc",
        "  return hope;\n",
        "  return hope || !hope;\n",
    ),
    Mutation(
        "a source that was given up is taken again",
        "state_healing.cc",
        "rank == request.replacement.rank || HasGivenUp(request, session)",
        "rank == request.replacement.rank",
    ),
    Mutation(
        "asked ranks do not hear of the end",
        "state_healing.cc",
        "    members_->Send(asked.session.rank, cancelled, actions);\n",
    ),
    Mutation(
        "the replacement does not hear of the end",
        "state_healing.cc",
        "    members_->Send(replacement.rank, cancelled, actions);\n",
    ),
    Mutation(
        "the time of the replacement is the source's",
        "state_healing.cc",
        "transfer_->WaitsForSource() &&\n      now_ns",
        "now_ns",
    ),
    Mutation(
        "the time for a chunk begins with the offer",
        "state_healing.cc",
        "  heard_ns_ = now_ns;  // the source's time for the next chunk begins\n",
        "  (void)now_ns;\n",
    ),
    Mutation(
        "a silent source is waited for",
        "job.cc",
        "  healing_.Tick(now_ns, transaction.actions());\n",
    ),
    Mutation(
        "the job's end leaves a reader at work",
        "job.cc",
        "  healing_.Stop(actions);\n",
    ),
    # ---- Positions and buffers
    Mutation(
        "positions of marks are not compared",
        "layout_channel.cc",
        "  if (absl::Status same = TakePosition(rank, position); !same.ok()) return same;\n  for",
        "  for",
    ),
    Mutation(
        "positions of ends are not compared",
        "layout_channel.cc",
        "  if (absl::Status same = TakePosition(rank, position); !same.ok()) return same;\n"
        "  StartStep",
        "  StartStep",
    ),
    Mutation(
        "positions of the rest are not compared",
        "layout_channel.cc",
        "    if (absl::Status same = TakePosition(rank, position); !same.ok()) return same;\n"
        "    for",
        "    for",
    ),
    Mutation(
        "the position of a lost session counts",
        "running_step.cc",
        "  ranks_[rank].position.reset();\n",
    ),
    Mutation(
        "positions are not compared",
        "running_step.cc",
        "  if (!(ranks_[*position_rank_].position == position)) return position_rank_;\n",
    ),
    Mutation(
        "the model's buffers are averaged",
        "bucket_reductions.h",
        "return HasBuffers(index) ? ReduceOp::kSum : agreement_.spec().op;",
        "return agreement_.spec().op;",
    ),
)


def outcome(copy: Path) -> str:
    """The tests that failed: "hold_test, ..."; "" if all passed."""
    run = subprocess.run(
        ["bazel", "test", "--config=opt", "--keep_going", "--test_timeout=120"]
        + [f"//tests/job:{test}" for test in TESTS],
        cwd=copy,
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
    )
    if "FAILED TO BUILD" in run.stdout:
        return "DOES NOT BUILD"
    results = [line.split() for line in run.stdout.splitlines() if line.startswith("//tests/job:")]
    failed = [words[0].partition(":")[2] for words in results if "PASSED" not in words]
    return ", ".join(failed)


def main(words: list[str]) -> int:
    tree = Path(__file__).resolve().parents[2]
    bad = 0
    with tempfile.TemporaryDirectory(prefix="gradsync-mutations-") as directory:
        copy = Path(directory) / "gradsync"
        subprocess.run(["git", "clone", "-q", "--shared", tree, copy], check=True)
        (copy / ".venv").symlink_to(tree / ".venv")
        failing = outcome(copy)
        print(f"{'the tree as it is':50}  {failing or 'all pass'}", flush=True)
        bad += failing != ""
        for mutation in () if failing else MUTATIONS:
            if words and not any(word in mutation.name for word in words):
                continue
            file = copy / JOB / mutation.file
            text = file.read_text()
            if text.count(mutation.line) != 1:
                result = "NOT IN THE TREE, OR NOT ONCE"
            else:
                file.write_text(text.replace(mutation.line, mutation.instead, 1))
                result = outcome(copy) or "NO TEST FAILS"
                file.write_text(text)
            bad += result.isupper()
            print(f"{mutation.name:50}  {result}", flush=True)
        subprocess.run(["bazel", "clean", "--expunge"], cwd=copy, capture_output=True, check=True)
    return 1 if bad else 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
