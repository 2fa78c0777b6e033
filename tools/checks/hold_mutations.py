"""Undoes one line of policy `hold` after the other, and checks that a test fails each time.

    .venv/bin/python tools/checks/hold_mutations.py [WORD...]

Runs in copies of the committed tree, one per core, and takes 20 minutes on two cores. First runs
the tests on the tree as it is: they must pass. With words, only the mutations whose names contain
one of them. Prints a table: each mutation, and the first test that failed. Exit status: 0 every
mutation made a test fail, 1 some mutation did not, or its line is not in the tree, or there more
than once.
"""

import os
import queue
import re
import subprocess
import sys
import tempfile
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import NamedTuple

# The tests of one half of the tree are one program, which is linked once and stops at the first
# failure. The quickest of them run first.
TESTS = {"daemon/job/": "//tests/job:hold_tests", "client/src/": "//tests/client:hold_tests"}

# Quick to compile, and quick enough to run. Only the tree as it is comes from the disk cache and
# goes into it.
FLAGS = (
    "--compilation_mode=fastbuild",
    "--copt=-O1",
    "--copt=-g0",
    "--copt=-Wno-error",
    "--spawn_strategy=local",
    "--nocache_test_results",
    "--test_env=GTEST_FAIL_FAST=1",
    "--test_output=all",
    "--test_timeout=120",
)


class Mutation(NamedTuple):
    name: str
    file: str
    line: str
    instead: str = ""


MUTATIONS = (
    Mutation(
        "calls of a lost session count",
        "daemon/job/job.cc",
        " ||\n         member.incarnation != session.incarnation;",
        ";",
    ),
    Mutation(
        "a rank whose process lives is held",
        "daemon/job/hold_policy.cc",
        "if (!harmless && DetailsOf(why).reason != reason::kProcessEnded.text()) {",
        "if (!harmless && why.ok()) {",
    ),
    Mutation(
        "a lost session is lost again",
        "daemon/job/job.cc",
        "if (member.incarnation != session.incarnation || member.sink == nullptr) return;",
        "if (member.sink == nullptr) return;",
    ),
    Mutation(
        "a held rank is not in steps",
        "daemon/job/membership.h",
        "state == RankState::kLive || state == RankState::kHeld || state == RankState::kLoading ||",
        "state == RankState::kLive || state == RankState::kLoading ||",
    ),
    Mutation(
        "marks are not taken back",
        "daemon/job/running_step.cc",
        "  if (ranks_[rank].ended) return;\n",
        "  return;\n",
    ),
    Mutation(
        "marks of a rank that ended are taken back",
        "daemon/job/running_step.cc",
        "  if (ranks_[rank].ended) return;\n",
    ),
    Mutation(
        "marks of submitted buckets are taken back",
        "daemon/job/running_step.cc",
        "if (!Waiting(bucket) || Ready(bucket, rank) == 0) continue;",
        "if (Ready(bucket, rank) == 0) continue;",
    ),
    Mutation(
        "a lost session's marks stay the rank's",
        "daemon/job/running_step.cc",
        "  ranks_[rank].marked.assign(buckets_.size(), false);\n",
    ),
    Mutation(
        "a mark takes over a submitted bucket",
        "daemon/job/running_step.cc",
        "  if (ready != 0) return;\n  ready = session.incarnation;\n"
        "  ++buckets_[bucket].ready_ranks;",
        "  if (ready == 0) ++buckets_[bucket].ready_ranks;\n  ready = session.incarnation;",
    ),
    Mutation(
        "an average comes before the mark",
        "daemon/job/running_step.cc",
        "rank.incarnation == session.incarnation && rank.marked[bucket] &&",
        "rank.incarnation == session.incarnation &&",
    ),
    Mutation(
        "a lost session's mark asks for an average",
        "daemon/job/running_step.cc",
        "rank.incarnation == session.incarnation && rank.marked[bucket] &&",
        "rank.marked[bucket] &&",
    ),
    Mutation(
        "a copy does not keep the step open",
        "daemon/job/running_step.h",
        "void CopyBegun() { ++in_flight_; }\n  void CopyDone() { --in_flight_; }",
        "void CopyBegun() {}\n  void CopyDone() {}",
    ),
    Mutation(
        "a bucket is bound to the present session",
        "daemon/job/bucket_reductions.cc",
        "*agreement_.memory({rank, step.ReadySession(index, rank)})",
        "*(agreement_.memory(rank) != nullptr\n             ? agreement_.memory(rank)\n"
        "             : agreement_.memory({rank, step.ReadySession(index, rank)}))",
    ),
    Mutation(
        "lost memory is released at once",
        "daemon/job/layout_channel.cc",
        "return Touches(session) ||\n               std::find(",
        "return std::find(",
    ),
    Mutation(
        "an average goes with its last contributor",
        "daemon/job/layout_channel.cc",
        "return Touches(session) ||\n"
        "               std::find(sources.begin(), sources.end(), session) != sources.end();",
        "return Touches(session);",
    ),
    Mutation(
        "an average comes from a lost session",
        "daemon/job/layout_channel.cc",
        "    if (members_->MayMark(rank) && "
        "session.incarnation == (*members_)[rank].incarnation) break;\n",
    ),
    Mutation(
        "lost memory is never released",
        "daemon/job/layout_channel.cc",
        "  // No bucket is bound to it: losses and reductions have seen to that.\n"
        "  agreement_.ReleaseLostMemory([](RankSession) { return false; }, actions);\n",
    ),
    Mutation(
        "done words of a lost session are written",
        "daemon/job/layout_agreement.cc",
        "  if (mine.memory->semaphores != nullptr) mine.memory->semaphores->Close();\n",
    ),
    Mutation(
        "memory is found by its rank alone",
        "daemon/job/layout_agreement.cc",
        "if (mine.memory.has_value() && mine.incarnation == session.incarnation) return",
        "if (mine.memory.has_value()) return",
    ),
    Mutation(
        "no average of a reduced bucket",
        "daemon/job/layout_channel.cc",
        "    if (step_.Reduced(index)) CopyAverage(index, rank, actions);\n",
    ),
    Mutation(
        "no average of a bucket that was in flight",
        "daemon/job/layout_channel.cc",
        "      CopyAverage(index, rank, actions);\n    } else if",
        "    } else if",
    ),
    Mutation(
        "an average is copied before there is one",
        "daemon/job/layout_channel.cc",
        "    if (step_.Reduced(index)) CopyAverage(index, rank, actions);\n",
        "    CopyAverage(index, rank, actions);\n",
    ),
    Mutation(
        "a copied average is not signalled",
        "daemon/job/layout_channel.cc",
        "    memory->semaphores->SignalDone(copy->bucket, step());\n",
    ),
    Mutation(
        "a copied average is not measured",
        "daemon/job/layout_channel.cc",
        "if (running && copy->check.measure && copy->state == AverageCopy::State::kCopying) {",
        "if (false) {",
    ),
    Mutation(
        "an average that a trainer has changed counts",
        "daemon/job/layout_channel.cc",
        "if (running && copy->check.measure &&\n      !Equal",
        "if (false && !Equal",
    ),
    Mutation(
        "the next session gets the lost one's verdict",
        "daemon/job/layout_channel.cc",
        "if (tell && !began_later) members",
        "if (tell) members",
    ),
    Mutation(
        "a session has a step before it has memory",
        "daemon/job/layout_channel.cc",
        "  first_step_[rank] = kNoStep;\n",
    ),
    Mutation(
        "the next session begins with an ended step",
        "daemon/job/layout_channel.cc",
        "step() + (step_.Ended(rank) ? 1 : 0);",
        "step();",
    ),
    Mutation(
        "the lost session's step heals the next one",
        "daemon/job/layout_channel.cc",
        "if (complete && step_.Ended(rank) && !began_later) members_->Stepped(rank);",
        "if (complete && step_.Ended(rank)) members_->Stepped(rank);",
    ),
    Mutation(
        "a rank never heals",
        "daemon/job/layout_set.cc",
        "    members_->Heal(rank);\n",
    ),
    Mutation(
        "the deadline passes",
        "daemon/job/layout_channel.cc",
        "  if (!step_.Ended(rank)) step_.Suspend(now_ns);\n",
        "  (void)now_ns;\n",
    ),
    Mutation(
        "the deadline of a step that begins later passes",
        "daemon/job/layout_channel.cc",
        "  if (members_->AnyIsMissing()) step_.Suspend(now_ns);\n",
    ),
    Mutation(
        "the deadline does not go on",
        "daemon/job/job.cc",
        "    layouts_.ResumeDeadlines(environment_.clock->NowNs());\n",
    ),
    Mutation(
        "the last rank with the state is held",
        "daemon/job/hold_policy.cc",
        'return "no other rank has the state of the model";',
        'return "";',
    ),
    Mutation(
        "hold_timeout runs while nobody waits",
        "daemon/job/hold_policy.cc",
        "if (!leaver_waits && !layouts_.RankWaits()) {",
        "if (!leaver_waits && members_.Count(RankState::kHeld) == 0) {",
    ),
    Mutation(
        "hold_timeout forgets the waits before",
        "daemon/job/hold_policy.cc",
        "wait_.waited_ns += now_ns - *wait_.since_ns;",
        "(void)now_ns;",
    ),
    Mutation(
        "hold_timeout goes on after a verdict",
        "daemon/job/hold_policy.cc",
        "if (all_live || decided != wait_.steps_decided)",
        "if (all_live)",
    ),
    Mutation(
        "hold_timeout ends at a join",
        "daemon/job/layout_channel.cc",
        "(state == RankState::kHealing && first_step_[rank] == kNoStep);",
        "false;",
    ),
    Mutation(
        "hold_timeout does not run for ranks that leave",
        "daemon/job/hold_policy.cc",
        "members_.AnyIsMissing() && members_.AnyIsLeaving();",
        "false;",
    ),
    Mutation(
        "a rank heals before it has every layout",
        "daemon/job/layout_channel.cc",
        "return first_step_[rank] <= step() && !HasGradientsOfEarlier(rank);",
        "return !HasGradientsOfEarlier(rank);",
    ),
    Mutation(
        "a rank heals while a step has its lost gradients",
        "daemon/job/layout_channel.cc",
        "return first_step_[rank] <= step() && !HasGradientsOfEarlier(rank);",
        "return first_step_[rank] <= step();",
    ),
    Mutation(
        "a rank heals only with a layout that it had released",
        "daemon/job/layout_channel.cc",
        "  if (released_[rank]) return !step_.Has(rank);\n",
    ),
    Mutation(
        "a rank heals before its step is complete",
        "daemon/job/layout_set.cc",
        "member.state != RankState::kHealing || !member.stepped",
        "member.state != RankState::kHealing",
    ),
    Mutation(
        "lost memory stays when its bucket is reduced",
        "daemon/job/running_step.cc",
        "    if (Reduced(bucket)) continue;\n",
    ),
    Mutation(
        "lost memory goes while it is copied from",
        "daemon/job/layout_channel.cc",
        "(copy->state == AverageCopy::State::kCopying && copy->from == session);",
        "false;",
    ),
    Mutation(
        "a bucket keeps lost memory for the next step",
        "daemon/job/layout_channel.cc",
        "  // Buckets that were bound before must not refer to this memory in the next step.\n"
        "  reductions_.Rebind();\n",
    ),
    Mutation(
        "a rank stays while another one is lost",
        "daemon/job/job.cc",
        "  if (!exit) StopIf(hold_.StaysDuringLoss(rank), actions);\n",
    ),
    Mutation(
        "a rank leaves before the others",
        "daemon/job/job.cc",
        "  if (hold_.LeaversWait()) return;\n",
    ),
    Mutation(
        "a rank that cannot be replaced is waited for",
        "daemon/job/hold_policy.cc",
        " && members_.Formed() && layouts_.WhyNoReplacement().empty();",
        ";",
    ),
    Mutation(
        "a leaving rank that dies is lost",
        "daemon/job/job.cc",
        "  if (members_.IsLeaving(session.rank)) {\n",
        "  if (false) {\n",
    ),
    Mutation(
        "a leaving rank leaves twice",
        "daemon/job/rank_rules.cc",
        "members_.IsLeaving(rank) || (members_[rank].state",
        "(members_[rank].state",
    ),
    Mutation(
        "a leaving rank gets the job's failure",
        "daemon/job/job.cc",
        "    if (members_.IsLeaving(rank)) status = absl::OkStatus();\n",
    ),
    Mutation(
        "a leaving rank has the averages of a step",
        "daemon/job/hold_policy.cc",
        "if (!members_.IsLeaving(rank) || layouts_.StepRunning()) return false;",
        "if (!members_.IsLeaving(rank)) return false;",
    ),
    Mutation(
        "a replacement leaves with its lost gradients",
        "daemon/job/rank_rules.cc",
        "(!exit || layouts_.HasGradientsOfEarlier(rank))",
        "!exit",
    ),
    Mutation(
        "a replacement cannot leave without a step",
        "daemon/job/rank_rules.cc",
        "(!exit || layouts_.HasGradientsOfEarlier(rank))",
        "(!exit || exit)",
    ),
    Mutation(
        "a session registers its layout twice",
        "daemon/job/layout_agreement.cc",
        "  ranks_[rank].registered = true;\n  request.spec = LayoutSpec{};\n"
        "  ranks_[rank].request = std::move(request);\n  return absl::OkStatus();\n}\n\n"
        "void",
        "  request.spec = LayoutSpec{};\n  ranks_[rank].request = std::move(request);\n"
        "  return absl::OkStatus();\n}\n\nvoid",
    ),
    Mutation(
        "the next session hears of a lost one's operation",
        "daemon/job/operation_channel.cc",
        "    if (!ranks_[rank].waiting || ranks_[rank].excused) continue;\n"
        "    members_->Send(rank, OperationDoneMessage",
        "    if (!ranks_[rank].waiting) continue;\n    members_->Send(rank, OperationDoneMessage",
    ),
    Mutation(
        "an operation waits for a held rank",
        "daemon/job/operation_channel.cc",
        "      ranks_[other].excused = IsRecovering((*members_)[other].state);\n",
    ),
    Mutation(
        "an operation in progress waits for a lost rank",
        "daemon/job/operation_channel.cc",
        "  mine.excused = true;\n",
    ),
    Mutation(
        "a sum is finished without a lost rank",
        "daemon/job/operation_channel.cc",
        "if (state_ == State::kIdle || ranks_[rank].excused || DoesWithout(rank, spec_)) "
        'return "";',
        'if (rank < ranks_.size()) return "";',
    ),
    Mutation(
        "a whole sum is given up",
        "daemon/job/operation_channel.cc",
        '  if (state_ == State::kMoving && spec_.kind == OperationKind::kAllReduce) return "";\n',
    ),
    Mutation(
        "the next session repeats old operations",
        "daemon/job/operation_channel.h",
        "ranks_[rank].sequence = sequence_;",
        "(void)rank;",
    ),
    # ---- A rank that loads the state of the model
    Mutation(
        "a replacement needs no state",
        "daemon/job/job.cc",
        "/*loads=*/terms_.options.HealsFromSurvivors()",
        "/*loads=*/false",
    ),
    Mutation(
        "a rank that loads is not in steps",
        "daemon/job/membership.h",
        "state == RankState::kHeld || state == RankState::kLoading ||\n",
        "state == RankState::kHeld ||\n",
    ),
    Mutation(
        "a rank that loads marks buckets",
        "daemon/job/membership.h",
        "return state == RankState::kLive || state == RankState::kHealing;",
        "return state == RankState::kLive || CameBack(state);",
    ),
    Mutation(
        "a rank that loads begins an agreement",
        "daemon/job/layout_set.cc",
        "if (CameBack((*members_)[rank].state)) return Rejoin(rank, std::move(request));",
        "if ((*members_)[rank].state == RankState::kHealing) {\n"
        "    return Rejoin(rank, std::move(request));\n  }",
    ),
    Mutation(
        "layouts are agreed while a rank loads",
        "daemon/job/layout_set.cc",
        "if (!IsRecovering((*members_)[rank].state)) continue;",
        "if ((*members_)[rank].state != RankState::kHeld &&\n"
        "        (*members_)[rank].state != RankState::kHealing) {\n      continue;\n    }",
    ),
    Mutation(
        "a rank that loads leaves",
        "daemon/job/rank_rules.cc",
        "  if (members_[rank].state == RankState::kLoading) {\n",
        "  if (false) {\n",
    ),
    Mutation(
        "a rank that loads is held only after its process",
        "daemon/job/hold_policy.cc",
        "harmless = members_[rank].state == RankState::kLoading;",
        "harmless = false;",
    ),
    Mutation(
        "the deadline passes while a rank loads",
        "daemon/job/job.cc",
        "comes_back && !members_.AnyIsMissing()",
        "comes_back && members_.Count(RankState::kHeld) == 0",
    ),
    Mutation(
        "the deadline does not go on after an admission",
        "daemon/job/job.cc",
        "  if (missing && !members_.AnyIsMissing()) layouts_.ResumeDeadlines(now_ns);\n",
        "  (void)missing;\n",
    ),
    Mutation(
        "hold_timeout does not run while a rank loads",
        "daemon/job/layout_channel.cc",
        "IsMissing(state) || (state == RankState::kHealing",
        "state == RankState::kHeld || (state == RankState::kHealing",
    ),
    Mutation(
        "a drain waits for a rank that loads",
        "daemon/job/job.cc",
        "if (layouts_.StepRunning() && !members_.AnyIsMissing()) return false;",
        "if (layouts_.StepRunning() && members_.Count(RankState::kHeld) == 0) return false;",
    ),
    Mutation(
        "an admitted rank has not the state",
        "daemon/job/hold_policy.cc",
        "    if (terms_.options.HealsFromSurvivors() && "
        'members_[other].state == RankState::kHealing) {\n      return "";\n    }\n',
    ),
    # ---- Which ranks have the state, and do not change it
    Mutation(
        "a rank is read before it has ended the step",
        "daemon/job/layout_channel.cc",
        "step_.phase() == Phase::kRunning && step_.Ended(rank) &&",
        "step_.phase() == Phase::kRunning &&",
    ),
    Mutation(
        "a rank is read in a void step",
        "daemon/job/layout_channel.cc",
        "return step_.phase() == Phase::kRunning && step_.Ended(rank) &&",
        "return step_.begun() && step_.Ended(rank) &&",
    ),
    Mutation(
        "a rank is healed before its first step",
        "daemon/job/layout_channel.cc",
        "step_.Ended(rank) && !step_.Ended(replacement);",
        "step_.Ended(rank) && replacement < members_->world_size();",
    ),
    Mutation(
        "a rank is read in the middle of another layout's step",
        "daemon/job/layout_set.cc",
        "    if (!layout->IsFrozenFor(rank, replacement)) return false;\n    in_step = true;\n",
        "    if (layout->IsFrozenFor(rank, replacement)) in_step = true;\n",
    ),
    Mutation(
        "a rank that left before the last step is a source",
        "daemon/job/hold_policy.cc",
        "return !terms_.options.HealsFromSurvivors() || "
        "members_[rank].left_at == layouts_.StepsDecided();",
        "return true;",
    ),
    Mutation(
        "a rank is healed between the ends of two steps",
        "daemon/job/job.cc",
        "      job_->StopIf(job_->hold_.StepsOverlap(), &actions_);\n",
    ),
    # ---- Transfers
    Mutation(
        "a fetch that crosses the admission is a breach",
        "daemon/job/state_healing.cc",
        "  if ((*members_)[rank].state == RankState::kHealing) return absl::OkStatus();\n",
    ),
    Mutation(
        "a repeated fetch goes on with the old transfer",
        "daemon/job/state_healing.cc",
        "  if (transfer_.has_value() && transfer_->replacement() == session) Cancel(actions);\n"
        "  const auto",
        "  const auto",
    ),
    Mutation(
        "a repeated fetch keeps its deadline",
        "daemon/job/state_healing.cc",
        "    before->deadline_ns = deadline_ns;\n",
    ),
    Mutation(
        "messages of an ended transfer count",
        "daemon/job/state_healing.cc",
        "*current = transfer_.has_value() && transfer == transfer_->number();",
        "*current = transfer_.has_value();",
    ),
    Mutation(
        "any rank offers",
        "daemon/job/state_healing.cc",
        "transfer_->source().rank != rank || transfer_->phase() != StateTransfer::Phase::kOffering",
        "transfer_->phase() != StateTransfer::Phase::kOffering",
    ),
    Mutation(
        "a source offers twice",
        "daemon/job/state_healing.cc",
        "transfer_->source().rank != rank || transfer_->phase() != StateTransfer::Phase::kOffering",
        "transfer_->source().rank != rank",
    ),
    Mutation(
        "any rank writes",
        "daemon/job/state_healing.cc",
        "transfer_->source().rank != rank || transfer_->phase() != StateTransfer::Phase::kWriting",
        "transfer_->phase() != StateTransfer::Phase::kWriting",
    ),
    Mutation(
        "any chunk is written",
        "daemon/job/state_healing.cc",
        "kWriting ||\n      chunk != transfer_->chunk()) {",
        "kWriting) {",
    ),
    Mutation(
        "any rank reads",
        "daemon/job/state_healing.cc",
        "transfer_->replacement().rank != rank ||\n      transfer_->phase()",
        "transfer_->phase()",
    ),
    Mutation(
        "any chunk is read",
        "daemon/job/state_healing.cc",
        "kReading || chunk != transfer_->chunk()) {",
        "kReading) {",
    ),
    Mutation(
        "a chunk is not copied",
        "daemon/job/state_healing.cc",
        "    std::memcpy(to.data, from.data, bytes);\n",
        "    (void)bytes;\n",
    ),
    Mutation(
        "the next transfer begins in mid-copy",
        "daemon/job/state_healing.cc",
        "if (!transfer_.has_value() && !copying_) BeginNext",
        "if (!transfer_.has_value()) BeginNext",
    ),
    Mutation(
        "the job ends in mid-copy",
        "daemon/job/job.cc",
        "layouts_.in_flight() || healing_.busy();",
        "layouts_.in_flight();",
    ),
    Mutation(
        "a copy does not end",
        "daemon/job/state_healing.cc",
        "  copying_ = false;\n",
    ),
    Mutation(
        "a request outlives its session",
        "daemon/job/state_healing.cc",
        "[this](const Request& request) { return !IsLoading(request.replacement); }",
        "[](const Request&) { return false; }",
    ),
    Mutation(
        "a transfer outlives its replacement",
        "daemon/job/state_healing.cc",
        "bool goes_on = RequestOf(replacement) != requests_.end();",
        "bool goes_on = true;",
    ),
    Mutation(
        "a transfer outlives the frozen state",
        "daemon/job/state_healing.cc",
        "standing_of(asked.session.rank, replacement.rank) == Standing::kFrozen;",
        "standing_of(asked.session.rank, replacement.rank) != Standing::kNone;",
    ),
    Mutation(
        "ranks that end the step later are not asked",
        "daemon/job/state_healing.cc",
        "    AskFrozen(standing_of, actions);\n    MaybeAdmit(actions);",
        "    MaybeAdmit(actions);",
    ),
    Mutation(
        "a rank is asked again and again",
        "daemon/job/state_healing.cc",
        " || transfer_->FindAsked(rank) != nullptr) continue;",
        ") continue;",
    ),
    Mutation(
        "a rank that refused is asked for digests",
        "daemon/job/state_healing.cc",
        "    if (HasGivenUp(*RequestOf(replacement), session)) continue;\n",
    ),
    Mutation(
        "a rank is admitted before all have answered",
        "daemon/job/state_healing.cc",
        "if (!transfer_->loaded.has_value() || !transfer_->AllAnswered()) return;",
        "if (!transfer_->loaded.has_value() || !transfer_->living.has_value()) return;",
    ),
    Mutation(
        "any digests are admitted",
        "daemon/job/state_healing.cc",
        "  if (difference.empty()) {\n    members_->Admit",
        "  if (difference.empty() || !difference.empty()) {\n    members_->Admit",
    ),
    Mutation(
        "digests of living ranks are not compared",
        "daemon/job/state_healing.cc",
        "  if (difference.empty()) return absl::OkStatus();\n  diverged_",
        "  if (difference.size() != 1) return absl::OkStatus();\n  diverged_",
    ),
    Mutation(
        "names of items are not compared",
        "daemon/job/state_healing.cc",
        "if (a.items[i].name != b[i].name) {",
        "if (false) {",
    ),
    Mutation(
        "an admitted rank is not told",
        "daemon/job/state_healing.cc",
        "    members_->Send(replacement.rank, StateAdmittedMessage{transfer_->number()}, "
        "actions);\n",
    ),
    Mutation(
        "a request that cannot be served blocks the others",
        "daemon/job/state_healing.cc",
        "      if (transfer_.has_value()) return;\n      ++request;",
        "      return;\n      ++request;",
    ),
    Mutation(
        "a request waits for nobody",
        "daemon/job/state_healing.cc",
        "  return hope;\n",
        "  return hope || !hope;\n",
    ),
    Mutation(
        "a source that was given up is taken again",
        "daemon/job/state_healing.cc",
        "rank == request.replacement.rank || HasGivenUp(request, session)",
        "rank == request.replacement.rank",
    ),
    Mutation(
        "asked ranks do not hear of the end",
        "daemon/job/state_healing.cc",
        "    members_->Send(asked.session.rank, cancelled, actions);\n",
    ),
    Mutation(
        "the replacement does not hear of the end",
        "daemon/job/state_healing.cc",
        "    members_->Send(replacement.rank, cancelled, actions);\n",
    ),
    Mutation(
        "the time of the replacement is the source's",
        "daemon/job/state_healing.cc",
        "transfer_->WaitsForSource() &&\n      now_ns",
        "now_ns",
    ),
    Mutation(
        "the time for a chunk begins with the offer",
        "daemon/job/state_healing.cc",
        "  heard_ns_ = now_ns;  // the source's time for the next chunk begins\n",
        "  (void)now_ns;\n",
    ),
    Mutation(
        "a silent source is waited for",
        "daemon/job/job.cc",
        "  healing_.Tick(now_ns, transaction.actions());\n",
    ),
    Mutation(
        "the job's end leaves a reader at work",
        "daemon/job/job.cc",
        "  healing_.Stop(actions);\n",
    ),
    # ---- Positions and buffers
    Mutation(
        "positions of marks are not compared",
        "daemon/job/layout_channel.cc",
        "  if (absl::Status same = TakePosition(rank, position); !same.ok()) return same;\n  for",
        "  for",
    ),
    Mutation(
        "positions of ends are not compared",
        "daemon/job/layout_channel.cc",
        "  if (absl::Status same = TakePosition(rank, position); !same.ok()) return same;\n"
        "  StartStep",
        "  StartStep",
    ),
    Mutation(
        "positions of the rest are not compared",
        "daemon/job/layout_channel.cc",
        "    if (absl::Status same = TakePosition(rank, position); !same.ok()) return same;\n"
        "    for",
        "    for",
    ),
    Mutation(
        "the position of a lost session counts",
        "daemon/job/running_step.cc",
        "  ranks_[rank].position.reset();\n",
    ),
    Mutation(
        "positions are not compared",
        "daemon/job/running_step.cc",
        "  if (!(ranks_[*position_rank_].position == position)) return position_rank_;\n",
    ),
    Mutation(
        "the model's buffers are averaged",
        "daemon/job/bucket_reductions.h",
        "return HasBuffers(index) ? ReduceOp::kSum : agreement_.spec().op;",
        "return agreement_.spec().op;",
    ),
)


class Copy:
    """A copy of the committed tree, and what Bazel has built of it. For one thread at a time."""

    def __init__(self, tree: Path, folder: Path) -> None:
        self._tree = folder / "gradsync"
        self._bazel = ("bazel", f"--output_base={folder}/output", "--max_idle_secs=60")
        subprocess.run(["git", "clone", "-q", "--shared", tree, self._tree], check=True)
        (self._tree / ".venv").symlink_to(tree / ".venv")

    def test(self, target: str, *flags: str) -> str:
        """The first test that fails; "" if all pass."""
        run = self._run("test", *FLAGS, *flags, target)
        if run.returncode == 0:
            return ""
        if run.returncode != 3:  # Bazel's code of failed tests
            return "DOES NOT BUILD"
        failed = re.findall(r"^\[  FAILED  \] ([^\s,]+)", run.stdout, re.MULTILINE)
        if failed:
            return failed[0]
        begun = re.findall(r"^\[ RUN      \] (\S+)", run.stdout, re.MULTILINE)
        return f"{begun[-1] if begun else target} crashes or hangs"

    def outcome(self, mutation: Mutation) -> str:
        """The first test that fails after the mutation, or what is wrong in capitals."""
        file = self._tree / mutation.file
        text = file.read_text()
        if text.count(mutation.line) != 1:
            return "NOT IN THE TREE, OR NOT ONCE"
        file.write_text(text.replace(mutation.line, mutation.instead, 1))
        target = next(TESTS[room] for room in TESTS if mutation.file.startswith(room))
        result = self.test(target, "--disk_cache=")
        file.write_text(text)
        return result or "NO TEST FAILS"

    def remove(self) -> None:
        """Removes what Bazel has built, which is read-only in part."""
        self._run("clean", "--expunge")

    def _run(self, *arguments: str) -> subprocess.CompletedProcess[str]:
        return subprocess.run(
            [*self._bazel, *arguments],
            cwd=self._tree,
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
            errors="replace",
        )


def main(words: list[str]) -> int:
    chosen = [m for m in MUTATIONS if not words or any(word in m.name for word in words)]
    targets = [TESTS[room] for room in TESTS if any(m.file.startswith(room) for m in chosen)]
    tree = Path(__file__).resolve().parents[2]
    bad = 0
    with tempfile.TemporaryDirectory(prefix="gradsync-mutations-") as folder:
        copies = [Copy(tree, Path(folder) / str(i)) for i in range(os.cpu_count() or 1)]
        idle: queue.SimpleQueue[Copy] = queue.SimpleQueue()

        def outcome(mutation: Mutation) -> str:
            copy = idle.get()
            try:
                return copy.outcome(mutation)
            finally:
                idle.put(copy)

        try:
            for copy in copies:
                for target in targets:
                    failing = copy.test(target)
                    print(f"{'the tree as it is: ' + target:50}  {failing or 'passes'}", flush=True)
                    if failing:
                        return 1
                idle.put(copy)
            with ThreadPoolExecutor(len(copies)) as pool:
                for mutation, result in zip(chosen, pool.map(outcome, chosen)):
                    bad += result.isupper()
                    print(f"{mutation.name:50}  {result}", flush=True)
        finally:
            for copy in copies:
                copy.remove()
    return 1 if bad else 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
