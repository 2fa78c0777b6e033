// What this client says to a daemon of an older protocol.

#include <grpcpp/grpcpp.h>

#include <atomic>
#include <chrono>
#include <filesystem>
#include <memory>
#include <string>
#include <thread>
#include <vector>

#include "gtest/gtest.h"
#include "proto/gradsync/v1/gradsync.grpc.pb.h"
#include "tests/client/daemon_process.h"
#include "tests/client/temp_directory.h"

namespace gradsync {
namespace {

// Between the client and a real daemon, on a socket of its own: makes them agree on protocol
// 1.2, and counts what that one does not have.
class OlderDaemon final : public v1::GradientSync::Service {
 public:
  explicit OlderDaemon(const DaemonProcess& daemon)
      : stub_(v1::GradientSync::NewStub(
            grpc::CreateChannel("unix:" + daemon.socket(), grpc::InsecureChannelCredentials()))) {
    std::string descriptors = daemon.socket();
    descriptors.insert(descriptors.rfind(".sock"), "-fd");
    std::filesystem::create_symlink(descriptors, directory_.File("older-fd.sock"));
    grpc::ServerBuilder builder;
    builder.AddListeningPort("unix:" + socket(), grpc::InsecureServerCredentials());
    builder.RegisterService(this);
    server_ = builder.BuildAndStart();
  }
  ~OlderDaemon() override { server_->Shutdown(std::chrono::system_clock::now()); }

  std::string socket() const { return directory_.File("older.sock"); }
  int bucket_readies() const { return bucket_readies_; }
  int ready_rests() const { return ready_rests_; }

 private:
  grpc::Status Session(
      grpc::ServerContext*,
      grpc::ServerReaderWriter<v1::SessionResponse, v1::SessionRequest>* client) override {
    grpc::ClientContext context;
    context.set_wait_for_ready(true);
    const auto daemon = stub_->Session(&context);
    std::thread answers([&] {
      for (v1::SessionResponse response; daemon->Read(&response);) client->Write(response);
    });
    for (v1::SessionRequest request; client->Read(&request);) {
      if (request.has_open_session()) {
        request.mutable_open_session()->mutable_protocol()->set_newest(2);
      }
      if (request.has_bucket_ready()) bucket_readies_ += request.bucket_ready().buckets_size();
      if (request.end_step().ready_rest()) ++ready_rests_;
      daemon->Write(request);
    }
    context.TryCancel();
    answers.join();
    return daemon->Finish();
  }

  TempDirectory directory_;
  const std::unique_ptr<v1::GradientSync::Stub> stub_;
  std::atomic<int> bucket_readies_{0};
  std::atomic<int> ready_rests_{0};
  std::unique_ptr<grpc::Server> server_;
};

TEST(OlderDaemonTest, FinishStepSaysItInSingleMessages) {
  const DaemonProcess daemon;
  OlderDaemon older(daemon);
  const LayoutSpec spec = FloatBuckets(3, 10);
  // The other rank's client speaks to the daemon as it is.
  std::vector<SessionOptions> options = {daemon.Options(0, 2), daemon.Options(1, 2)};
  options[0].socket = older.socket();
  const JobOfThreads job = JoinAll(options, &spec);
  for (std::uint64_t step = 1; step <= 3; ++step) {
    OnEveryRank(2, [&](std::uint32_t rank) {
      Layout& mine = *job.layouts[rank];
      for (std::size_t i = 0; i < 3; ++i) Fill(mine.bucket(i), static_cast<float>(2 * rank + i));
      // One, two, all.
      for (std::size_t i = 0; i < step; ++i) ASSERT_TRUE(mine.MarkReady(step, 2 - i).ok());
      ASSERT_TRUE(mine.FinishStep(step).ok());
      const auto result = mine.WaitStep(step);
      ASSERT_TRUE(result.ok()) << result.status();
      for (std::size_t i = 0; i < 3; ++i) {
        EXPECT_EQ(ValueOf(mine.bucket(i)), static_cast<float>(1 + i));
      }
    });
  }
  EXPECT_EQ(older.bucket_readies(), 9);
  EXPECT_EQ(older.ready_rests(), 0);
  for (const auto& session : job.sessions) EXPECT_EQ(session->Statistics().buckets_marked, 9u);
}

}  // namespace
}  // namespace gradsync
