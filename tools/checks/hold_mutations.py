"""Undoes one line of policy `hold` after the other, and checks that a test fails each time.

    .venv/bin/python tools/checks/hold_mutations.py [WORD...]
    .venv/bin/python tools/checks/hold_mutations.py --check [WORD...]

Runs in copies of the committed tree, one per core, and takes 30 minutes on two cores. First runs
the tests on the tree as it is: they must pass. With words, only the mutations whose names or files
contain one of them. Prints a table: each mutation, and the first test that failed. Exit status: 0
every mutation made a test fail, 1 some mutation did not, or its line is not in the tree, or there
more than once, 2 wrong usage.

--check only looks for each mutation's line in the working tree, without a build. It prints the
mutations that would not run.
"""

import sys

from mutations import Mutation, main

# The tests of one half of the tree are one program, which is linked once and stops at the first
# failure. The quickest of them run first.
TESTS = {"daemon/job/": "//tests/job:hold_tests", "client/src/": "//tests/client:hold_tests"}

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
        "a lost session that had ended the step needs an average",
        "daemon/job/running_step.cc",
        "  ranks_[rank].incarnation = 0;\n",
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
        "if (complete && step_.Ended(rank) && !began_later) {",
        "if (complete && step_.Ended(rank)) {",
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
        "    if (members_.IsLeaving(rank) && !early) status = absl::OkStatus();\n",
        "    (void)early;\n",
    ),
    Mutation(
        "a rank that leaves early is not told",
        "daemon/job/job.cc",
        "      job_->StopIf(job_->hold_.LeftEarly(*job_->environment_.clock), &actions_);\n",
    ),
    Mutation(
        "a rank that has left early ends well",
        "daemon/job/job.cc",
        "members_.IsLeaving(rank) && !early",
        "members_.IsLeaving(rank) && (early || !early)",
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
        "daemon/job/layout_set.cc",
        "    if (layout->agreement().Registered(rank)) {\n",
        "    if (false) {\n",
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
        "daemon/job/operation_channel.cc",
        "  mine.sequence = LastBefore(rank, last);\n",
        "  (void)last;\n",
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
        "return HasBegunFor(rank, replacement) && step_.Ended(rank);",
        "return HasBegunFor(rank, replacement);",
    ),
    Mutation(
        "a rank is read in a void step",
        "daemon/job/layout_channel.cc",
        "return step_.phase() == Phase::kRunning && step_.Has(rank) &&",
        "return step_.begun() && step_.Has(rank) &&",
    ),
    Mutation(
        "a rank is healed before its first step",
        "daemon/job/layout_channel.cc",
        "step_.Has(rank) && !step_.Ended(replacement);",
        "step_.Has(rank) && replacement < members_->world_size();",
    ),
    Mutation(
        "a rank is read in the middle of another layout's step",
        "daemon/job/layout_set.cc",
        "    if (!pass(*layout)) return false;\n    in_step = true;\n",
        "    if (pass(*layout)) in_step = true;\n",
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
        "  if (transfer_.has_value() && transfer_->replacement() == session) Cancel(actions);\n",
        "  (void)actions;\n",
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
        "  copy.AddCopy(to.data, from.data, transfer_->chunk_bytes());\n",
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
        "standing_of(asked.session.rank, replacement.rank) >= least;",
        "least != Standing::kNone;",
    ),
    Mutation(
        "ranks that begin the step later are not asked",
        "daemon/job/state_healing.cc",
        "    AskRanks(standing_of, now_ns, actions);\n    MaybeAdmit(actions);",
        "    MaybeAdmit(actions);",
    ),
    Mutation(
        "a rank is asked before it has begun the step",
        "daemon/job/state_healing.cc",
        "standing < Standing::kBegun ||",
        "standing == Standing::kNone ||",
    ),
    Mutation(
        "a rank that was just admitted is awaited",
        "daemon/job/state_healing.cc",
        "    if (!frozen && WasCompared(rank)) continue;\n",
    ),
    Mutation(
        "a rank that computes is not given time",
        "daemon/job/state_healing.cc",
        "transfer_->Ask(session, frozen ? std::optional(now_ns) : std::nullopt);",
        "transfer_->Ask(session, now_ns);",
    ),
    Mutation(
        "the time of a rank that computed never begins",
        "daemon/job/state_healing.cc",
        "      asked->frozen_ns = now_ns;\n",
    ),
    Mutation(
        "the time of a source that computed never begins",
        "daemon/job/state_healing.cc",
        "transfer_->SourceFrozen(now_ns);",
        "continue;",
    ),
    Mutation(
        "the time of a source that computes runs",
        "daemon/job/state_healing.h",
        "return source_frozen_ && (phase_",
        "return (phase_",
    ),
    Mutation(
        "a rank that waits for a bucket is no source",
        "daemon/job/state_healing.cc",
        "Standing best = Standing::kHasState;",
        "Standing best = Standing::kBegun;",
    ),
    Mutation(
        "a source that computes stays the source",
        "daemon/job/state_healing.cc",
        "if (!goes_on || HasBetterSource(standing_of)) Cancel(actions);",
        "if (!goes_on) Cancel(actions);",
    ),
    Mutation(
        "a source that has offered is replaced",
        "daemon/job/state_healing.cc",
        "  if (transfer_->phase() != StateTransfer::Phase::kOffering) return false;\n",
    ),
    Mutation(
        "a rank that refused is a better source",
        "daemon/job/state_healing.cc",
        "HasGivenUp(request, members_->SessionOf(rank))) continue;",
        "HasGivenUp(request, transfer_->replacement())) continue;",
    ),
    Mutation(
        "late digests are a breach",
        "daemon/job/state_healing.cc",
        "  if (asked == nullptr && IsGivenUp(rank)) return absl::OkStatus();  // too late\n",
    ),
    Mutation(
        "a late refusal is a breach",
        "daemon/job/state_healing.cc",
        "    if (IsGivenUp(rank)) return absl::OkStatus();\n",
    ),
    Mutation(
        "a rank is asked again and again",
        "daemon/job/state_healing.cc",
        "      continue;\n    }\n    if (standing < Standing::kBegun ||",
        "    }\n    if (standing < Standing::kBegun ||",
    ),
    Mutation(
        "a rank that refused is asked for digests",
        "daemon/job/state_healing.cc",
        "standing < Standing::kBegun || HasGivenUp(request, session)",
        "standing < Standing::kBegun || HasGivenUp(request, replacement)",
    ),
    Mutation(
        "a rank is admitted before all have answered",
        "daemon/job/state_healing.cc",
        "if (!transfer_->loaded.has_value() || !transfer_->AllAnswered()) return;",
        "if (!transfer_->loaded.has_value() || !transfer_->survivor.has_value()) return;",
    ),
    Mutation(
        "any digests are admitted",
        "daemon/job/state_healing.cc",
        "  if (difference.empty()) {\n    members_->Admit",
        "  if (difference.empty() || !difference.empty()) {\n    members_->Admit",
    ),
    Mutation(
        "digests of survivors are not compared",
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
        "    if (transfer_.has_value()) {\n      next_ = 0;",
        "    if (transfer_.has_value() || next_ == 0) {\n      next_ = 0;",
    ),
    Mutation(
        "a request waits for nobody",
        "daemon/job/state_healing.cc",
        "if (!source.has_value()) return hope;",
        "if (!source.has_value()) return hope || !hope;",
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
        "  since_ns_ = now_ns;  // the source's time for the next chunk begins\n",
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
    Mutation(
        "a slow replacement is waited for",
        "daemon/job/state_healing.cc",
        "    GiveUpSlowReplacement(now_ns, actions);\n",
    ),
    Mutation(
        "the time for a chunk begins with the source's",
        "daemon/job/state_healing.cc",
        "  since_ns_ = now_ns;  // the replacement's time for the chunk begins\n",
        "  (void)now_ns;\n",
    ),
    Mutation(
        "a replacement that has confirmed is slow",
        "daemon/job/state_healing.h",
        "(phase_ == Phase::kLoading && !loaded.has_value())",
        "phase_ == Phase::kLoading",
    ),
    Mutation(
        "a fetch without a time-out has the deadline of hold",
        "daemon/job/job.cc",
        "timeout_ns == 0 ? StateHealing::kNoDeadline",
        "timeout_ns == 0 ? environment_.clock->NowNs() + terms_.options.hold_timeout_ns",
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
        "return HasBuffers(index) ? agreement_.spec().op : agreement_.spec().op;",
    ),
    # ---- The client: the pin of the state, and what gives or gets it
    Mutation(
        "a state is read before it is frozen",
        "client/src/state_reader.cc",
        "(frozen_ && source_ != nullptr &&",
        "(source_ != nullptr &&",
    ),
    Mutation(
        "EndStep does not freeze the state",
        "client/src/step_client.cc",
        "  connection_->state_reader().FreezeUntilWait();\n",
    ),
    Mutation(
        "a thaw leaves the state frozen",
        "client/src/state_reader.cc",
        "  frozen_ = false;\n  if (state",
        "  if (state",
    ),
    Mutation(
        "a thaw does not stop the reader",
        "client/src/state_reader.cc",
        "++version_;\n  CancelLocked();\n  AwaitIdleLocked();",
        "++version_;\n  AwaitIdleLocked();",
    ),
    Mutation(
        "a thaw does not wait for the reader",
        "client/src/state_reader.cc",
        "++version_;\n  CancelLocked();\n  AwaitIdleLocked();",
        "++version_;\n  CancelLocked();",
    ),
    Mutation(
        "a wait that has ended keeps its pin",
        "client/src/state_reader.cc",
        "  --pins_;\n",
    ),
    Mutation(
        "a time-out ends the reading of another wait",
        "client/src/state_reader.cc",
        "  if (state == State::kSame && pins_ > 0) return;\n",
    ),
    Mutation(
        "a verdict leaves another wait's reading",
        "client/src/state_reader.cc",
        "if (state == State::kSame && pins_ > 0) return;",
        "if (pins_ > 0) return;",
    ),
    Mutation(
        "a wait that was left takes another one's pin",
        "client/src/state_reader.cc",
        "  if (pin <= interrupted_) return;\n",
        "  (void)pin;\n",
    ),
    Mutation(
        "an interrupt does not thaw",
        "client/src/state_reader.cc",
        "  pins_ = 0;\n  frozen_ = false;\n",
        "  pins_ = 0;\n",
    ),
    Mutation(
        "an interrupt does not wait for the reader",
        "client/src/state_reader.cc",
        "  CancelLocked();\n  if (!AwaitIdleLocked()) return;\n",
        "  CancelLocked();\n",
    ),
    Mutation(
        "an interrupt does not wait for a call that reads",
        "client/src/state_reader.cc",
        "  mutex_.AwaitWithTimeout(absl::Condition(&none), kSourcePatience);\n",
        "  (void)none;\n",
    ),
    Mutation(
        "a call that was left pins the state",
        "client/src/state_reader.cc",
        "  if (CallWasLeft()) return 0;\n",
    ),
    Mutation(
        "a call that was left reads",
        "client/src/state_reader.cc",
        "return CallWasLeft() ? 0 : ++last_pin_;",
        "return ++last_pin_;",
    ),
    Mutation(
        "an interrupt does not end a call that reads",
        "client/src/state_reader.cc",
        "return stopped_ || pin <= interrupted_;",
        "return stopped_ || pin == 0;",
    ),
    Mutation(
        "the session's end does not end a call that reads",
        "client/src/state_reader.cc",
        "return stopped_ || pin <= interrupted_;",
        "return pin <= interrupted_;",
    ),
    Mutation(
        "a wait for a step does not pin",
        "client/src/step_client.cc",
        "Pinned(timeout, [&] { return Goes((result = AwaitStep(step, timeout)).status()); });",
        "result = AwaitStep(step, timeout);",
    ),
    Mutation(
        "a wait for a bucket does not pin",
        "client/src/step_client.cc",
        "  Pinned(timeout,\n         [&] { return (status = AwaitBucket(step, bucket, "
        "timeout)).ok() || Goes(status); });\n",
        "  status = AwaitBucket(step, bucket, timeout);\n",
    ),
    Mutation(
        "after a verdict the state may not change",
        "client/src/step_client.cc",
        "  if (!wait()) pin.MayChange();\n",
        "  wait();\n",
    ),
    Mutation(
        "after a time-out the state may change",
        "client/src/step_client.cc",
        "return why == reason::kWaitTimeout || why",
        "return why",
    ),
    Mutation(
        "after a bucket the state may change",
        "client/src/step_client.cc",
        "return (status = AwaitBucket(step, bucket, timeout)).ok() || Goes(status);",
        "return !(status = AwaitBucket(step, bucket, timeout)).ok() && Goes(status);",
    ),
    Mutation(
        "a poll begins a reading",
        "client/src/step_client.cc",
        "  if (timeout <= absl::ZeroDuration()) {\n    if (!wait())",
        "  if (timeout < absl::ZeroDuration()) {\n    if (!wait())",
    ),
    Mutation(
        "a poll gets a verdict while the state is read",
        "client/src/step_client.cc",
        "    if (!wait()) StatePin(&reader).MayChange();\n",
        "    wait();\n",
    ),
    Mutation(
        "AbandonStep returns while the state is read",
        "client/src/step_client.cc",
        "  StatePin pin(&connection_->state_reader());\n  pin.MayChange();\n"
        "  absl::MutexLock lock(&mutex_);\n  // Already",
        "  absl::MutexLock lock(&mutex_);\n  // Already",
    ),
    Mutation(
        "a layout's end leaves the state frozen",
        "client/src/step_client.cc",
        "  if (frozen) StatePin(&connection_->state_reader()).MayChange();\n",
        "  (void)frozen;\n",
    ),
    Mutation(
        "the session's end does not stop the reader",
        "client/src/connection.cc",
        "  state_reader_.Stop();\n",
    ),
    Mutation(
        "the session's end leaves a reading in progress",
        "client/src/state_reader.cc",
        "  chunk_.reset();\n  CancelLocked();\n  ReleaseStagingLocked();\n}\n\n// ----",
        "  chunk_.reset();\n  ReleaseStagingLocked();\n}\n\n// ----",
    ),
    Mutation(
        "a source is read after another one serves",
        "client/src/state_reader.cc",
        "    CancelLocked();\n    AwaitIdleLocked();\n    if (source_",
        "    if (source_",
    ),
    Mutation(
        "a rank that serves no more does not say so",
        "client/src/state_reader.cc",
        '      RefuseLocked(question_->transfer, "it serves its state no more");\n',
        "      (void)0;\n",
    ),
    Mutation(
        "a rank without a state does not refuse",
        "client/src/state_reader.cc",
        '    RefuseLocked(transfer, "it serves no state; call ServeState '
        'before the first step");\n',
    ),
    Mutation(
        "a state that may have changed is read on",
        "client/src/state_reader.cc",
        "            progress_->version != version_ || ",
        "            ",
    ),
    Mutation(
        "a state of another shape is read on",
        "client/src/state_reader.cc",
        " || !progress_->image.SameShape(image)) {",
        ") {",
    ),
    Mutation(
        "a state that changed after its offer is given",
        "client/src/state_reader.cc",
        "          if (question_->offered) {\n",
        "          if (false) {\n",
    ),
    Mutation(
        "what was read for an earlier transfer counts",
        "client/src/state_reader.cc",
        "progress_->transfer != question_->transfer ||\n",
    ),
    Mutation(
        "malformed items are read",
        "client/src/state_reader.cc",
        "owned ? ValidateItems(*items) : items.status();",
        "owned ? absl::OkStatus() : items.status();",
    ),
    Mutation(
        "a source that fails is not refused",
        "client/src/state_reader.cc",
        "    Refuse(status.message());\n  } else {\n    StateImageSource",
        "    (void)0;\n  } else {\n    StateImageSource",
    ),
    Mutation(
        "a question is read again after its refusal",
        "client/src/state_reader.cc",
        "  if (question_.has_value()) question_->answered = true;\n  chunk_",
        "  chunk_",
    ),
    Mutation(
        "the source does not hear that it was read",
        "client/src/state_reader.cc",
        "  if (owned) source->Done();\n",
    ),
    Mutation(
        "a chunk is copied without an offer",
        "client/src/state_reader.cc",
        "question_->transfer != chunk.transfer() || !question_->offered ||",
        "question_->transfer != chunk.transfer() ||",
    ),
    Mutation(
        "a chunk of another transfer is copied",
        "client/src/state_reader.cc",
        "|| question_->transfer != chunk.transfer() || !question_",
        "|| !question_",
    ),
    Mutation(
        "a chunk out of order is copied",
        "client/src/state_reader.cc",
        "chunk.number != answer.next_chunk() || chunk",
        "chunk",
    ),
    Mutation(
        "an empty chunk is copied",
        "client/src/state_reader.cc",
        "chunk.bytes == 0 || ",
    ),
    Mutation(
        "a chunk larger than the staging memory is copied",
        "client/src/state_reader.cc",
        "chunk.bytes > staging->size() ||",
        "false ||",
    ),
    Mutation(
        "a chunk beyond the state is copied",
        "client/src/state_reader.cc",
        "chunk.bytes > progress_->image.bytes() - answer.copied()) {",
        "false) {",
    ),
    Mutation(
        "a chunk is copied twice",
        "client/src/state_reader.cc",
        "  chunk_.reset();\n  NoteAnswered();\n",
        "  NoteAnswered();\n",
    ),
    Mutation(
        "a question is answered only after the lock under which its last chunk was sent",
        "client/src/state_reader.cc",
        "  chunk_.reset();\n  NoteAnswered();\n",
        "  chunk_.reset();\n",
    ),
    Mutation(
        "a question is answered only after the lock under which its digests were sent",
        "client/src/state_reader.cc",
        "  question_->digested = true;\n  NoteAnswered();\n",
        "  question_->digested = true;\n",
    ),
    Mutation(
        "a transfer takes staging memory that is in use",
        "client/src/state_reader.cc",
        "    if (!staging->Acquire(absl::InfiniteFuture(), &cancel_)) return;\n",
    ),
    Mutation(
        "a thaw does not end a wait for staging memory",
        "client/src/state_reader.cc",
        "  if (staging_ != nullptr) staging_->Wake();\n",
    ),
    Mutation(
        "a cancelled transfer keeps the staging memory",
        "client/src/state_reader.cc",
        "  question_.reset();\n  chunk_.reset();\n  CancelLocked();\n"
        "  ReleaseStagingLocked();\n}\n\nvoid StateReader::Impl::OnStepDone",
        "  question_.reset();\n  chunk_.reset();\n  CancelLocked();\n}\n\n"
        "void StateReader::Impl::OnStepDone",
    ),
    Mutation(
        "a cancelled transfer goes on",
        "client/src/state_reader.cc",
        "  question_.reset();\n  chunk_.reset();\n  CancelLocked();\n"
        "  ReleaseStagingLocked();\n}\n\nvoid StateReader::Impl::OnStepDone",
        "  ReleaseStagingLocked();\n}\n\nvoid StateReader::Impl::OnStepDone",
    ),
    Mutation(
        "a transfer keeps the staging memory after its step",
        "client/src/state_reader.cc",
        "  if (!question_.has_value() || question_->answered) ReleaseStagingLocked();\n",
    ),
    Mutation(
        "a transfer loses the staging memory at any step",
        "client/src/state_reader.cc",
        "  if (!question_.has_value() || question_->answered) ReleaseStagingLocked();\n",
        "  ReleaseStagingLocked();\n",
    ),
    Mutation(
        "a refusal keeps the staging memory",
        "client/src/state_reader.cc",
        "  ReleaseStagingLocked();\n  if (sender_ == nullptr) return;\n",
        "  if (sender_ == nullptr) return;\n",
    ),
    Mutation(
        "another question keeps the staging memory",
        "client/src/state_reader.cc",
        "  ReleaseStagingLocked();\n  question_ = Question",
        "  question_ = Question",
    ),
    Mutation(
        "an item is hashed from the middle",
        "client/src/state_answer.cc",
        "    hashed_bytes_ = 0;\n",
    ),
    Mutation(
        "a rank that lives fetches the state",
        "client/src/state_fetch.cc",
        '  if (!loading()) {\n    return OutOfOrder(\n        "FetchState',
        '  if (false) {\n    return OutOfOrder(\n        "FetchState',
    ),
    Mutation(
        "a rank without the state marks buckets",
        "client/src/step_progress.cc",
        "  if (connection_.loading()) {\n",
        "  if (false) {\n",
    ),
    Mutation(
        "a state that was fetched is not fetched again",
        "client/src/state_fetch.cc",
        "  if (transfer_.has_value() && transfer_->fetched) {\n",
        "  if (false) {\n",
    ),
    Mutation(
        "FetchState takes staging memory that is in use",
        "client/src/state_fetch.cc",
        "  if (!staging.Acquire(deadline, nullptr)) return NotFetchedInTime();\n",
    ),
    Mutation(
        "FetchState keeps the staging memory",
        "client/src/state_fetch.cc",
        "  const StagingTurn staging_turn(&staging);\n",
    ),
    Mutation(
        "an operation that is refused writes into the staging memory",
        "client/src/job_channel.cc",
        "    if (auto status = AwaitMayBegin(deadline); !status.ok()) return status;\n",
    ),
    Mutation(
        "two calls fetch at once",
        "client/src/state_fetch.cc",
        "  if (!mutex_.AwaitWithDeadline(absl::Condition(&ended), deadline)) return false;\n",
        "  (void)deadline;\n  (void)ended;\n",
    ),
    Mutation(
        "ConfirmState does not pin",
        "client/src/state_fetch.cc",
        "  const StatePin pin(&connection_.state_reader());\n  if (!Begin",
        "  if (!Begin",
    ),
    Mutation(
        "ConfirmState waits for a call before it pins",
        "client/src/state_fetch.cc",
        "  const StatePin pin(&connection_.state_reader());\n"
        "  if (!BeginCall(deadline)) return NotConfirmedInTime(timeout);\n",
        "  if (!BeginCall(deadline)) return NotConfirmedInTime(timeout);\n"
        "  const StatePin pin(&connection_.state_reader());\n",
    ),
    Mutation(
        "a state that nobody serves is confirmed",
        "client/src/state_fetch.cc",
        "  if (!connection_.state_reader().serves()) {\n",
        "  if (false) {\n",
    ),
    Mutation(
        "a transfer that has ended is confirmed",
        "client/src/state_fetch.cc",
        "      if (phase_ == Phase::kAsked) return interrupted();\n",
    ),
    Mutation(
        "a chunk out of order is taken",
        "client/src/state_fetch.cc",
        "chunk.number != transfer->chunks || chunk",
        "chunk",
    ),
    Mutation(
        "an empty chunk is taken",
        "client/src/state_fetch.cc",
        "chunk.bytes == 0 || ",
    ),
    Mutation(
        "a chunk larger than the staging memory is taken",
        "client/src/state_fetch.cc",
        "chunk.bytes > staging.size() ||",
        "false ||",
    ),
    Mutation(
        "a chunk beyond the state is taken",
        "client/src/state_fetch.cc",
        "chunk.bytes > transfer->bytes - transfer->received) {",
        "false) {",
    ),
    Mutation(
        "a new transfer goes into the old one's memory",
        "client/src/state_fetch.cc",
        "    if (number != transfer->number) {\n",
        "    if (!number.has_value()) {\n",
    ),
    Mutation(
        "a malformed state is not refused",
        "client/src/state_fetch.cc",
        "return Refuse(*number, image.status());",
        "return image.status();",
    ),
    Mutation(
        "a chunk of another transfer is taken",
        "client/src/state_fetch.cc",
        "|| transfer_->number != chunk.transfer()) return;",
        ") return;",
    ),
    Mutation(
        "another transfer's end counts",
        "client/src/state_fetch.cc",
        "transfer_.has_value() && transfer_->number == transfer) transfer_.reset();",
        "transfer_.has_value() && transfer != 0) transfer_.reset();",
    ),
    Mutation(
        "another transfer's admission counts",
        "client/src/state_fetch.cc",
        "  if (!transfer_.has_value() || transfer_->number != transfer) return;\n  phase_",
        "  if (transfer == 0) return;\n  phase_",
    ),
    Mutation(
        "after a failure the state is not asked for again",
        "client/src/state_fetch.cc",
        "  if (phase_ == Phase::kAsked) phase_ = Phase::kLoading;\n"
        "  transfer_.reset();\n}\n\nvoid StateFetch::OnSessionEnd",
        "  transfer_.reset();\n}\n\nvoid StateFetch::OnSessionEnd",
    ),
    Mutation(
        "two items may have one name",
        "client/src/state_image.cc",
        "    if (!names.insert(item.name).second) {\n",
        "    if (false) {\n",
    ),
    Mutation(
        "an item may have no memory",
        "client/src/state_image.cc",
        "    if (item.data == nullptr && item.bytes > 0) {\n",
        "    if (false) {\n",
    ),
    Mutation(
        "an item's name may be anything",
        "client/src/state_image.cc",
        "        ValidUtf8(item.name) != item.name) {\n",
        "        false) {\n",
    ),
    Mutation(
        "two items that arrive may have one name",
        "client/src/state_image.cc",
        " ||\n        !names.insert(name).second) {",
        ") {",
    ),
    Mutation(
        "an item that arrives may have no name",
        "client/src/state_image.cc",
        " || name_bytes == 0 ||",
        " ||",
    ),
    Mutation(
        "an item that arrives may have a long name",
        "client/src/state_image.cc",
        "        name_bytes > kMaxStateNameBytes || !reader",
        "        !reader",
    ),
    Mutation(
        "a state that arrives may be longer than its items",
        "client/src/state_image.cc",
        '  if (offset != bytes) return Broken("its length");\n',
    ),
    Mutation(
        "a pause does not end CheckInSync",
        "client/src/sync_check.cc",
        "      if (reading.interrupted()) {\n",
        "      if (false) {\n",
    ),
    Mutation(
        "CheckInSync compares nothing",
        "client/src/sync_check.cc",
        "Compare(root, mine);",
        "kSame;",
    ),
    Mutation(
        "CheckInSync takes any items",
        "client/src/sync_check.cc",
        "  if (auto status = ValidateItems(items); !status.ok()) return status;\n",
    ),
    Mutation(
        "gradients that nobody used are lost",
        "client/src/step_client.cc",
        "progress_.open().Hold(std::move(held));",
        "return absl::OkStatus();",
    ),
    Mutation(
        "gradients that some rank used are put back",
        "client/src/open_step.cc",
        "  held_.erase(std::remove_if(held_.begin(), held_.end(), used), held_.end());\n",
        "  (void)used;\n",
    ),
    Mutation(
        "gradients are put back over those of the next step",
        "client/src/step_client.cc",
        "  restoration_.reset();\n}\n\nabsl::Status StepClient::EndStep",
        "}\n\nabsl::Status StepClient::EndStep",
    ),
)


def with_test(mutation: Mutation) -> Mutation:
    room = next(room for room in TESTS if mutation.file.startswith(room))
    return mutation._replace(test=TESTS[room])


if __name__ == "__main__":
    sys.exit(main(__doc__, [with_test(mutation) for mutation in MUTATIONS], timeout_s=60))
