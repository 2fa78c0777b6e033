// Messages between nodes about workers on GPUs. On one side, the calls of the coordinator, which a
// node checks before its workers get them. On the other, the replies of a node, which the
// coordinator checks. Every call is answered once.

#include <cstdint>
#include <map>
#include <memory>
#include <string>
#include <utility>
#include <vector>

#include "absl/status/status.h"
#include "daemon/arena/semaphore_page.h"
#include "daemon/peer/node_link.h"
#include "daemon/peer/remote_worker.h"
#include "daemon/peer/worker_proxy_server.h"
#include "daemon/rpc/status_mapping.h"
#include "daemon/worker/worker.pb.h"
#include "proto/gradsync/data_type.h"
#include "tests/fuzz/byte_reader.h"
#include "tests/fuzz/check.h"
#include "tests/kit/manual_clock.h"
#include "tests/peer/fake_worker.h"

namespace gradsync::daemon {
namespace {

constexpr int kMaxActions = 200;
constexpr std::uint32_t kWorkers = 2;
constexpr std::uint64_t kArenas = 4;  // 1 and 2 are of the first worker
constexpr std::size_t kBuckets = 2;
constexpr std::uint64_t kCount = 1000;

google::rpc::Status StatusOf(fuzz::ByteReader* reader) {
  const std::uint32_t code = reader->Below(20);
  return ToProto(absl::Status(static_cast<absl::StatusCode>(code), "why"));
}

worker::Call CallOf(fuzz::ByteReader* reader) {
  worker::Call call;
  switch (reader->Below(8)) {
    case 0:
      call.mutable_new_nccl_id();
      break;
    case 1:
      call.mutable_connect()->set_unique_id(std::string(reader->Number(128) % 2000, 'x'));
      call.mutable_connect()->set_rank(static_cast<std::uint32_t>(reader->Number(1)));
      call.mutable_connect()->set_ranks(static_cast<std::uint32_t>(reader->Number(2)));
      call.mutable_connect()->set_limit_ns(reader->Number(1'000'000'000));
      if (reader->Below(4) == 0) call.mutable_connect()->set_algorithm("ring");
      break;
    case 2:
      call.mutable_disconnect();
      break;
    case 3:
      call.mutable_await_ready()->set_step(reader->Number(1));
      call.mutable_await_ready()->set_bucket(static_cast<std::uint32_t>(reader->Number(0)));
      for (std::uint32_t more = reader->Below(3); more > 0; --more) {
        call.mutable_await_ready()->add_arenas(reader->Number(more));
      }
      break;
    case 4:
      call.mutable_give_up_step()->set_step(reader->Number(1));
      break;
    case 5:
    case 6: {
      worker::Launch& launch = *call.mutable_launch();
      launch.set_step(reader->Number(1));
      launch.set_bucket(static_cast<std::uint32_t>(reader->Number(0)));
      const auto type = static_cast<std::uint32_t>(DataType::kBfloat16);
      launch.set_data_type(static_cast<std::uint32_t>(reader->Number(type)));
      launch.set_staging_data_type(static_cast<std::uint32_t>(
          reader->Number(static_cast<std::uint32_t>(DataType::kFloat32))));
      launch.set_count(reader->Number(kCount));
      launch.set_step_buckets(static_cast<std::uint32_t>(reader->Number(kBuckets)));
      launch.set_offset(reader->Byte());
      for (std::uint32_t more = reader->Below(3); more > 0; --more) {
        launch.add_arenas(reader->Number(more));
      }
      break;
    }
    default:
      if (!call.ParseFromString(reader->Bytes(reader->Byte()))) call.Clear();
  }
  return call;
}

// A node whose workers the coordinator calls.
class Node {
 public:
  Node() {
    WorkerProxyServer::Owner owner;
    owner.send = [this](const v1::AttachRequest& message) {
      if (message.has_worker_reply()) ++replies_;
    };
    owner.find = [this](std::uint64_t arena, std::uint32_t bucket, std::uint64_t step) {
      return BucketOf(arena, bucket, step);
    };
    owner.settled = [] {};
    server_ = std::make_shared<WorkerProxyServer>(std::move(owner));
    for (auto& worker : workers_) server_->NumberOf(worker);
  }
  ~Node() {
    // The answers hold the workers.
    for (const auto& worker : workers_) worker->answers.clear();
  }

  void Act(fuzz::ByteReader* reader) {
    FakeWorker& worker = *workers_[reader->Below(kWorkers)];
    switch (reader->Below(8)) {
      case 4:
        if (worker.unanswered() > 0) Answer(&worker, reader->Bool());
        break;
      case 5: {
        v1::WorkerRelease release;
        release.set_worker(reader->Number(1));
        if (reader->Bool()) *release.mutable_status() = StatusOf(reader);
        server_->Release(release);
        break;
      }
      case 6:
        server_->Tick();
        break;
      case 7:
        if (reader->Below(8) == 7) worker.Kill(absl::UnavailableError("it was lost"));
        break;
      default: {
        v1::WorkerCall message;
        message.set_worker(reader->Number(1));
        message.set_id(++calls_);
        message.set_call(reader->Below(8) == 7 ? reader->Bytes(reader->Byte())
                                               : CallOf(reader).SerializeAsString());
        server_->Call(message);
      }
    }
    for (const auto& one : workers_) CheckCalls(one.get());
  }

  void End() {
    server_->End(absl::UnavailableError("the coordinator is lost"));
    for (const auto& worker : workers_) {
      while (worker->unanswered() > 0) Answer(worker.get(), true);
    }
    FUZZ_CHECK(!server_->busy());
    FUZZ_CHECK(replies_ == calls_);
  }

 private:
  absl::StatusOr<ProxiedBucket> BucketOf(std::uint64_t arena, std::uint32_t bucket,
                                         std::uint64_t step) const {
    if (arena == 0 || arena > kArenas || bucket >= kBuckets) {
      return absl::FailedPreconditionError("no bucket");
    }
    return ProxiedBucket{workers_[arena <= 2 ? 0 : 1].get(),
                         DataType::kBfloat16,
                         kCount,
                         4096 + 512 * bucket,
                         8192 + step % 2,
                         kBuckets,
                         semaphores_};
  }

  static void Answer(FakeWorker* worker, bool ok) {
    if (worker->HasEnded()) {
      worker->Kill(worker->EndReason());  // answers everything
    } else if (ok) {
      worker->Answer(WorkerPort::Reply{});
    } else {
      worker->Answer(absl::InternalError("it failed"));
    }
  }

  // The calls of a worker name only its own arenas.
  void CheckCalls(FakeWorker* worker) {
    std::size_t& checked = checked_[worker];
    for (; checked < worker->calls.size(); ++checked) {
      const worker::Call& call = worker->calls[checked];
      FUZZ_CHECK(!call.has_start() && !call.has_add_arena() && !call.has_stop());
      for (const std::uint64_t arena : call.await_ready().arenas()) {
        const auto bucket = BucketOf(arena, call.await_ready().bucket(), call.await_ready().step());
        FUZZ_CHECK(bucket.ok() && bucket->worker == worker);
      }
      if (!call.has_launch()) continue;
      const worker::Launch& launch = call.launch();
      FUZZ_CHECK(launch.measure() && launch.void_contributions() == 0);
      for (const std::uint64_t arena : launch.arenas()) {
        const auto bucket = BucketOf(arena, launch.bucket(), launch.step());
        FUZZ_CHECK(bucket.ok() && bucket->worker == worker);
        FUZZ_CHECK(launch.count() == bucket->count && launch.offset() == bucket->offset);
        FUZZ_CHECK(launch.verdict_offset() == bucket->verdict_offset);
        FUZZ_CHECK(launch.step_buckets() == bucket->step_buckets);
      }
      if (launch.arenas().empty()) FUZZ_CHECK(launch.offset() == 0);
    }
  }

  std::vector<std::shared_ptr<FakeWorker>> workers_{std::make_shared<FakeWorker>(),
                                                    std::make_shared<FakeWorker>()};
  static std::shared_ptr<SemaphorePage> MakeSemaphores() {
    static const auto* const page = [] {
      auto made = SemaphorePage::Create(kBuckets);
      FUZZ_CHECK(made.ok());
      return new std::shared_ptr<SemaphorePage>(*std::move(made));
    }();
    return *page;
  }

  const std::shared_ptr<SemaphorePage> semaphores_ = MakeSemaphores();
  std::shared_ptr<WorkerProxyServer> server_;
  std::uint64_t calls_ = 0;
  std::uint64_t replies_ = 0;
  std::map<FakeWorker*, std::size_t> checked_;
};

class Link final : public NodeLink {
 public:
  void Queue(v1::AttachResponse message) override {
    if (message.has_worker_call()) last_ = message.worker_call();
  }
  void Flush() override {}
  void Close(const absl::Status&) override {}
  const std::string& node_name() const override { return name_; }
  const std::string& address() const override { return name_; }
  const std::string& network() const override { return name_; }
  const EngineLimits& engine_limits() const override { return limits_; }
  std::uint64_t heard_ns() const override { return 0; }
  const v1::WorkerCall& last() const { return last_; }

 private:
  const std::string name_ = "beta";
  const EngineLimits limits_{};
  v1::WorkerCall last_;
};

// The coordinator, which has called workers of another node.
class Coordinator {
 public:
  void Act(fuzz::ByteReader* reader) {
    switch (reader->Below(8)) {
      case 0:
      case 1: {
        const auto worker =
            workers_.Find(link_, reader->Number(1), reader->Bool() ? "GPU-a" : "GPU-b");
        if (worker.ok()) Call(worker->get(), CallOf(reader));
        break;
      }
      case 2:
        workers_.Ended(reader->Number(1), absl::UnavailableError("it has ended"));
        break;
      case 3:
        clock_.Advance(reader->Byte());
        workers_.Tick(clock_.NowNs());
        break;
      default:
        Reply(reader);
    }
  }

  void End() {
    workers_.Lost(absl::UnavailableError("the node is lost"));
    FUZZ_CHECK(answers_ == calls_);
  }

 private:
  void Call(RemoteWorker* worker, worker::Call call) {
    ++calls_;
    worker->Call(std::move(call), {}, [this](const absl::StatusOr<WorkerPort::Reply>&) {
      ++answers_;
      FUZZ_CHECK(answers_ <= calls_);
    });
  }

  void Reply(fuzz::ByteReader* reader) {
    v1::WorkerReply message;
    message.set_worker(reader->Number(link_->last().worker()));
    message.set_id(reader->Number(link_->last().id()));
    message.set_ended(reader->Below(8) == 7);
    if (reader->Below(8) == 7) *message.mutable_status() = StatusOf(reader);
    worker::Reply reply;
    switch (reader->Below(8)) {
      case 0:
      case 1:
        reply.mutable_launch_done()->set_ready_ns(reader->Number(1));
        break;
      case 2:
        reply.mutable_connected();
        break;
      case 3:
        reply.mutable_nccl_id()->set_unique_id(std::string(reader->Number(128) % 2000, 'x'));
        break;
      case 4:
        if (!reply.ParseFromString(reader->Bytes(reader->Byte()))) reply.Clear();
        break;
      default:
        break;
    }
    message.set_reply(reader->Below(16) == 15 ? reader->Bytes(reader->Byte())
                                              : reply.SerializeAsString());
    const std::uint64_t before = answers_;
    const absl::Status taken = workers_.Take(message);
    FUZZ_CHECK(answers_ <= before + 1);
    if (!taken.ok()) FUZZ_CHECK(answers_ == before);
  }

  std::uint64_t calls_ = 0;
  std::uint64_t answers_ = 0;
  ManualClock clock_;
  std::shared_ptr<Link> link_ = std::make_shared<Link>();
  RemoteWorkers workers_{&clock_, 1000};
};

template <class Side>
void Run(fuzz::ByteReader* reader) {
  Side side;
  for (int i = 0; i < kMaxActions && !reader->empty(); ++i) side.Act(reader);
  side.End();
}

}  // namespace
}  // namespace gradsync::daemon

extern "C" int LLVMFuzzerTestOneInput(const std::uint8_t* data, std::size_t size) {
  gradsync::fuzz::ByteReader reader(data, size);
  if (reader.Bool()) {
    gradsync::daemon::Run<gradsync::daemon::Node>(&reader);
  } else {
    gradsync::daemon::Run<gradsync::daemon::Coordinator>(&reader);
  }
  return 0;
}
