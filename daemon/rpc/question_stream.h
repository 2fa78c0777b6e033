// A call with which a client asks the daemon something: Health, Introspection or reflection.
//
// Each of these methods is served as a stream, even if its form is unary: on the wire a unary call
// is a stream with one message each way. So a call holds no thread while its client sends nothing
// or reads nothing.

#ifndef DAEMON_RPC_QUESTION_STREAM_H_
#define DAEMON_RPC_QUESTION_STREAM_H_

#include <grpcpp/impl/codegen/proto_utils.h>

#include <atomic>
#include <cstddef>
#include <cstdint>
#include <functional>
#include <memory>
#include <optional>
#include <string>
#include <utility>

#include "absl/status/status.h"
#include "absl/strings/str_cat.h"
#include "daemon/arena/arena_quota.h"
#include "daemon/base/clock.h"
#include "daemon/base/error.h"
#include "daemon/base/tenant.h"
#include "daemon/rpc/connections.h"
#include "daemon/rpc/message_memory.h"
#include "daemon/rpc/server_stream.h"

namespace gradsync::daemon {

template <class In, class Out>
class QuestionStream;

// What the calls of one method have in common. Constant. The streams own it, since an answer may
// come after the service has ended. Its objects outlive the streams.
template <class In, class Out>
struct QuestionMethod {
  std::string name;  // "gradsync.v1.Introspection/GetStatus"
  const Connections* connections = nullptr;
  const Clock* clock = nullptr;
  // The most calls of a user that are open at a time.
  std::size_t per_user = 0;
  // A call whose client does not wait for an answer is cancelled this long after the client has
  // last said something. 0: never.
  std::uint64_t patience_ns = 0;
  // True if a call has one request.
  bool asks_once = true;
  // Answers a request, now or later. Called by the queue's thread, so it must not block.
  std::function<void(const std::shared_ptr<QuestionStream<In, Out>>& stream,
                     const ClientProcess& asker, const In& request)>
      ask;
};

// The most that a client may leave unread. A call's last answer may be longer: its memory is
// charged to the asking user.
inline constexpr UnreadLimits kAnswersUnread{16, std::size_t{1} << 20};

// Thread-safe. Owns itself while gRPC uses it.
template <class In, class Out>
class QuestionStream final : public ServerStream<In, Out> {
 public:
  // Holds `counted` as long as it exists.
  QuestionStream(std::shared_ptr<const QuestionMethod<In, Out>> method,
                 std::shared_ptr<void> counted)
      : ServerStream<In, Out>(kAnswersUnread),
        method_(std::move(method)),
        counted_(std::move(counted)) {}

  // ---- Answers to `ask`
  void Answer(Out answer) {
    NoteAnswer();
    this->Send(std::move(answer));
  }
  // `charge` is held for the answer's memory until the call has ended.
  void AnswerLast(Out answer, ArenaQuota::Reservation charge = {}) {
    charge_ = std::move(charge);
    NoteAnswer();
    this->QueueEnd(absl::OkStatus(), std::move(answer));
    this->Flush();
  }
  void Refuse(const absl::Status& why) {
    NoteAnswer();
    this->Close(why);
  }

  // The asking user. Empty if the caller is unknown; then the call has ended.
  std::optional<Tenant> user() const {
    if (!asker_.has_value()) return std::nullopt;
    return asker_->tenant();
  }
  // The asking process; 0: unknown.
  pid_t pid() const { return asker_.has_value() ? asker_->pid : 0; }
  // True if the client waits for an answer, and not the daemon for the client.
  bool AnswerIsDue() const { return due_.load(); }

  // Ends the call to make room. False if it has done so before.
  bool GiveWay() {
    if (gave_way_.exchange(true)) return false;
    this->Cancel();
    return true;
  }
  bool gave_way() const { return gave_way_.load(); }
  // Ends the call if its client takes too long.
  void Tick(std::uint64_t now_ns) {
    const bool overdue =
        method_->patience_ns != 0 && now_ns > heard_ns_.load() + method_->patience_ns;
    if (overdue && !AnswerIsDue()) GiveWay();
  }

 private:
  // From now on the client has time to read.
  void NoteAnswer() {
    heard_ns_.store(method_->clock->NowNs());
    due_.store(false);
  }
  std::shared_ptr<ClientInput> CallersInput() const override {
    return method_->connections->Input(this->caller());
  }

  void OnAccepted() override {
    heard_ns_.store(method_->clock->NowNs());
    asker_ = method_->connections->Find(this->caller());
    if (asker_.has_value()) return;
    this->QueueEnd(
        MakeError(absl::StatusCode::kUnavailable, reason::kCredentials,
                  "the connection has closed, or did not come through the daemon's socket"));
  }

  void OnMessage(const In& request) override {
    if (this->Ended() || (method_->asks_once && asked_)) return;
    asked_ = true;
    due_.store(true);
    heard_ns_.store(method_->clock->NowNs());
    method_->ask(std::static_pointer_cast<QuestionStream>(this->shared_from_this()), *asker_,
                 request);
  }

  void OnEnd(const absl::Status& /*end*/) override {
    if (asked_ || !method_->asks_once) return;
    this->QueueEnd(MakeError(absl::StatusCode::kInvalidArgument, reason::kMalformed,
                             absl::StrCat(method_->name, " without a request")));
  }
  // A client that asks once half-closes before it has the answer.
  bool EndsByItself() const override { return method_->asks_once; }
  bool AsksForDone() const override { return true; }

  std::size_t BytesOf(const Out& answer) const override { return MemoryOf(answer); }
  void ToWire(Out answer, Out* out) override { *out = std::move(answer); }

  const std::shared_ptr<const QuestionMethod<In, Out>> method_;
  const std::shared_ptr<void> counted_;
  std::optional<ClientProcess> asker_;  // constant after OnAccepted()
  std::atomic<std::uint64_t> heard_ns_{
      0};  // when the client has last said something, or was answered
  std::atomic<bool> due_{false};
  std::atomic<bool> gave_way_{false};
  ArenaQuota::Reservation charge_;  // set once, by AnswerLast()
  bool asked_ = false;              // used by the queue's thread alone
};

}  // namespace gradsync::daemon

#endif  // DAEMON_RPC_QUESTION_STREAM_H_
