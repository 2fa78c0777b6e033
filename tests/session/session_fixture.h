// Sessions of trainers that a test plays. The arenas are real; the test moves the reducer, the
// executors and the clock.

#ifndef TESTS_SESSION_SESSION_FIXTURE_H_
#define TESTS_SESSION_SESSION_FIXTURE_H_

#include <gtest/gtest.h>

#include <cstdint>
#include <memory>
#include <string>

#include "absl/status/status.h"
#include "absl/status/statusor.h"
#include "absl/strings/string_view.h"
#include "daemon/arena/arena_quota.h"
#include "daemon/arena/host_arena.h"
#include "daemon/arena/semaphore_page.h"
#include "daemon/job/job_table.h"
#include "daemon/session/session.h"
#include "daemon/session/session_table.h"
#include "tests/job/held_reducer.h"
#include "tests/job/manual_executor.h"
#include "tests/job/recording_sink.h"
#include "tests/kit/manual_clock.h"

namespace gradsync::daemon {

// Populates and seals memory, as a trainer does. With fewer bytes, as a faulty one does.
void Populate(int memfd, std::size_t bytes);
inline void Populate(const HostArena& arena, std::size_t bytes) { Populate(arena.fd(), bytes); }
inline void Populate(const HostArena& arena) { Populate(arena, arena.bytes()); }
inline void Populate(const SemaphorePage& page) { Populate(page.fd(), page.bytes()); }
inline void Populate(const Session::LayoutMemory& layout) {
  Populate(*layout.arena);
  Populate(*layout.semaphores);
}

class SessionFixture : public testing::Test {
 protected:
  static constexpr uid_t kUser = 1000;
  static constexpr pid_t kPid = 4711;
  static constexpr std::uint64_t kSecondNs = 1'000'000'000;
  static constexpr std::uint64_t kStagingBytes = 8192;
  static constexpr std::uint64_t kQuotaBytes = 1 << 20;

  SessionFixture() : SessionFixture(Policy()) {}
  explicit SessionFixture(const SessionPolicy& policy);
  void TearDown() override;

  static SessionPolicy Policy();
  static ClientProcess Client(uid_t uid = kUser, pid_t pid = kPid);

  struct Opened {
    absl::StatusOr<std::shared_ptr<Session>> session;
    std::shared_ptr<RecordingSink> sink;

    Session* operator->() const { return session->get(); }
    // Its job, which is on this node.
    Job& job() const { return dynamic_cast<Job&>((*session)->job()); }
    // The status of its end; OK if it has not ended.
    absl::Status end() const;
    bool ended() const { return !sink->Of<SessionEndMessage>().empty(); }
  };
  Opened Open(std::uint32_t rank, std::uint32_t world_size = 2,
              const ClientProcess& process = Client(), const std::string& job_id = "run",
              const std::string& token = "");
  // A layout of one bucket with `elements` float32.
  static LayoutRequest Layout(std::uint64_t elements, const std::string& name = "model");
  // Runs all work of both executors. The sessions' executor comes first whenever it has work.
  void RunAll();
  // Registers a layout with a job on this node. If it is not answered at once, runs the executors.
  absl::StatusOr<Session::Registration> RegisterNow(const Opened& opened,
                                                    const LayoutRequest& request);
  absl::StatusOr<std::shared_ptr<Session>> OpenNow(const ClientProcess& process,
                                                   const OpenRequest& request,
                                                   std::shared_ptr<SessionSink> sink);
  // Registers a layout and expects success.
  Session::Registration Register(const Opened& opened, const LayoutRequest& request);

  void End(const Opened& opened) {
    sessions_.End(*opened.session, absl::AbortedError("its process (pid 4711) has ended"));
  }

  ManualClock clock_;
  HeldReducer reducer_{&clock_};
  ArenaQuota quota_{kQuotaBytes};
  ManualExecutor executor_;  // of the sessions
  ManualExecutor copier_;    // of the jobs
  JobTable jobs_;
  SessionTable sessions_;
};

void ExpectError(const absl::Status& status, absl::StatusCode code, absl::string_view reason,
                 std::initializer_list<absl::string_view> parts);

}  // namespace gradsync::daemon

#endif  // TESTS_SESSION_SESSION_FIXTURE_H_
