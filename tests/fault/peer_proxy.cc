#include "tests/fault/peer_proxy.h"

#include <algorithm>
#include <chrono>
#include <utility>

#include "daemon/worker/worker.pb.h"
#include "gtest/gtest.h"
#include "tests/kit/deadline.h"

namespace gradsync::fault {
namespace {

std::string KindOf(const google::protobuf::Message& message);

template <class Embedded>
std::string KindOfBytes(const std::string& bytes) {
  Embedded message;
  EXPECT_TRUE(message.ParseFromString(bytes));
  return KindOf(message);
}

// The kind of a worker's message that this message embeds; "" if it embeds none.
std::string EmbeddedKind(const google::protobuf::Message& message) {
  if (const auto* const call = dynamic_cast<const v1::WorkerCall*>(&message)) {
    return KindOfBytes<worker::Call>(call->call());
  }
  if (const auto* const reply = dynamic_cast<const v1::WorkerReply*>(&message)) {
    return KindOfBytes<worker::Reply>(reply->reply());
  }
  return "";
}

// The name of the set field of the message's `kind`, and of the message that this one carries.
std::string KindOf(const google::protobuf::Message& message) {
  const auto* const reflection = message.GetReflection();
  const auto* const kind = message.GetDescriptor()->FindOneofByName("kind");
  const auto* const field = reflection->GetOneofFieldDescriptor(message, kind);
  if (field == nullptr) return "";
  if (field->message_type() == nullptr) return field->name();
  const auto& inner = reflection->GetMessage(message, field);
  const std::string embedded = EmbeddedKind(inner);
  if (!embedded.empty()) return field->name() + "." + embedded;
  for (const char* carried : {"request", "response"}) {
    const auto* const rank = inner.GetDescriptor()->FindFieldByName(carried);
    if (rank != nullptr && rank->message_type() != nullptr) {
      return field->name() + "." + KindOf(inner.GetReflection()->GetMessage(inner, rank));
    }
  }
  return field->name();
}

}  // namespace

bool WirePoint::FromAgent() const {
  const std::string field = kind.substr(0, kind.find('.'));
  return v1::AttachRequest::descriptor()->FindFieldByName(field) != nullptr;
}

// Relays one stream. It has two chains, one per direction. Each chain reads a message from one
// side, writes it to the other, and only then reads the next. Deletes itself when both sides are
// done.
class PeerProxy::Relay final
    : public grpc::ServerBidiReactor<v1::AttachRequest, v1::AttachResponse> {
 public:
  explicit Relay(PeerProxy* proxy) : proxy_(proxy), up_(this) {
    proxy_->coordinator_->async()->Attach(&up_.context, &up_);
    up_.AddMultipleHolds(2);  // one per chain
    up_.StartRead(&response_);
    up_.StartCall();
    StartRead(&request_);
  }

 private:
  struct Up final : public grpc::ClientBidiReactor<v1::AttachRequest, v1::AttachResponse> {
    explicit Up(Relay* relay) : relay(relay) {}
    void OnReadDone(bool ok) override { relay->OnResponse(ok); }
    void OnWriteDone(bool ok) override { relay->OnRequestWritten(ok); }
    void OnDone(const grpc::Status&) override {
      relay->FinishDown();
      relay->SideDone();
    }

    Relay* const relay;
    grpc::ClientContext context;
  };

  // ---- From the agent
  void OnReadDone(bool ok) override {
    if (!ok) {
      up_.StartWritesDone();
      up_.RemoveHold();
      return;
    }
    proxy_->Pass(KindOf(request_), [this](bool deliver) {
      if (deliver) return up_.StartWrite(&request_);
      Cut();
      up_.RemoveHold();
    });
  }
  void OnRequestWritten(bool ok) {
    {
      const std::lock_guard<std::mutex> lock(mutex_);
      if (ok && !finished_) return StartRead(&request_);
    }
    up_.RemoveHold();
  }

  // ---- From the coordinator
  void OnResponse(bool ok) {
    if (!ok) {
      FinishDown();
      up_.RemoveHold();
      return;
    }
    proxy_->Pass(KindOf(response_), [this](bool deliver) {
      if (deliver) {
        const std::lock_guard<std::mutex> lock(mutex_);
        if (!finished_) return StartWrite(&response_);
      } else {
        Cut();
      }
      up_.RemoveHold();
    });
  }
  // Reads on even if the agent is lost: unread messages would delay the end of the coordinator's
  // call.
  void OnWriteDone(bool) override { up_.StartRead(&response_); }

  // ---- The end
  void OnDone() override { SideDone(); }
  void Cut() {
    up_.context.TryCancel();
    FinishDown();
  }
  void FinishDown() {
    const std::lock_guard<std::mutex> lock(mutex_);
    if (finished_) return;
    finished_ = true;
    Finish(grpc::Status(grpc::StatusCode::UNAVAILABLE, "the stream was cut"));
  }
  void SideDone() {
    {
      const std::lock_guard<std::mutex> lock(mutex_);
      if (--sides_ > 0) return;
    }
    PeerProxy* const proxy = proxy_;
    delete this;
    proxy->RelayEnded();
  }

  PeerProxy* const proxy_;
  v1::AttachRequest request_;
  v1::AttachResponse response_;
  Up up_;
  std::mutex mutex_;
  bool finished_ = false;  // Finish() was called: no more reads or writes on the agent's side
  int sides_ = 2;
};

PeerProxy::PeerProxy(const std::string& coordinator, std::optional<WirePoint> point)
    : point_(std::move(point)) {
  grpc::ChannelArguments arguments;
  arguments.SetInt(GRPC_ARG_USE_LOCAL_SUBCHANNEL_POOL, 1);
  coordinator_ = v1::Peer::NewStub(
      grpc::CreateCustomChannel(coordinator, grpc::InsecureChannelCredentials(), arguments));
  int port = 0;
  grpc::ServerBuilder builder;
  builder.AddListeningPort("127.0.0.1:0", grpc::InsecureServerCredentials(), &port);
  builder.RegisterService(this);
  server_ = builder.BuildAndStart();
  address_ = "127.0.0.1:" + std::to_string(port);
}

PeerProxy::~PeerProxy() {
  {
    const std::lock_guard<std::mutex> lock(mutex_);
    was_held_ = true;
  }
  Release(/*deliver=*/false);
  server_->Shutdown(std::chrono::system_clock::now());
  server_->Wait();
  // Waits until the coordinator's side of every call has ended.
  std::unique_lock<std::mutex> lock(mutex_);
  EXPECT_TRUE(changed_.wait_for(lock, std::chrono::milliseconds(kPatienceMs),
                                [&] { return relays_ == 0; }));
}

void PeerProxy::RelayEnded() {
  const std::lock_guard<std::mutex> lock(mutex_);
  --relays_;
  changed_.notify_all();
}

grpc::ServerBidiReactor<v1::AttachRequest, v1::AttachResponse>* PeerProxy::Attach(
    grpc::CallbackServerContext*) {
  {
    const std::lock_guard<std::mutex> lock(mutex_);
    ++relays_;
  }
  return new Relay(this);
}

void PeerProxy::Pass(const std::string& kind, Verdict verdict) {
  if (kind != "ping" && kind != "pong") {
    const std::lock_guard<std::mutex> lock(mutex_);
    const int ordinal = ++passed_[kind];
    if (point_.has_value() && *point_ == WirePoint{kind, ordinal} && !was_held_) {
      held_ = std::move(verdict);
      was_held_ = true;
      changed_.notify_all();
      return;
    }
    changed_.notify_all();
  }
  verdict(true);
}

bool PeerProxy::AwaitHeld(const std::function<bool()>& ended) {
  std::unique_lock<std::mutex> lock(mutex_);
  EXPECT_TRUE(changed_.wait_for(lock, std::chrono::milliseconds(kPatienceMs),
                                [&] { return held_ != nullptr || ended(); }));
  return held_ != nullptr;
}

void PeerProxy::Wake() {
  const std::lock_guard<std::mutex> lock(mutex_);
  changed_.notify_all();
}

void PeerProxy::Release(bool deliver) {
  Verdict verdict;
  {
    const std::lock_guard<std::mutex> lock(mutex_);
    verdict = std::exchange(held_, nullptr);
  }
  if (verdict != nullptr) verdict(deliver);
}

std::map<std::string, int> PeerProxy::AwaitPassed(const std::map<std::string, int>& counts) {
  const auto all = [&] {
    return std::all_of(counts.begin(), counts.end(), [this](const auto& count) {
      const auto found = passed_.find(count.first);
      return found != passed_.end() && found->second >= count.second;
    });
  };
  std::unique_lock<std::mutex> lock(mutex_);
  EXPECT_TRUE(changed_.wait_for(lock, std::chrono::milliseconds(kPatienceMs), all));
  return passed_;
}

}  // namespace gradsync::fault
