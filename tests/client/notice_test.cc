// What a client keeps of the daemon's notices about late ranks.

#include <string>

#include "client/include/gradsync/client.h"
#include "gtest/gtest.h"
#include "tests/client/job_of_threads.h"
#include "tests/client/scripted_daemon.h"
#include "tests/kit/test_daemon.h"

namespace gradsync {
namespace {

class NoticeTest : public testing::Test {
 protected:
  NoticeTest() {
    SessionOptions options;
    options.socket = daemon_.socket();
    options.job_id = "scripted";
    options.world_size = 2;
    auto joined = Session::Join(options);
    EXPECT_TRUE(joined.ok()) << joined.status();
    if (joined.ok()) session_ = *std::move(joined);
  }
  void Say(const std::string& text) {
    v1::SessionResponse response;
    response.mutable_still_waiting()->set_text(text);
    daemon_.Say(response);
  }
  // What the session has after everything that was said.
  std::string Take() {
    v1::SessionResponse question;
    question.mutable_lease_question()->set_number(1);
    daemon_.Say(question);
    const auto answer = daemon_.Next();
    EXPECT_TRUE(answer.has_value() && answer->has_lease_answer());
    return session_->TakeNotice();
  }

  ScriptedDaemon daemon_;
  std::unique_ptr<Session> session_;
};

TEST_F(NoticeTest, TheNewestNoticeIsTakenOnce) {
  EXPECT_EQ(Take(), "");
  Say("layout 'a' after 5s: rank 1 has not joined the job");
  Say("layout 'a' after 35s: rank 1 has not registered it");
  EXPECT_EQ(Take(), "layout 'a' after 35s: rank 1 has not registered it");
  EXPECT_EQ(Take(), "");
}

TEST_F(NoticeTest, AnAnswerEndsTheNotice) {
  Say("operation 1 (barrier) after 5s: rank 1 has not called it");
  v1::SessionResponse done;
  done.mutable_operation_done()->set_sequence(1);
  daemon_.Say(done);
  EXPECT_EQ(Take(), "");
}

TEST_F(NoticeTest, ALongNoticeIsCut) {
  Say(std::string(5000, 'x'));
  EXPECT_EQ(Take(), std::string(2047, 'x'));
}

TEST(LateRank, IsNamedToTheRankThatWaits) {
  const TestDaemon daemon;
  const JobOfThreads job = JoinAll(daemon, 2, nullptr);
  std::string notice;
  OnEveryRank(2, [&](std::uint32_t rank) {
    if (rank == 1) {
      for (int i = 0; i < 3000 && notice.empty(); ++i) {
        // Only waits: the session does not end.
        EXPECT_TRUE(job.sessions[1]->AwaitEnd(absl::Milliseconds(100)).ok());
        notice = job.sessions[0]->TakeNotice();
        EXPECT_EQ(job.sessions[1]->TakeNotice(), "");
      }
    }
    EXPECT_TRUE(job.sessions[rank]->Barrier().ok());
  });
  EXPECT_EQ(notice.substr(0, 28), "operation 1 (barrier) after ") << notice;
  EXPECT_EQ(notice.substr(notice.find(": ")), ": rank 1 has not called it");
}

}  // namespace
}  // namespace gradsync
