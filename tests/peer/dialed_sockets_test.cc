// What a coordinator sends to gRPC's client. The test plays the coordinator.

#include "daemon/peer/dialed_sockets.h"

#include <grpcpp/grpcpp.h>
#include <sys/socket.h>

#include <cstdint>
#include <memory>
#include <string>
#include <thread>

#include "daemon/base/tenant.h"
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
class DialedSocketsTest : public testing::Test {
 protected:
  explicit DialedSocketsTest(bool plain_text)
      : sockets_(std::make_shared<DialedSockets>(plain_text)) {
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
    server_ = std::make_unique<RawHttp2>(RawHttp2::Server(AcceptOne(listener_, kPatienceMs)));
  }
  ~DialedSocketsTest() override {
    call_.TryCancel();
    caller_.join();
  }

  void SetUp() override { ASSERT_TRUE(server_->connected()); }
  std::string address_;
  const Descriptor listener_ = ListenTcp("127.0.0.1", &address_);
  const std::shared_ptr<DialedSockets> sockets_;
  grpc::ClientContext call_;
  std::thread caller_;
  std::unique_ptr<RawHttp2> server_;
};

// As with TLS: nothing is known of the frames. These tests also show that gRPC names the
// descriptors that it connects.
class EncryptedSocketsTest : public DialedSocketsTest {
 protected:
  EncryptedSocketsTest() : DialedSocketsTest(/*plain_text=*/false) {}
};
class PlainSocketsTest : public DialedSocketsTest {
 protected:
  PlainSocketsTest() : DialedSocketsTest(/*plain_text=*/true) {}
};

TEST_F(EncryptedSocketsTest, BytesReadInVainEndTheConnection) {
  ASSERT_TRUE(server_->SendBulk());  // 1 MiB, and the frames' beginnings
  ASSERT_TRUE(Soon([&] { return sockets_->Look() > kMiB; }));
  EXPECT_FALSE(sockets_->EndHarmful({2 * kMiB, 4 * kMiB, kMiB}, 4 * kMiB));
  EXPECT_FALSE(sockets_->HasHarmed());
  EXPECT_TRUE(sockets_->EndHarmful(kMost, /*all=*/0));
  EXPECT_TRUE(Soon([&] { return !server_->SendBulk(); }));
  EXPECT_TRUE(sockets_->HasHarmed());
}

TEST_F(EncryptedSocketsTest, OneOfManyCoordinatorsMaySendLess) {
  ASSERT_TRUE(server_->SendBulk());
  ASSERT_TRUE(Soon([&] { return sockets_->Look() > kMiB; }));
  EXPECT_FALSE(sockets_->EndHarmful({2 * kMiB, 4 * kMiB, kMiB}, 4 * kMiB));
  EXPECT_TRUE(sockets_->EndHarmful({2 * kMiB, 4 * kMiB, kMiB}, 4 * kMiB + 1));
}

TEST_F(EncryptedSocketsTest, MessagesMakeUpForTheirBytes) {
  ASSERT_TRUE(server_->SendBulk());
  ASSERT_TRUE(Soon([&] { return sockets_->Look() > kMiB; }));
  sockets_->CountMessage(2 * kMiB);
  EXPECT_EQ(sockets_->Look(), 0u);
  EXPECT_FALSE(sockets_->EndHarmful(kMost, /*all=*/0));
}

TEST_F(EncryptedSocketsTest, HeadersWithoutEndAreBytesReadInVain) {
  EXPECT_TRUE(server_->BeginHeaders(""));  // nearly 1 MiB
  EXPECT_TRUE(Soon([&] { return sockets_->Look() > kMiB / 2; }));
  EXPECT_FALSE(sockets_->HasHarmed());
}

TEST_F(PlainSocketsTest, HeadersWithoutEndEndTheConnection) {
  EXPECT_TRUE(server_->BeginShortHeaders(""));
  for (int i = 0; i < 5; ++i) EXPECT_TRUE(server_->ContinueShortHeaders());
  EXPECT_FALSE(sockets_->HasHarmed());
  EXPECT_TRUE(Soon([&] { return !server_->ContinueHeaders(); }));
  EXPECT_TRUE(Soon([&] { return sockets_->HasHarmed(); }));
  EXPECT_LT(sockets_->Look(), kMiB);
}

TEST_F(PlainSocketsTest, FramesWithoutDataEndTheConnection) {
  EXPECT_TRUE(Soon([&] { return !server_->SendBulk(); }));
  EXPECT_TRUE(Soon([&] { return sockets_->HasHarmed(); }));
  EXPECT_LT(sockets_->Look(), kMiB);
}

struct Pair {
  Pair() {
    int ends[2];
    EXPECT_EQ(socketpair(AF_UNIX, SOCK_STREAM | SOCK_CLOEXEC, 0, ends), 0);
    ours = Descriptor(ends[0]);
    theirs = Descriptor(ends[1]);
  }
  // As gRPC reads.
  void Read(std::size_t bytes) {
    std::string piece(16 << 10, 'x');
    iovec part{piece.data(), piece.size()};
    msghdr message{};
    message.msg_iov = &part;
    message.msg_iovlen = 1;
    for (std::size_t read = 0; read < bytes; read += piece.size()) {
      ASSERT_EQ(send(theirs.get(), piece.data(), piece.size(), 0),
                static_cast<ssize_t>(piece.size()));
      ASSERT_EQ(recvmsg(ours.get(), &message, MSG_WAITALL), static_cast<ssize_t>(piece.size()));
    }
  }

  Descriptor ours, theirs;
};

TEST_F(PlainSocketsTest, AClosedOneEndsItsConnectionAndTakesNoOther) {
  sockets_->Close();
  EXPECT_TRUE(Soon([&] { return !server_->SendPings(1); }));
  EXPECT_FALSE(sockets_->HasHarmed());
  const Pair another;
  EXPECT_FALSE(sockets_->Add(another.ours.get()));
}

TEST(DialedSockets, GrpcConnectsNoDescriptorThatItMayNotAdd) {
  const auto sockets = std::make_shared<DialedSockets>(/*plain_text=*/true);
  sockets->Close();
  std::string address;
  const Descriptor listener = ListenTcp("127.0.0.1", &address);
  grpc::ChannelArguments arguments;
  DialedSockets::AddTo(sockets, &arguments);
  const auto channel =
      grpc::CreateCustomChannel("dns:///" + address, grpc::InsecureChannelCredentials(), arguments);
  grpc::ClientContext call;
  const auto stream = v1::Peer::NewStub(channel)->Attach(&call);
  const grpc::Status status = stream->Finish();
  EXPECT_EQ(status.error_code(), grpc::StatusCode::UNAVAILABLE) << status.error_message();
  EXPECT_LT(AcceptOne(listener, /*timeout_ms=*/0).get(), 0);
}

TEST(DialedSockets, EarlierMessagesAreNoCreditForALaterConnection) {
  Pair first, second;
  DialedSockets sockets(/*plain_text=*/false);
  ASSERT_TRUE(sockets.Add(first.ours.get()));
  sockets.CountMessage(kMiB);
  first.Read(kMiB);
  EXPECT_EQ(sockets.Look(), 0u);
  first = Pair();
  ASSERT_TRUE(sockets.Add(second.ours.get()));
  second.Read(kMiB);
  EXPECT_EQ(sockets.Look(), kMiB);
}

TEST(UserRate, EachUserConnectsOnlySoOften) {
  const auto rate = std::make_shared<UserRate>(/*burst=*/2);
  const Pair pair;
  for (const uid_t user : {1000, 1001}) {
    for (const bool may : {true, true, false}) {
      DialedSockets sockets(/*plain_text=*/true, Tenant(user), rate);
      EXPECT_EQ(sockets.Add(pair.ours.get()), may) << user;
    }
  }
}

}  // namespace
}  // namespace gradsync::daemon
