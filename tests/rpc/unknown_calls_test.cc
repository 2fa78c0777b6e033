#include "daemon/rpc/unknown_calls.h"

#include <grpcpp/create_channel_posix.h>
#include <grpcpp/generic/generic_stub.h>
#include <grpcpp/grpcpp.h>
#include <grpcpp/server_posix.h>
#include <gtest/gtest.h>
#include <sys/socket.h>

#include <chrono>
#include <memory>
#include <vector>

#include "daemon/rpc/completion_dispatcher.h"
#include "tests/kit/deadline.h"

namespace gradsync::daemon {
namespace {

// Two threads serve the queue. gRPC's own answers are not safe then.
TEST(UnknownCallsTest, AreAnsweredHoweverManyComeAtOnce) {
  StreamCount streams;
  UnknownCalls unknown(&streams);
  grpc::ServerBuilder builder;
  unknown.Register(&builder);
  CompletionDispatcher dispatcher(builder.AddCompletionQueue());
  const std::unique_ptr<grpc::Server> server = builder.BuildAndStart();
  ASSERT_NE(server, nullptr);
  unknown.Start(dispatcher.queue());
  dispatcher.Start(2);
  EXPECT_EQ(streams.Get(), 1u) << "it waits for the next call";
  int ends[2];
  ASSERT_EQ(socketpair(AF_UNIX, SOCK_STREAM | SOCK_CLOEXEC | SOCK_NONBLOCK, 0, ends), 0);
  grpc::AddInsecureChannelFromFd(server.get(), ends[0]);
  grpc::GenericStub stub(grpc::CreateInsecureChannelFromFd("test", ends[1]));

  struct Call {
    grpc::ClientContext context;
    std::unique_ptr<grpc::GenericClientAsyncResponseReader> reader;
    grpc::ByteBuffer answer;
    grpc::Status status;
  };
  grpc::CompletionQueue queue;
  std::vector<std::unique_ptr<Call>> calls;
  for (int i = 0; i < 200; ++i) {
    Call& call = *calls.emplace_back(std::make_unique<Call>());
    call.context.set_deadline(std::chrono::system_clock::now() +
                              std::chrono::milliseconds(kPatienceMs));
    call.reader = stub.PrepareUnaryCall(&call.context, "/no.Such/Method", {}, &queue);
    call.reader->StartCall();
    call.reader->Finish(&call.answer, &call.status, nullptr);
  }
  for (std::size_t i = 0; i < calls.size(); ++i) {
    void* tag = nullptr;
    bool ok = false;
    ASSERT_TRUE(queue.Next(&tag, &ok));
  }
  for (const auto& call : calls) {
    EXPECT_EQ(call->status.error_code(), grpc::StatusCode::UNIMPLEMENTED)
        << call->status.error_message();
  }

  server->Shutdown(std::chrono::system_clock::now());
  unknown.Stop();
  unknown.Stop();
  EXPECT_TRUE(streams.WaitForNone(std::chrono::steady_clock::now() +
                                  std::chrono::milliseconds(kPatienceMs)));
  dispatcher.Stop();
}

}  // namespace
}  // namespace gradsync::daemon
