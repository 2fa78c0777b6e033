// Accepts the calls of one method with which clients ask the daemon, and bounds how many are open.

#ifndef DAEMON_RPC_QUESTION_DESK_H_
#define DAEMON_RPC_QUESTION_DESK_H_

#include <grpcpp/completion_queue.h>

#include <cstddef>
#include <cstdint>
#include <memory>
#include <utility>
#include <vector>

#include "absl/strings/str_cat.h"
#include "daemon/base/error.h"
#include "daemon/rpc/call_to_end.h"
#include "daemon/rpc/question_stream.h"
#include "daemon/rpc/stream_acceptor.h"
#include "daemon/rpc/stream_count.h"
#include "daemon/rpc/stream_service.h"

namespace gradsync::daemon {

// Each user may have QuestionMethod::per_user calls open. For a further call, CallToEnd() decides:
// one call of the process that has the most of them ends, or the new call is refused. So a health
// probe is answered even if another process of its user has as many calls open as the user may
// have.
//
// Legal calls: Start Tick* Stop. Tick is thread-safe. Outlives the dispatcher of its queue.
template <class In, class Out>
class QuestionDesk {
 public:
  using Stream = QuestionStream<In, Out>;

  // `streams` outlives it.
  QuestionDesk(QuestionMethod<In, Out> method, StreamCount* streams)
      : method_(std::make_shared<const QuestionMethod<In, Out>>(std::move(method))),
        streams_(streams) {}

  // `index`: of the method in `service`.
  void Start(StreamService* service, int index, grpc::ServerCompletionQueue* queue) {
    typename StreamAcceptor<Stream>::Hooks hooks;
    hooks.make = [this] { return std::make_shared<Stream>(method_, streams_->Add()); };
    hooks.request = service->template RequestOf<Stream>(index);
    hooks.accepted = [this](Stream* stream, const auto& open) { MakeRoomFor(stream, open); };
    acceptor_.Start(std::move(hooks), queue);
  }
  void Tick(std::uint64_t now_ns) {
    for (const auto& stream : acceptor_.Open()) stream->Tick(now_ns);
  }
  void Stop() { acceptor_.Stop(); }

 private:
  void MakeRoomFor(Stream* added, const std::vector<std::shared_ptr<Stream>>& open) {
    if (!added->user().has_value()) return;
    std::vector<Stream*> others;  // of this user, the oldest first
    for (const auto& stream : open) {
      if (stream.get() == added || stream->gave_way() || stream->user() != added->user()) continue;
      others.push_back(stream.get());
    }
    if (others.size() < method_->per_user) return;
    std::vector<OpenCall> calls;
    for (Stream* const other : others) calls.push_back({other->pid(), other->AnswerIsDue()});
    const auto ends = CallToEnd(calls, added->pid());
    if (ends.has_value() && others[*ends]->GiveWay()) return;
    added->Refuse(MakeError(
        absl::StatusCode::kResourceExhausted, reason::kQuota,
        absl::StrCat("user ", added->user()->Text(), " waits for ", others.size(), " answers of ",
                     method_->name, ", as many as a user may; ask again when one has come")));
  }

  const std::shared_ptr<const QuestionMethod<In, Out>> method_;
  StreamCount* const streams_;
  StreamAcceptor<Stream> acceptor_;
};

}  // namespace gradsync::daemon

#endif  // DAEMON_RPC_QUESTION_DESK_H_
