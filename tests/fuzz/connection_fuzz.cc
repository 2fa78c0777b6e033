// What a client does with a daemon's messages as they arrive, in any order and state: the session,
// a registration, the steps of a layout, the job's channel, and a transfer of the model's state.

#include <fcntl.h>
#include <sys/mman.h>
#include <unistd.h>

#include <cstddef>
#include <cstdint>
#include <memory>
#include <string>
#include <utility>

#include "absl/status/status.h"
#include "absl/time/time.h"
#include "client/include/gradsync/client.h"
#include "client/src/connection.h"
#include "client/src/layout_plan.h"
#include "client/src/layout_registration.h"
#include "client/src/mapped_memory.h"
#include "client/src/step_client.h"
#include "gradsync/shared_memory.h"
#include "gradsync/v1/gradsync.pb.h"
#include "tests/fuzz/byte_reader.h"
#include "tests/fuzz/check.h"

namespace gradsync::client {
namespace {

constexpr std::uint32_t kChannel = 1;
constexpr std::size_t kBuckets = 2, kParameters = 3, kArenaBytes = 48;

LayoutPlan Plan() {
  LayoutPlan plan;
  plan.arena_bytes = kArenaBytes;
  plan.buckets = {{DataType::kFloat32, 8, 0, 0}, {DataType::kFloat32, 4, 32, 1}};
  plan.gradients = {{DataType::kFloat32, 4, 0, 0},
                    {DataType::kFloat32, 4, 16, 0},
                    {DataType::kFloat32, 4, 32, 1}};
  return plan;
}

std::shared_ptr<std::byte> Arena() {
  return {new std::byte[kArenaBytes], std::default_delete<std::byte[]>()};
}

std::shared_ptr<MappedMemory> Semaphores() {
  const int memfd = memfd_create("semaphores", MFD_CLOEXEC | MFD_ALLOW_SEALING);
  FUZZ_CHECK(ftruncate(memfd, SemaphoreBytes(kBuckets)) == 0);
  FUZZ_CHECK(fcntl(memfd, F_ADD_SEALS, F_SEAL_SHRINK) == 0);
  auto mapped = MappedMemory::Map(memfd, SemaphoreBytes(kBuckets), "semaphores");
  close(memfd);
  FUZZ_CHECK(mapped.ok());
  return *std::move(mapped);
}

// One rank, and what its trainer does besides. It has no stream, so it makes no call that sends.
class Rank {
 public:
  Rank() { connection_->Attach(kChannel, steps_); }
  ~Rank() { connection_->Withdraw(request_); }

  // False: the stream has ended.
  bool Next(fuzz::ByteReader* reader) {
    switch (reader->Below(8)) {
      case 0:
        Poll(reader->Number(steps_->next_step() - 1));
        break;
      case 1:
        MarkUnused(reader->Below(kParameters));
        break;
      case 2:
        Leave();
        break;
      case 3:
        connection_->Close();  // messages on their way still arrive
        break;
      case 4:
        EndStream(reader);
        return false;
      default:
        Hear(reader->Bytes(reader->Byte()));
    }
    const absl::Status end = connection_->End();
    FUZZ_CHECK(connection_->HasEnded() == !end.ok());
    FUZZ_CHECK(end_.ok() || end == end_);
    end_ = end;
    return true;
  }

 private:
  void Hear(const std::string& bytes) {
    v1::SessionResponse message;
    if (!message.ParseFromString(bytes)) return;
    if (message.has_lease_question()) return;  // its answer needs the stream
    connection_->OnMessage(message);
  }

  void Poll(std::uint64_t step) {
    FUZZ_CHECK(connection_->TakeNotice().size() < 2048);
    const auto assigned = registration_.AwaitAssigned(absl::InfinitePast());
    const auto ready = registration_.AwaitReady(absl::InfinitePast());
    if (ready.ok()) {
      FUZZ_CHECK(assigned.ok() && assigned->channel() == ready->channel());
      if (!begun_) steps_->Begin(ready->first_step());
      begun_ = true;
    }
    const auto result = steps_->WaitStep(step, absl::ZeroDuration());
    FUZZ_CHECK(!result.ok() || result->step == step);
  }

  // The gradient is kept until a verdict says whether any rank used it.
  void MarkUnused(std::size_t parameter) {
    const PlannedSpan& gradient = plan_.gradients[parameter];
    arena_.get()[gradient.offset] = std::byte{1};
    steps_->MarkUnused(steps_->next_step(), parameter).IgnoreError();
  }

  void Leave() {
    if (connection_->left()) {
      connection_->EndLeave();
    } else {
      connection_->BeginLeave("Leave").IgnoreError();
    }
  }

  void EndStream(fuzz::ByteReader* reader) {
    StreamEnd end;
    end.code = static_cast<int>(reader->Below(17));
    end.message = reader->Bytes(reader->Byte());
    end.details = reader->Bytes(reader->left());
    connection_->OnStreamEnd(end);
    FUZZ_CHECK(!connection_->End().ok());
    FUZZ_CHECK(!registration_.AwaitFailure(absl::InfinitePast()).ok());
  }

  const LayoutPlan plan_ = Plan();
  const std::shared_ptr<std::byte> arena_ = Arena();
  const std::shared_ptr<Connection> connection_ = std::make_shared<Connection>(SessionOptions());
  const std::shared_ptr<StepClient> steps_ =
      std::make_shared<StepClient>(connection_, kChannel, "default", plan_, arena_, Semaphores());
  LayoutRegistration registration_;
  const std::uint64_t request_ = connection_->Announce(&registration_);
  bool begun_ = false;
  absl::Status end_;
};

}  // namespace
}  // namespace gradsync::client

extern "C" int LLVMFuzzerTestOneInput(const std::uint8_t* data, std::size_t size) {
  gradsync::fuzz::ByteReader reader(data, size);
  gradsync::client::Rank rank;
  while (!reader.empty() && rank.Next(&reader)) {
  }
  return 0;
}
