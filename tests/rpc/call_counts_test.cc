#include "daemon/rpc/call_counts.h"

#include <fcntl.h>
#include <grpc/grpc.h>
#include <grpcpp/create_channel_posix.h>
#include <grpcpp/generic/generic_stub.h>
#include <grpcpp/grpcpp.h>
#include <grpcpp/server_posix.h>
#include <gtest/gtest.h>
#include <sys/socket.h>

#include <chrono>
#include <memory>
#include <string>
#include <thread>

#include "tests/kit/deadline.h"
#include "tests/kit/soon.h"

namespace gradsync::daemon {
namespace {

// A server without services: gRPC itself answers each call, UNIMPLEMENTED.
struct Server {
  Server() {
    grpc::ServerBuilder builder;
    builder.AddListeningPort("127.0.0.1:0", grpc::InsecureServerCredentials(), &port);
    queue = builder.AddCompletionQueue();
    server = builder.BuildAndStart();
    counted = CountedServer::Newest();
    thread = std::thread([this] {
      void* tag = nullptr;
      bool ok = false;
      while (queue->Next(&tag, &ok)) {
      }
    });
  }
  ~Server() {
    server->Shutdown(std::chrono::system_clock::now());
    queue->Shutdown();
    thread.join();
  }
  std::shared_ptr<grpc::Channel> Connect() const {
    return grpc::CreateChannel("127.0.0.1:" + std::to_string(port),
                               grpc::InsecureChannelCredentials());
  }

  int port = 0;
  std::unique_ptr<grpc::ServerCompletionQueue> queue;
  std::unique_ptr<grpc::Server> server;
  CountedServer counted;
  std::thread thread;
};

grpc::StatusCode Call(const std::shared_ptr<grpc::Channel>& channel) {
  grpc::GenericStub stub(channel);
  grpc::ClientContext context;
  context.set_wait_for_ready(true);
  context.set_deadline(std::chrono::system_clock::now() + std::chrono::milliseconds(kPatienceMs));
  grpc::CompletionQueue queue;
  const auto call = stub.PrepareUnaryCall(&context, "/any/Method", grpc::ByteBuffer(), &queue);
  call->StartCall();
  grpc::ByteBuffer answer;
  grpc::Status status;
  call->Finish(&answer, &status, nullptr);
  void* tag = nullptr;
  bool ok = false;
  queue.Next(&tag, &ok);
  return status.error_code();
}

TEST(CallCountsTest, EachServerCountsItsOwnCalls) {
  const Server first, second;
  const auto channel = first.Connect();
  for (int i = 0; i < 3; ++i) EXPECT_EQ(Call(channel), grpc::StatusCode::UNIMPLEMENTED);
  EXPECT_EQ(first.counted.Calls().started, 3u);
  EXPECT_TRUE(Soon([&] { return first.counted.Calls().ended == 3; }));
  EXPECT_EQ(first.counted.Calls().open(), 0u);
  EXPECT_EQ(second.counted.Calls().started, 0u);
  EXPECT_FALSE(second.counted.HasConnections());
}

TEST(CallCountsTest, EachConnectionCountsItsOwnCalls) {
  const Server server;
  EXPECT_TRUE(server.counted.Connections().empty());
  const auto channel = server.Connect();
  EXPECT_EQ(Call(channel), grpc::StatusCode::UNIMPLEMENTED);
  EXPECT_TRUE(server.counted.HasConnections());
  const auto connections = server.counted.Connections();
  ASSERT_EQ(connections.size(), 1u);
  EXPECT_EQ(connections[0].ip, std::string("\x7f\0\0\1", 4));
  EXPECT_NE(connections[0].port, 0);
  EXPECT_EQ(connections[0].Text(), "127.0.0.1:" + std::to_string(connections[0].port));
  EXPECT_EQ(connections[0].calls.started, 1u);
  EXPECT_TRUE(Soon([&] { return server.counted.Connections()[0].calls.ended == 1; }));
}

TEST(CallCountsTest, CallsOfADescriptorsConnectionAreCounted) {
  const Server server;
  struct Pair {
    explicit Pair(grpc::Server* server) {
      int ends[2];
      EXPECT_EQ(socketpair(AF_UNIX, SOCK_STREAM | SOCK_CLOEXEC | SOCK_NONBLOCK, 0, ends), 0);
      counted = CountedConnection::Next(ends[0]);
      EXPECT_FALSE(counted.Calls().has_value()) << "gRPC has not made it";
      grpc::AddInsecureChannelFromFd(server, ends[0]);
      channel = grpc::CreateInsecureChannelFromFd("test", ends[1]);
    }
    CountedConnection counted;
    std::shared_ptr<grpc::Channel> channel;
  };
  Pair one(server.server.get());
  Pair two(server.server.get());
  EXPECT_EQ(Call(one.channel), grpc::StatusCode::UNIMPLEMENTED);
  EXPECT_EQ(Call(two.channel), grpc::StatusCode::UNIMPLEMENTED);
  EXPECT_EQ(Call(two.channel), grpc::StatusCode::UNIMPLEMENTED);
  EXPECT_EQ(server.counted.Calls().started, 3u);
  const auto calls = [](CountedConnection* counted) {
    const auto found = counted->Calls();
    return found ? *found : CallCounts{};
  };
  EXPECT_EQ(calls(&one.counted).started, 1u);
  EXPECT_EQ(calls(&two.counted).started, 2u);
  EXPECT_TRUE(Soon([&] { return calls(&two.counted).ended == 2; }));
  one.channel = nullptr;
  EXPECT_TRUE(Soon([&] { return !one.counted.Calls().has_value(); }));
  EXPECT_TRUE(two.counted.Calls().has_value());
}

TEST(CallCountsTest, AConnectionIsFoundHoweverManyObjectsComeBeforeIt) {
  const Server server;
  int ends[2];
  ASSERT_EQ(socketpair(AF_UNIX, SOCK_STREAM | SOCK_CLOEXEC | SOCK_NONBLOCK, 0, ends), 0);
  CountedConnection counted = CountedConnection::Next(ends[0]);
  for (int look = 0; look < 2; ++look) {
    for (int i = 0; i < 500; ++i) grpc_server_destroy(grpc_server_create(nullptr, nullptr));
    EXPECT_FALSE(counted.Calls().has_value()) << "gRPC has not made it";
  }
  grpc::AddInsecureChannelFromFd(server.server.get(), ends[0]);
  const auto channel = grpc::CreateInsecureChannelFromFd("test", ends[1]);
  EXPECT_EQ(Call(channel), grpc::StatusCode::UNIMPLEMENTED);
  const auto calls = counted.Calls();
  ASSERT_TRUE(calls.has_value());
  EXPECT_EQ(calls->started, 1u);
}

TEST(CallCountsTest, AServerThatHasEndedHasNoCalls) {
  CountedServer counted;
  {
    const Server server;
    counted = server.counted;
    EXPECT_EQ(Call(server.Connect()), grpc::StatusCode::UNIMPLEMENTED);
    EXPECT_EQ(counted.Calls().started, 1u);
  }
  // Another thread of gRPC's may hold it for a moment.
  EXPECT_TRUE(Soon([&] { return counted.Calls().started == 0; }));
  for (const CountedServer& none : {counted, CountedServer()}) {
    EXPECT_EQ(none.Calls().started, 0u);
    EXPECT_TRUE(none.Connections().empty());
    EXPECT_FALSE(none.HasConnections());
  }
}

TEST(CallCountsTest, AddressesAreWrittenAsUsual) {
  ConnectionCalls connection;
  connection.port = 4711;
  EXPECT_EQ(connection.Text(), ":4711");
  connection.ip = std::string(15, '\0') + '\1';
  EXPECT_EQ(connection.Text(), "[::1]:4711");
}

}  // namespace
}  // namespace gradsync::daemon
