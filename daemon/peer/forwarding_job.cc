#include "daemon/peer/forwarding_job.h"

#include <algorithm>
#include <utility>

#include "absl/strings/str_cat.h"
#include "daemon/base/error.h"
#include "daemon/peer/peer_protocol.h"
#include "daemon/peer/peer_status.h"
#include "daemon/rpc/status_mapping.h"
#include "daemon/worker/gpu_arena.h"

namespace gradsync::daemon {

ForwardingJob::ForwardingJob(const JoinRequest& request, Context context,
                             std::shared_ptr<SessionSink> sink,
                             std::function<void(absl::StatusOr<Joined>)> joined)
    : request_(request),
      context_(std::move(context)),
      layouts_(std::make_shared<AgentLayouts>(user(), request.rank, context_.executor)),
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

void ForwardingJob::SendEnded(const absl::Status& why) const {
  v1::AttachRequest message;
  message.mutable_rank_ended()->set_incarnation(request_.incarnation);
  *message.mutable_rank_ended()->mutable_status() = ToProto(why);
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
  absl::Status ended;
  {
    MutexLock lock(&mutex_);
    open_sent_ = true;
    if (end_sent_) ended = own_end_;
  }
  // The coordinator knew no such rank when it heard of the end.
  if (!ended.ok()) SendEnded(ended);
}

// ---- Messages of the coordinator ----------------------------------------------------------------

absl::StatusOr<bool> ForwardingJob::Take(const v1::SessionResponse& response) {
  constexpr std::size_t kMost = kMaxCoordinatorMessageBytes;
  const std::size_t bytes = response.SpaceUsedLong();
  if (bytes > kMost) {
    return MakeError(absl::StatusCode::kInvalidArgument, reason::kMalformed,
                     absl::StrCat("it sent a message to rank ", rank(), " that takes ", bytes,
                                  " bytes of memory; ", kMost, " allowed"));
  }
  switch (response.kind_case()) {
    case v1::SessionResponse::kSessionOpened:
      OnOpened(response.session_opened());
      return false;
    case v1::SessionResponse::kLayoutAssigned:
      if (absl::Status assigned = OnAssigned(response.layout_assigned()); !assigned.ok()) {
        return assigned;
      }
      return false;
    case v1::SessionResponse::kBucketDone:
    case v1::SessionResponse::kChunkReady:
    case v1::SessionResponse::kOperationDone:
    case v1::SessionResponse::kStepState:
    case v1::SessionResponse::kStillWaiting:
      break;
    case v1::SessionResponse::kLayoutReady:
      layouts_->Ready(response.layout_ready().channel());
      break;
    case v1::SessionResponse::kOperationFailed: {
      const auto& failed = response.operation_failed();
      if (failed.layout() && OnLayoutFailed(failed.sequence(), StatusFromPeer(failed.status()))) {
        return false;
      }
      break;
    }
    case v1::SessionResponse::kStepDone:
      layouts_->StepDone(response.step_done());
      break;
    case v1::SessionResponse::kLeaveDone:
      if (absl::Status resumed = layouts_->Resume(response.leave_done()); !resumed.ok()) {
        return resumed;
      }
      break;
    case v1::SessionResponse::kSessionEnding:
      End(StatusFromPeer(response.session_ending().status()));
      return true;
    default:
      return false;
  }
  ForwardToSession(response, bytes);
  return false;
}

void ForwardingJob::ForwardToSession(const v1::SessionResponse& response, std::size_t bytes) {
  std::shared_ptr<SessionSink> sink;
  {
    MutexLock lock(&mutex_);
    sink = sink_;
  }
  if (sink == nullptr) return;
  sink->Queue(ForwardedMessage{std::make_shared<const v1::SessionResponse>(response), bytes});
  sink->Flush();
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

absl::Status ForwardingJob::OnAssigned(const v1::LayoutAssigned& assigned) {
  Pending pending;
  {
    MutexLock lock(&mutex_);
    const auto found = pending_.find(assigned.request_id());
    if (found == pending_.end()) return absl::OkStatus();
    pending = std::move(found->second);
    pending_.erase(found);
  }
  auto plan = PlanLayout(pending.spec, context_.max_buckets);
  if (plan.ok() && !SameBuckets(*plan, assigned)) {
    plan = MakeError(absl::StatusCode::kFailedPrecondition, reason::kVersion,
                     "the coordinator's daemon cuts this layout into other buckets than this "
                     "node's: run the same version on both");
  }
  if (!plan.ok()) {
    SendRefused(assigned.channel(), plan.status());
    pending.answer(plan.status());
    return absl::OkStatus();
  }
  absl::Status status =
      layouts_->Assign(assigned, pending.replaces, *plan, std::move(pending.charge));
  if (!status.ok()) return status;
  pending.answer(Registration{assigned.channel(), *std::move(plan)});
  return absl::OkStatus();
}

bool ForwardingJob::OnLayoutFailed(std::uint64_t request_id, const absl::Status& why) {
  Registered answer;
  {
    MutexLock lock(&mutex_);
    if (const auto found = pending_.find(request_id); found != pending_.end()) {
      answer = std::move(found->second.answer);
      pending_.erase(found);
    }
  }
  if (answer == nullptr) {
    layouts_->Failed(request_id);
    return false;
  }
  answer(why.ok() ? MakeError(absl::StatusCode::kFailedPrecondition, reason::kMalformed,
                              "the coordinator refused the layout without a reason")
                  : why);
  return true;
}

void ForwardingJob::End(const absl::Status& why) {
  std::shared_ptr<SessionSink> sink;
  std::function<void(absl::StatusOr<Joined>)> joined;
  // Destroyed without the lock: they may hold the last references to the session.
  std::map<std::uint64_t, Pending> pending;
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
    // Its SessionOpened may come yet. Then the coordinator keeps the rank until it learns of the
    // end.
    report = !end_sent_;
    end_sent_ = true;
    pending.swap(pending_);
  }
  layouts_->End();
  if (report) SendEnded(why);
  if (joined != nullptr) {
    joined(why.ok() ? absl::AbortedError("the coordinator ended the session at once") : why);
    return;
  }
  sink->Queue(SessionEndMessage{end});
  sink->Flush();
}

bool ForwardingJob::EndIsOverdue(std::uint64_t now_ns, bool excused) {
  MutexLock lock(&mutex_);
  if (!end_sent_ || sink_ == nullptr) return false;
  const std::uint64_t passed_ns =
      end_asked_ns_ == 0 ? 0 : std::min(now_ns - end_asked_ns_, kLongestTickNs);
  end_asked_ns_ = now_ns;
  end_owed_ns_ += excused ? passed_ns / kExcusedPart : passed_ns;
  return end_owed_ns_ > kEndLimitNs;
}

bool ForwardingJob::IsAbandoned() const {
  std::shared_ptr<SessionSink> sink;
  {
    MutexLock lock(&mutex_);
    if (joined_ == nullptr || !open_sent_ || end_sent_) return false;
    sink = sink_;
  }
  return sink->IsAbandoned();
}

// ---- JobPort ------------------------------------------------------------------------------------

void ForwardingJob::RegisterLayout(RankSession, LayoutRequest request, Registered answer) {
  absl::Status refused;
  {
    MutexLock lock(&mutex_);
    if (sink_ == nullptr) return;  // the session's end is on its way
    if (pending_.size() >= kMaxPending || pending_.count(request.request_id) > 0) {
      refused = MakeError(
          absl::StatusCode::kInvalidArgument, reason::kMalformed,
          absl::StrCat("RegisterLayout.request_id ", request.request_id, " is not answered yet"));
    } else {
      pending_[request.request_id] = {std::move(request.spec), request.replaces, answer,
                                      request.charge};
    }
  }
  if (!refused.ok()) return answer(refused);
  for (const auto& message : request.messages) Forward(*message);
}

void ForwardingJob::KeepMemory(RankSession, std::uint32_t channel, std::shared_ptr<void> memory) {
  layouts_->KeepMemory(channel, std::move(memory));
}

void ForwardingJob::RefuseLayout(RankSession, std::uint32_t channel, const absl::Status& why) {
  layouts_->Refuse(channel);
  SendRefused(channel, why);
}

void ForwardingJob::SendRefused(std::uint32_t channel, const absl::Status& why) const {
  v1::AttachRequest message;
  auto* refuse = message.mutable_refuse_layout();
  refuse->set_incarnation(request_.incarnation);
  refuse->set_channel(channel);
  *refuse->mutable_status() = ToProto(why);
  context_.send(std::move(message));
}

absl::Status ForwardingJob::CheckReplaces(RankSession, std::uint32_t) const {
  return absl::OkStatus();  // the coordinator checks it
}

absl::Status ForwardingJob::ArenaMapped(RankSession, std::uint32_t channel, RankMemory memory) {
  const std::shared_ptr<DeviceArena> device = memory.gpu;
  const absl::StatusOr<bool> mapped = layouts_->Mapped(channel, std::move(memory));
  if (!mapped.ok()) return mapped.status();
  if (!*mapped) return absl::OkStatus();
  if (device != nullptr) {
    const GpuArena& gpu = GpuArena::Of(*device);
    v1::AttachRequest message;
    auto* out = message.mutable_gpu_arena_mapped();
    out->set_incarnation(request_.incarnation);
    out->set_channel(channel);
    out->set_arena(gpu.number());
    out->set_worker(context_.workers->NumberOf(gpu.worker()));
    out->set_device(gpu.device());
    context_.send(std::move(message));
    return absl::OkStatus();
  }
  v1::SessionRequest message;
  message.mutable_arena_mapped()->set_channel(channel);
  Forward(std::move(message));
  return absl::OkStatus();
}

absl::Status ForwardingJob::Deliver(const RankMessage& message) {
  const v1::SessionRequest& wire = *message.wire;
  if (wire.has_bucket_ready()) {
    const v1::BucketReady& ready = wire.bucket_ready();
    layouts_->NoteStep(ready.channel(), ready.step(),
                       static_cast<std::size_t>(ready.buckets_size()),
                       /*end=*/false);
  } else if (wire.has_end_step()) {
    layouts_->NoteStep(wire.end_step().channel(), wire.end_step().step(), /*marks=*/0,
                       /*end=*/true);
  } else if (wire.has_release_layout()) {
    layouts_->ReleaseLayout(wire.release_layout().channel());
  } else if (message.staging.data != nullptr) {
    layouts_->KeepStaging(message.staging);
  }
  Forward(wire);
  return absl::OkStatus();
}

void ForwardingJob::WillBeLost(const absl::Status& why) {
  MutexLock lock(&mutex_);
  if (!end_sent_ && own_end_.ok()) own_end_ = why;
}

void ForwardingJob::Lose(RankSession, const absl::Status& why) {
  {
    MutexLock lock(&mutex_);
    if (end_sent_ || sink_ == nullptr) return;
    end_sent_ = true;
    own_end_ = why;
    state_ = RankState::kLost;
  }
  SendEnded(why);
}

RankState ForwardingJob::StateOf(RankSession) const {
  MutexLock lock(&mutex_);
  return state_;
}

}  // namespace gradsync::daemon
