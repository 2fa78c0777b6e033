#include "daemon/peer/forwarding_job.h"

#include <algorithm>
#include <utility>

#include "absl/strings/str_cat.h"
#include "daemon/base/error.h"
#include "daemon/peer/rank_messages.h"
#include "daemon/rpc/status_mapping.h"
#include "daemon/worker/gpu_arena.h"

namespace gradsync::daemon {

ForwardingJob::ForwardingJob(const JoinRequest& request, Context context,
                             std::shared_ptr<SessionSink> sink,
                             std::function<void(absl::StatusOr<Joined>)> joined)
    : request_(request),
      context_(std::move(context)),
      sink_(std::move(sink)),
      joined_(std::move(joined)) {}

void ForwardingJob::Forward(v1::SessionRequest request) const {
  v1::AttachRequest message;
  auto* out = message.mutable_rank_request();
  out->set_rank(request_.rank);
  out->set_incarnation(request_.incarnation);
  *out->mutable_request() = std::move(request);
  context_.send(std::move(message));
}

void ForwardingJob::SendOpen() {
  v1::SessionRequest request;
  v1::OpenSession* const open = request.mutable_open_session();
  *open = *request_.message;
  open->clear_token();  // Hello has its hash
  open->clear_coordinator();
  // This node's default, if the client has not set it.
  open->mutable_options()->set_step_timeout_ms(request_.options.step_timeout_ns / 1'000'000);
  Forward(std::move(request));
}

// ---- Messages of the coordinator ----------------------------------------------------------------

bool ForwardingJob::Take(const v1::SessionResponse& response) {
  switch (response.kind_case()) {
    case v1::SessionResponse::kSessionOpened:
      OnOpened(response.session_opened());
      return false;
    case v1::SessionResponse::kLayoutAssigned:
      OnAssigned(response.layout_assigned());
      return false;
    case v1::SessionResponse::kBucketDone:
    case v1::SessionResponse::kChunkReady:
    case v1::SessionResponse::kOperationDone:
      break;
    case v1::SessionResponse::kLayoutReady:
      OnLayoutReady(response.layout_ready());
      break;
    case v1::SessionResponse::kOperationFailed: {
      const auto& failed = response.operation_failed();
      if (failed.layout() && OnLayoutFailed(failed.sequence(), FromProto(failed.status()))) {
        return false;
      }
      break;
    }
    case v1::SessionResponse::kStepDone:
      OnStepDone(response.step_done());
      break;
    case v1::SessionResponse::kLeaveDone:
      OnLeaveDone(response.leave_done());
      break;
    case v1::SessionResponse::kStepState:
      OnStepState(response.step_state());
      return false;
    case v1::SessionResponse::kSessionEnding:
      End(FromProto(response.session_ending().status()));
      return true;
    default:
      return false;
  }
  std::shared_ptr<SessionSink> sink;
  {
    MutexLock lock(&mutex_);
    sink = sink_;
  }
  if (sink == nullptr) return false;
  sink->Queue(ForwardedMessage{std::make_shared<const v1::SessionResponse>(response)});
  sink->Flush();
  return false;
}

void ForwardingJob::OnOpened(const v1::SessionOpened& opened) {
  std::function<void(absl::StatusOr<Joined>)> joined;
  {
    MutexLock lock(&mutex_);
    if (joined_ == nullptr) return;
    joined = std::move(joined_);
    joined_ = nullptr;
    state_ = RankState::kLive;
  }
  joined(Joined{shared_from_this(), opened.generation()});
}

void ForwardingJob::OnAssigned(const v1::LayoutAssigned& assigned) {
  Registered answer;
  absl::StatusOr<LayoutPlan> plan = absl::UnknownError("");
  {
    MutexLock lock(&mutex_);
    const auto found = pending_.find(assigned.request_id());
    if (found == pending_.end()) return;
    Pending pending = std::move(found->second);
    pending_.erase(found);
    answer = std::move(pending.answer);
    plan = PlanLayout(pending.spec, context_.max_buckets);
    if (plan.ok() && !SameBuckets(*plan, assigned)) {
      plan = MakeError(absl::StatusCode::kFailedPrecondition, reason::kVersion,
                       "the coordinator's daemon cuts this layout into other buckets than this "
                       "node's: run the same version on both");
    }
    if (plan.ok()) {
      Layout& layout = layouts_[assigned.channel()];
      layout.request_id = assigned.request_id();
      layout.replaces = pending.replaces;
      layout.plan = *plan;
    }
  }
  if (!plan.ok()) {
    RefuseLayout(rank(), assigned.channel(), plan.status());
    answer(plan.status());
    return;
  }
  answer(Registration{assigned.channel(), *std::move(plan)});
}

void ForwardingJob::OnLayoutReady(const v1::LayoutReady& ready) {
  MutexLock lock(&mutex_);
  const auto found = layouts_.find(ready.channel());
  if (found == layouts_.end()) return;
  const auto replaced = layouts_.find(found->second.replaces);
  if (found->second.replaces == 0 || replaced == layouts_.end()) return;
  ReleaseLocked(&replaced->second);
  layouts_.erase(replaced);
}

bool ForwardingJob::OnLayoutFailed(std::uint64_t request_id, const absl::Status& why) {
  Registered answer;
  {
    MutexLock lock(&mutex_);
    if (const auto found = pending_.find(request_id); found != pending_.end()) {
      answer = std::move(found->second.answer);
      pending_.erase(found);
    } else {
      for (auto it = layouts_.begin(); it != layouts_.end(); ++it) {
        if (it->second.request_id != request_id) continue;
        ReleaseLocked(&it->second);
        layouts_.erase(it);
        break;
      }
      return false;
    }
  }
  answer(why);
  return true;
}

void ForwardingJob::OnStepDone(const v1::StepDone& done) {
  MutexLock lock(&mutex_);
  const auto found = layouts_.find(done.channel());
  if (found == layouts_.end()) return;
  Layout& layout = found->second;
  layout.decided_step = std::max(layout.decided_step, done.step());
  if (done.verdict() == v1::VERDICT_COMPLETE || layout.memory.semaphores == nullptr) return;
  // A void step uses up its number. Waits for it are released, and see that it is void.
  layout.memory.semaphores->DeclareVoid(done.step());
  for (std::size_t i = 0; i < layout.plan.buckets.size(); ++i) {
    layout.memory.semaphores->SignalDone(i, done.step());
  }
}

void ForwardingJob::OnLeaveDone(const v1::LeaveDone& done) {
  MutexLock lock(&mutex_);
  state_ = RankState::kLive;
  for (const auto& next : done.next_steps()) {
    const auto found = layouts_.find(next.channel());
    if (found == layouts_.end()) continue;
    found->second.decided_step = std::max(found->second.decided_step, next.step() - 1);
    if (found->second.memory.semaphores == nullptr) continue;
    for (std::size_t i = 0; i < found->second.plan.buckets.size(); ++i) {
      found->second.memory.semaphores->SignalDone(i, next.step() - 1);
    }
  }
}

void ForwardingJob::OnStepState(const v1::StepState& state) {
  std::function<void(std::string)> answer;
  {
    MutexLock lock(&mutex_);
    const auto found = std::find_if(questions_.begin(), questions_.end(), [&](const auto& asked) {
      return asked.channel == state.channel() && asked.step == state.step();
    });
    if (found == questions_.end()) return;
    answer = std::move(found->answer);
    questions_.erase(found);
  }
  answer(state.missing());
}

void ForwardingJob::End(const absl::Status& why) {
  std::shared_ptr<SessionSink> sink;
  std::function<void(absl::StatusOr<Joined>)> joined;
  // Destroyed without the lock: they may hold the last references to the session.
  std::map<std::uint64_t, Pending> pending;
  std::vector<Question> questions;
  bool report = false;
  absl::Status end = why;
  {
    MutexLock lock(&mutex_);
    sink = std::move(sink_);
    sink_ = nullptr;
    joined = std::move(joined_);
    joined_ = nullptr;
    if (joined == nullptr && sink == nullptr) return;
    state_ = why.ok() ? RankState::kExited : RankState::kLost;
    // STEP_IN_DOUBT outweighs both reasons.
    const bool in_doubt = DetailsOf(why).reason == reason::kStepInDoubt;
    if (!why.ok() && !own_end_.ok() && !in_doubt) end = own_end_;
    report = !end_sent_ && joined == nullptr;
    end_sent_ = true;
    pending.swap(pending_);
    questions.swap(questions_);
    staging_ = StagingMemory{};
    for (auto& [channel, layout] : layouts_) ReleaseLocked(&layout);
    layouts_.clear();
  }
  if (report) {
    v1::AttachRequest message;
    message.mutable_rank_ended()->set_incarnation(request_.incarnation);
    *message.mutable_rank_ended()->mutable_status() = ToProto(why);
    context_.send(std::move(message));
  }
  if (joined != nullptr) {
    joined(why.ok() ? absl::AbortedError("the coordinator ended the session at once") : why);
    return;
  }
  sink->Queue(SessionEndMessage{end});
  sink->Flush();
}

void ForwardingJob::ReleaseLocked(Layout* layout) {
  if (layout->held == nullptr && layout->memory.arena == nullptr) return;
  context_.executor->Run([held = std::move(layout->held), memory = std::move(layout->memory)] {});
  layout->held = nullptr;
  layout->memory = RankMemory{};
}

bool ForwardingJob::InDoubt() const {
  MutexLock lock(&mutex_);
  return std::any_of(layouts_.begin(), layouts_.end(), [](const auto& entry) {
    const Layout& layout = entry.second;
    if (layout.ended_step > layout.decided_step) return true;
    return layout.memory.gpu != nullptr && layout.begun_step > layout.decided_step &&
           layout.marks >= layout.plan.buckets.size();
  });
}

bool ForwardingJob::InStep() const {
  MutexLock lock(&mutex_);
  return std::any_of(layouts_.begin(), layouts_.end(), [](const auto& entry) {
    return entry.second.begun_step > entry.second.decided_step;
  });
}

absl::Status ForwardingJob::WrongLaunch(absl::string_view what) const {
  return MakeError(absl::StatusCode::kFailedPrecondition, reason::kMalformed,
                   absl::StrCat("the coordinator launched on rank ", rank(), " ", what));
}

absl::StatusOr<ForwardingJob::LaunchMemory> ForwardingJob::MemoryOf(
    const v1::Launch& launch) const {
  const auto dtype = static_cast<DataType>(launch.dtype());
  MutexLock lock(&mutex_);
  if (launch.channel() == 0) {
    const std::uint64_t item = launch.has_root_node() ? 1 : ItemSize(dtype);
    if (staging_.data == nullptr || item == 0 || launch.count() > staging_.bytes / item) {
      return WrongLaunch("more than its staging memory holds");
    }
    return LaunchMemory{staging_.data, staging_.keep, nullptr};
  }
  const auto found = layouts_.find(launch.channel());
  if (found == layouts_.end() || found->second.memory.data == nullptr ||
      launch.bucket() >= found->second.plan.buckets.size()) {
    return WrongLaunch(absl::StrCat("bucket ", launch.bucket(), " of channel ", launch.channel(),
                                    ", which it does not have"));
  }
  const Layout& layout = found->second;
  const PlannedBucket& bucket = layout.plan.buckets[launch.bucket()];
  if (bucket.dtype != dtype || bucket.count != launch.count()) {
    return WrongLaunch(
        absl::StrCat("bucket ", launch.bucket(), ", which has another type or size"));
  }
  return LaunchMemory{layout.memory.data + bucket.offset, layout.memory.arena,
                      layout.memory.semaphores};
}

absl::StatusOr<ProxiedBucket> ForwardingJob::BucketOf(std::uint64_t arena, std::uint32_t bucket,
                                                      std::uint64_t step) const {
  MutexLock lock(&mutex_);
  for (const auto& [channel, layout] : layouts_) {
    if (layout.memory.gpu == nullptr) continue;
    const GpuArena& gpu = GpuArena::Of(*layout.memory.gpu);
    if (gpu.number() != arena) continue;
    const std::vector<PlannedBucket>& buckets = layout.plan.buckets;
    if (bucket >= buckets.size()) {
      return WrongLaunch(
          absl::StrCat("bucket ", bucket, " of channel ", channel, ", which has ", buckets.size()));
    }
    const PlannedBucket& planned = buckets[bucket];
    return ProxiedBucket{gpu.worker().get(),
                         planned.dtype,
                         planned.count,
                         planned.offset,
                         layout.plan.VerdictOffset(step),
                         buckets.size(),
                         layout.memory.semaphores};
  }
  return absl::NotFoundError("");
}

// ---- JobPort ------------------------------------------------------------------------------------

void ForwardingJob::RegisterLayout(std::uint32_t, LayoutRequest request, Registered answer) {
  v1::SessionRequest message;
  *message.mutable_register_layout() = *request.message;
  absl::Status refused;
  {
    MutexLock lock(&mutex_);
    if (sink_ == nullptr) return;  // the session's end is on its way
    if (pending_.size() >= kMaxPending || pending_.count(request.request_id) > 0) {
      refused = MakeError(
          absl::StatusCode::kInvalidArgument, reason::kMalformed,
          absl::StrCat("RegisterLayout.request_id ", request.request_id, " is not answered yet"));
    } else {
      pending_[request.request_id] = {std::move(request.spec), request.replaces, answer};
    }
  }
  if (!refused.ok()) return answer(refused);
  Forward(std::move(message));
}

void ForwardingJob::Hold(std::uint32_t, std::uint32_t channel, std::shared_ptr<void> memory) {
  MutexLock lock(&mutex_);
  const auto found = layouts_.find(channel);
  if (found == layouts_.end()) {
    context_.executor->Run([memory = std::move(memory)] {});
  } else {
    found->second.held = std::move(memory);
  }
}

void ForwardingJob::RefuseLayout(std::uint32_t, std::uint32_t channel, const absl::Status& why) {
  {
    MutexLock lock(&mutex_);
    layouts_.erase(channel);
  }
  v1::AttachRequest message;
  auto* refuse = message.mutable_refuse_layout();
  refuse->set_incarnation(request_.incarnation);
  refuse->set_channel(channel);
  *refuse->mutable_status() = ToProto(why);
  context_.send(std::move(message));
}

absl::Status ForwardingJob::CheckReplaces(std::uint32_t, std::uint32_t) const {
  return absl::OkStatus();  // the coordinator checks it
}

absl::Status ForwardingJob::ArenaMapped(std::uint32_t, std::uint32_t channel, RankMemory memory) {
  const std::shared_ptr<DeviceArena> device = memory.gpu;
  {
    MutexLock lock(&mutex_);
    const auto found = layouts_.find(channel);
    if (found == layouts_.end()) return absl::OkStatus();  // its agreement has just failed
    found->second.memory = std::move(memory);
  }
  if (device != nullptr) {
    const GpuArena& gpu = GpuArena::Of(*device);
    v1::AttachRequest mapped;
    auto* out = mapped.mutable_gpu_arena_mapped();
    out->set_incarnation(request_.incarnation);
    out->set_channel(channel);
    out->set_arena(gpu.number());
    out->set_worker(context_.workers->NumberOf(gpu.worker()));
    out->set_device(gpu.device());
    context_.send(std::move(mapped));
    return absl::OkStatus();
  }
  v1::SessionRequest message;
  message.mutable_arena_mapped()->set_channel(channel);
  Forward(std::move(message));
  return absl::OkStatus();
}

absl::Status ForwardingJob::MarkReady(std::uint32_t, std::uint32_t channel, std::uint64_t step,
                                      absl::Span<const std::uint32_t> buckets) {
  NoteStep(channel, step, buckets.size(), /*end=*/false);
  v1::SessionRequest message;
  auto* ready = message.mutable_bucket_ready();
  ready->set_channel(channel);
  ready->set_step(step);
  *ready->mutable_buckets() = {buckets.begin(), buckets.end()};
  Forward(std::move(message));
  return absl::OkStatus();
}

absl::Status ForwardingJob::EndStep(std::uint32_t, std::uint32_t channel, std::uint64_t step,
                                    absl::string_view used_map) {
  ForwardEnd(channel, step, used_map, /*ready_rest=*/false);
  return absl::OkStatus();
}

absl::Status ForwardingJob::FinishStep(std::uint32_t, std::uint32_t channel, std::uint64_t step,
                                       absl::string_view used_map) {
  ForwardEnd(channel, step, used_map, /*ready_rest=*/true);
  return absl::OkStatus();
}

void ForwardingJob::NoteStep(std::uint32_t channel, std::uint64_t step, std::size_t marks,
                             bool end) {
  MutexLock lock(&mutex_);
  const auto found = layouts_.find(channel);
  if (found == layouts_.end() || step < found->second.begun_step) return;
  Layout& layout = found->second;
  if (step > layout.begun_step) layout.marks = 0;
  layout.begun_step = step;
  layout.marks += marks;
  if (end) layout.ended_step = step;
}

void ForwardingJob::ForwardEnd(std::uint32_t channel, std::uint64_t step,
                               absl::string_view used_map, bool ready_rest) {
  NoteStep(channel, step, /*marks=*/0, /*end=*/true);
  v1::SessionRequest message;
  auto* end = message.mutable_end_step();
  end->set_channel(channel);
  end->set_step(step);
  end->set_used_map(std::string(used_map));
  end->set_ready_rest(ready_rest);
  Forward(std::move(message));
}

absl::Status ForwardingJob::AbandonStep(std::uint32_t, std::uint32_t channel, std::uint64_t step,
                                        absl::string_view reason) {
  v1::SessionRequest message;
  auto* abandon = message.mutable_abandon_step();
  abandon->set_channel(channel);
  abandon->set_step(step);
  abandon->set_reason(std::string(reason));
  Forward(std::move(message));
  return absl::OkStatus();
}

absl::Status ForwardingJob::Operate(std::uint32_t, std::uint64_t sequence,
                                    const OperationSpec& spec, StagingMemory staging,
                                    std::uint64_t deadline_ns) {
  {
    MutexLock lock(&mutex_);
    staging_ = std::move(staging);
  }
  v1::SessionRequest message;
  EncodeOperation(sequence, spec, deadline_ns, context_.clock->NowNs(), &message);
  Forward(std::move(message));
  return absl::OkStatus();
}

absl::Status ForwardingJob::ChunkWritten(std::uint32_t, std::uint64_t sequence, std::uint64_t chunk,
                                         std::uint64_t bytes) {
  v1::SessionRequest message;
  message.mutable_chunk_written()->set_sequence(sequence);
  message.mutable_chunk_written()->set_chunk(chunk);
  message.mutable_chunk_written()->set_bytes(bytes);
  Forward(std::move(message));
  return absl::OkStatus();
}

absl::Status ForwardingJob::ChunkRead(std::uint32_t, std::uint64_t sequence, std::uint64_t chunk) {
  v1::SessionRequest message;
  message.mutable_chunk_read()->set_sequence(sequence);
  message.mutable_chunk_read()->set_chunk(chunk);
  Forward(std::move(message));
  return absl::OkStatus();
}

absl::Status ForwardingJob::Leave(std::uint32_t, bool exit) {
  v1::SessionRequest message;
  message.mutable_leave()->set_exit(exit);
  Forward(std::move(message));
  return absl::OkStatus();
}

void ForwardingJob::AskMissing(std::uint32_t channel, std::uint64_t step,
                               std::function<void(std::string)> answer) {
  {
    MutexLock lock(&mutex_);
    if (questions_.size() < kMaxPending) {
      questions_.push_back({channel, step, std::move(answer)});
      answer = nullptr;
    }
  }
  if (answer != nullptr) return answer("");
  v1::SessionRequest message;
  message.mutable_query_step()->set_channel(channel);
  message.mutable_query_step()->set_step(step);
  Forward(std::move(message));
}

void ForwardingJob::WillBeLost(const absl::Status& why) {
  MutexLock lock(&mutex_);
  if (!end_sent_ && own_end_.ok()) own_end_ = why;
}

void ForwardingJob::Lose(std::uint32_t, std::uint64_t, const absl::Status& why) {
  {
    MutexLock lock(&mutex_);
    if (end_sent_ || sink_ == nullptr) return;
    end_sent_ = true;
    own_end_ = why;
    state_ = RankState::kLost;
  }
  v1::AttachRequest message;
  message.mutable_rank_ended()->set_incarnation(request_.incarnation);
  *message.mutable_rank_ended()->mutable_status() = ToProto(why);
  context_.send(std::move(message));
}

RankState ForwardingJob::StateOf(std::uint32_t) const {
  MutexLock lock(&mutex_);
  return state_;
}

}  // namespace gradsync::daemon
