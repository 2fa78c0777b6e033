// The Session that a trainer holds.

#include <memory>
#include <string>
#include <utility>
#include <vector>

#include "absl/strings/str_cat.h"
#include "absl/time/clock.h"
#include "absl/time/time.h"
#include "client/include/gradsync/client.h"
#include "client/src/connection.h"
#include "client/src/error.h"
#include "client/src/fork_guard.h"
#include "client/src/layout_registration.h"
#include "client/src/state_fetch.h"
#include "client/src/state_reader.h"
#include "client/src/sync_check.h"

namespace gradsync {
namespace client {
namespace {

// In a forked child only the constants work.
class ConnectedSession final : public Session {
 public:
  explicit ConnectedSession(std::shared_ptr<Connection> connection)
      : connection_(std::move(connection)) {}

  ~ConnectedSession() override {
    if (!InForkedChild()) connection_->Close();
  }

  std::uint32_t rank() const override { return connection_->options().rank; }
  std::uint32_t world_size() const override { return connection_->options().world_size; }
  std::uint64_t generation() const override { return connection_->generation(); }
  std::uint64_t incarnation() const override { return connection_->incarnation(); }
  bool is_replacement() const override { return connection_->replacement(); }

  absl::StatusOr<std::unique_ptr<Layout>> RegisterLayout(const LayoutSpec& spec) override {
    if (InForkedChild()) return ForkedError();
    return client::RegisterLayout(connection_.get(), spec, /*old=*/nullptr);
  }

  absl::StatusOr<std::unique_ptr<Layout>> ReplaceLayout(Layout& old,
                                                        const LayoutSpec& spec) override {
    if (InForkedChild()) return ForkedError();
    return client::RegisterLayout(connection_.get(), spec, &old);
  }

  absl::Status ServeState(std::shared_ptr<TrainerState> source) override {
    if (InForkedChild()) return ForkedError();
    return connection_->state_reader().Serve(std::move(source));
  }
  absl::Status PauseState() override {
    if (InForkedChild()) return ForkedError();
    connection_->state_reader().Interrupt();
    return absl::OkStatus();
  }
  std::uint64_t StatePauses() const override {
    return InForkedChild() ? 0 : connection_->state_reader().interruptions();
  }
  void CallBegan(std::uint64_t pauses) override {
    if (!InForkedChild()) connection_->state_reader().CallBegan(pauses);
  }
  std::vector<CurrentLayout> CurrentLayouts() const override {
    return connection_->current_layouts();
  }
  absl::StatusOr<StateImage> FetchState(absl::Duration timeout) override {
    if (InForkedChild()) return ForkedError();
    return connection_->state_fetch().Fetch(timeout);
  }
  absl::Status ConfirmState(absl::Duration timeout) override {
    return InForkedChild() ? ForkedError() : connection_->state_fetch().Confirm(timeout);
  }
  absl::Status CheckInSync(absl::Span<const StateItem> items, absl::Duration timeout) override {
    if (InForkedChild()) return ForkedError();
    return SyncCheck(connection_.get().get()).Run(items, timeout);
  }

  absl::Status Barrier(absl::Duration timeout) override {
    return InForkedChild() ? ForkedError() : connection_->job_channel().Barrier(timeout);
  }

  absl::Status Broadcast(void* data, std::size_t bytes, std::uint32_t root,
                         absl::Duration timeout) override {
    if (InForkedChild()) return ForkedError();
    return connection_->job_channel().Broadcast(static_cast<std::byte*>(data), bytes, root,
                                                timeout);
  }

  absl::Status AllReduce(void* data, std::size_t count, DataType dtype, ReduceOp op,
                         absl::Duration timeout) override {
    if (InForkedChild()) return ForkedError();
    return connection_->job_channel().AllReduce(static_cast<std::byte*>(data), count, dtype, op,
                                                timeout);
  }

  absl::Status BeginCollective(absl::string_view description) override {
    if (InForkedChild()) return ForkedError();
    return connection_->job_channel().BeginCollective(description);
  }
  absl::Status QueryCollectives(absl::Duration waited) override {
    if (InForkedChild()) return ForkedError();
    return connection_->job_channel().QueryCollectives(waited);
  }

  std::string TakeNotice() override { return InForkedChild() ? "" : connection_->TakeNotice(); }

  bool HasEnded() const override { return InForkedChild() || connection_->HasEnded(); }

  absl::Status AwaitEnd(absl::Duration timeout) const override {
    return InForkedChild() ? ForkedError() : connection_->AwaitEnd(timeout);
  }

  absl::Status Leave() override {
    if (InForkedChild()) return ForkedError();
    StatePin pin(&connection_->state_reader());
    pin.MayChange();
    auto status = connection_->job_channel().SendLeave(/*exit=*/true, absl::InfiniteFuture());
    if (!status.ok()) return status;
    return connection_->AwaitGoodEnd("Leave");
  }

  absl::Status Finish() override {
    if (InForkedChild()) return ForkedError();
    StatePin pin(&connection_->state_reader());
    pin.MayChange();
    if (auto status = connection_->job_channel().SendFinish(); !status.ok()) return status;
    return connection_->AwaitGoodEnd("Finish");
  }

  absl::StatusOr<std::uint32_t> LeaveAndStay(absl::Duration timeout) override {
    if (InForkedChild()) return ForkedError();
    JobChannel& channel = connection_->job_channel();
    const absl::Time deadline = absl::Now() + timeout;
    if (auto status = channel.SendLeave(/*exit=*/false, deadline); !status.ok()) return status;
    return channel.AwaitAllLeft(deadline, timeout);
  }

  SessionStatistics Statistics() const override {
    const SessionCounters& counters = connection_->counters();
    SessionStatistics statistics;
    statistics.steps_complete = counters.steps_complete.load();
    statistics.steps_void = counters.steps_void.load();
    statistics.buckets_marked = counters.buckets_marked.load();
    statistics.bytes_reduced = counters.bytes_reduced.load();
    statistics.mark_ready_total = absl::Nanoseconds(counters.mark_ready_ns.load());
    statistics.exposed_total = absl::Nanoseconds(counters.exposed_ns.load());
    return statistics;
  }

 private:
  // Own synchronization.
  const ParentsReference<Connection> connection_;
};

}  // namespace
}  // namespace client

absl::StatusOr<std::unique_ptr<Session>> Session::Join(const SessionOptions& options) {
  if (client::InForkedChild()) return client::ForkedError();
  auto connection = client::Connection::Open(options);
  if (!connection.ok()) return connection.status();
  return std::make_unique<client::ConnectedSession>(*std::move(connection));
}

}  // namespace gradsync
