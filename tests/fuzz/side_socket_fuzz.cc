// A message on the side socket: decoded, and its nonce claimed, as the accept loop does.
//
// The first byte says which nonce the message gets: one that is offered, one that was offered to
// another process, or the message's own.

#include <unistd.h>

#include <cstdint>
#include <cstring>
#include <memory>
#include <string>
#include <utility>

#include "daemon/arena/arena_quota.h"
#include "daemon/job/job_table.h"
#include "daemon/rpc/fd_request.h"
#include "daemon/session/session_table.h"
#include "tests/fuzz/byte_reader.h"
#include "tests/fuzz/check.h"
#include "tests/job/held_reducer.h"
#include "tests/job/manual_executor.h"
#include "tests/job/recording_sink.h"
#include "tests/kit/manual_clock.h"

namespace gradsync::daemon {
namespace {

enum class Owner : std::uint8_t { kNobody, kCaller, kOther };

// A table of sessions, with one session of a process. Lives until the fuzzer ends.
class World {
 public:
  World() : jobs_(Environment(), 8), sessions_(Policy(), &jobs_, &quota_, &executor_, &clock_) {
    OpenRequest request;
    request.job_id = "fuzz";
    sessions_.Open(Process(1), request, std::make_shared<RecordingSink>(),
                   [this](auto opened) { session_ = *std::move(opened); });
    FUZZ_CHECK(session_ != nullptr);
  }

  void Take(fuzz::ByteReader reader) {
    const auto owner = static_cast<Owner>(reader.Below(3));
    const bool expired = reader.Below(8) == 7;
    std::string message = reader.Bytes(reader.left());
    const auto offered =
        sessions_.Offer(*session_, {{session_->staging(), session_->staging()->fd()}});
    FUZZ_CHECK(offered.ok());
    constexpr std::size_t kAt = offsetof(FdRequest, nonce);
    if (owner != Owner::kNobody && message.size() >= kAt + kNonceBytes) {
      message.replace(kAt, kNonceBytes, *offered);
    }
    if (expired) clock_.Advance(61'000'000'000);
    const auto nonce = DecodeFdRequest(message);
    FdReply reply = EncodeFdReply(nonce.status(), 0);
    if (nonce.ok()) {
      FUZZ_CHECK(message.size() == sizeof(FdRequest) && nonce->size() == kNonceBytes);
      const auto claimed = sessions_.Claim(*nonce, Process(owner == Owner::kOther ? 2 : 1));
      FUZZ_CHECK(claimed.ok() == (owner == Owner::kCaller && !expired));
      FUZZ_CHECK(!sessions_.Claim(*nonce, Process(1)).ok() || owner == Owner::kOther);
      if (owner == Owner::kNobody) {
        // A session may have few offers, so none is left for the next message.
        FUZZ_CHECK(expired || sessions_.Claim(*offered, Process(1)).ok());
      }
      reply = EncodeFdReply(claimed.status(), claimed.ok() ? claimed->size() : 0);
    } else {
      // The offer is still there.
      FUZZ_CHECK(expired || sessions_.Claim(*offered, Process(1)).ok());
    }
    FUZZ_CHECK((reply.status == 0) == (reply.fd_count == 1));
    FUZZ_CHECK(std::memchr(reply.message, '\0', sizeof(reply.message)) != nullptr);
    FUZZ_CHECK((reply.status == 0) == (reply.message[0] == '\0'));
    sessions_.Tick();  // forgets the offers that nobody has claimed in time
  }

 private:
  static SessionPolicy Policy() {
    SessionPolicy policy;
    policy.staging_bytes = 4096;
    policy.lease_ns = ~std::uint64_t{0} / 4;
    return policy;
  }
  static ClientProcess Process(pid_t pid) {
    ClientProcess process;
    process.uid = 1000;
    process.pid = pid;
    return process;
  }
  JobEnvironment Environment() {
    JobEnvironment environment;
    environment.clock = &clock_;
    environment.reducer = &reducer_;
    environment.executor = &executor_;
    return environment;
  }

  ManualClock clock_;
  HeldReducer reducer_{&clock_};
  ManualExecutor executor_;
  ArenaQuota quota_{1 << 20};
  JobTable jobs_;
  SessionTable sessions_;
  std::shared_ptr<Session> session_;
};

}  // namespace
}  // namespace gradsync::daemon

extern "C" int LLVMFuzzerTestOneInput(const std::uint8_t* data, std::size_t size) {
  static auto* const world = new gradsync::daemon::World;
  world->Take(gradsync::fuzz::ByteReader(data, size));
  return 0;
}
