// What a coordinator sends to gRPC's client. The test plays the coordinator.

#include "daemon/peer/dialed_sockets.h"

#include <grpcpp/grpcpp.h>

#include <cstdint>
#include <memory>
#include <string>
#include <thread>

#include "gradsync/v1/peer.grpc.pb.h"
#include "gtest/gtest.h"
#include "tests/attack/raw_http2.h"
#include "tests/kit/child_process.h"
#include "tests/kit/connect.h"
#include "tests/kit/deadline.h"
#include "tests/kit/soon.h"

namespace gradsync::daemon {
namespace {

using attack::RawHttp2;

constexpr std::uint64_t kMiB = std::uint64_t{1} << 20;
constexpr VainBytes::Most kMost = {kMiB, 2 * kMiB, kMiB / 2};

// A call of gRPC, and the connection on which the test answers it.
class DialedSocketsTest : public testing::TestWithParam<bool> {
 protected:
  DialedSocketsTest() {
    grpc::ChannelArguments arguments;
    arguments.SetInt(GRPC_ARG_INITIAL_RECONNECT_BACKOFF_MS, 10);
    DialedSockets::AddTo(sockets_, &arguments);
    const auto channel = grpc::CreateCustomChannel("dns:///" + address_,
                                                   grpc::InsecureChannelCredentials(), arguments);
    call_.set_wait_for_ready(true);
    caller_ = std::thread([this, channel] {
      const auto stream = v1::Peer::NewStub(channel)->Attach(&call_);
      v1::AttachResponse message;
      while (stream->Read(&message)) {
      }
      stream->Finish();
    });
    server_ = std::make_unique<RawHttp2>(Accept());
  }
  ~DialedSocketsTest() override {
    call_.TryCancel();
    caller_.join();
  }

  RawHttp2 Accept() { return RawHttp2::Server(AcceptOne(listener_, kPatienceMs)); }

  std::string address_;
  const Descriptor listener_ = ListenTcp("127.0.0.1", &address_);
  const std::shared_ptr<DialedSockets> sockets_ =
      std::make_shared<DialedSockets>(/*plain_text=*/GetParam());
  grpc::ClientContext call_;
  std::thread caller_;
  std::unique_ptr<RawHttp2> server_;
};

// This also shows that gRPC names the descriptors that it connects.
TEST_P(DialedSocketsTest, BytesReadInVainEndTheConnection) {
  ASSERT_TRUE(server_->connected());
  ASSERT_TRUE(server_->SendBulk());  // 1 MiB, and the frames' beginnings
  ASSERT_TRUE(Soon([&] { return sockets_->Look() > kMiB; }));
  EXPECT_FALSE(sockets_->EndHarmful({2 * kMiB, 4 * kMiB, kMiB}, 4 * kMiB));
  EXPECT_FALSE(sockets_->HasHarmed());
  EXPECT_TRUE(sockets_->EndHarmful(kMost, /*all=*/0));
  EXPECT_TRUE(Soon([&] { return !server_->SendBulk(); }));
  EXPECT_TRUE(sockets_->HasHarmed());
}

TEST_P(DialedSocketsTest, AClosedOneConnectsNoMore) {
  ASSERT_TRUE(server_->connected());
  sockets_->Close();
  EXPECT_TRUE(Soon([&] { return !server_->SendBulk(); }));
  EXPECT_FALSE(sockets_->HasHarmed());
  EXPECT_LT(AcceptOne(listener_, /*timeout_ms=*/500).get(), 0) << "gRPC would try at once";
}

TEST_P(DialedSocketsTest, OneOfManyCoordinatorsMaySendLess) {
  ASSERT_TRUE(server_->SendBulk());
  ASSERT_TRUE(Soon([&] { return sockets_->Look() > kMiB; }));
  EXPECT_FALSE(sockets_->EndHarmful({2 * kMiB, 4 * kMiB, kMiB}, 4 * kMiB));
  EXPECT_TRUE(sockets_->EndHarmful({2 * kMiB, 4 * kMiB, kMiB}, 4 * kMiB + 1));
}

TEST_P(DialedSocketsTest, MessagesMakeUpForTheirBytes) {
  ASSERT_TRUE(server_->SendBulk());
  ASSERT_TRUE(Soon([&] { return sockets_->Look() > kMiB; }));
  sockets_->CountMessage(2 * kMiB);
  EXPECT_EQ(sockets_->Look(), 0u);
  EXPECT_FALSE(sockets_->EndHarmful(kMost, /*all=*/0));
}

TEST_P(DialedSocketsTest, HeadersWithoutEndEndTheConnectionIfTheyCanBeRead) {
  if (!GetParam()) {
    EXPECT_TRUE(server_->BeginHeaders(""));  // nearly 1 MiB
    EXPECT_TRUE(Soon([&] { return sockets_->Look() > kMiB / 2; }));
    EXPECT_FALSE(sockets_->HasHarmed());
    return;
  }
  EXPECT_TRUE(server_->BeginShortHeaders(""));
  for (int i = 0; i < 5; ++i) EXPECT_TRUE(server_->ContinueShortHeaders());
  EXPECT_FALSE(sockets_->HasHarmed());
  EXPECT_TRUE(Soon([&] { return !server_->ContinueHeaders(); }));
  EXPECT_TRUE(Soon([&] { return sockets_->HasHarmed(); }));
  EXPECT_LT(sockets_->Look(), kMiB);
  // gRPC connects again. What was known stays known.
  Accept();
  EXPECT_TRUE(sockets_->HasHarmed());
}

INSTANTIATE_TEST_SUITE_P(Texts, DialedSocketsTest, testing::Values(true, false),
                         [](const auto& one) { return one.param ? "Plain" : "Encrypted"; });

}  // namespace
}  // namespace gradsync::daemon
