#include "tests/fault/fake_coordinator.h"

#include <grpcpp/server_builder.h>

#include <chrono>
#include <cstddef>
#include <utility>

namespace gradsync::fault {
namespace {

// A field of Protocol Buffers that has a length.
std::string Field(int number, const std::string& content) {
  std::string field(1, static_cast<char>(number << 3 | 2));
  for (std::size_t left = content.size(); true; left >>= 7) {
    field += static_cast<char>((left & 0x7f) | (left > 0x7f ? 0x80 : 0));
    if (left <= 0x7f) return field + content;
  }
}

}  // namespace

FakeCoordinator::FakeCoordinator(std::function<void(Stream*)> script) : script_(std::move(script)) {
  grpc::ServerBuilder builder;
  builder.AddListeningPort("127.0.0.8:0", grpc::InsecureServerCredentials(), &port_);
  builder.RegisterService(this);
  server_ = builder.BuildAndStart();
}

FakeCoordinator::~FakeCoordinator() { server_->Shutdown(std::chrono::system_clock::now()); }

std::string FakeCoordinator::address() const { return "127.0.0.8:" + std::to_string(port_); }

v1::AttachResponse FakeCoordinator::Welcome() {
  v1::AttachResponse message;
  message.mutable_welcome()->set_instance(std::string(16, 'c'));
  message.mutable_welcome()->set_node_name("fake");
  return message;
}

v1::AttachRequest FakeCoordinator::Await(Stream* stream, v1::AttachRequest::KindCase kind) {
  v1::AttachRequest message;
  while (stream->Read(&message)) {
    if (message.kind_case() == kind) return message;
  }
  return {};
}

v1::AttachResponse FakeCoordinator::Longest() {
  constexpr std::size_t kBytes = 16 << 20;  // kMaxCoordinatorMessageBytes
  constexpr std::size_t kAround = 64;       // fields and lengths
  const std::string part = Field(v1::SessionOpened::kLayoutsFieldNumber, "");
  std::string parts;
  while (parts.size() + kAround < kBytes) parts += part;
  const std::string response = Field(v1::SessionResponse::kSessionOpenedFieldNumber, parts);
  v1::AttachResponse message;
  // Not as a message: it would take as much memory here.
  message.GetReflection()->MutableUnknownFields(&message)->AddLengthDelimited(
      v1::AttachResponse::kRankResponseFieldNumber,
      Field(v1::RankResponse::kResponseFieldNumber, response));
  return message;
}

v1::AttachResponse FakeCoordinator::ConnectEngine(std::uint64_t epoch) {
  v1::AttachResponse message;
  v1::ConnectEngine* const connect = message.mutable_connect_engine();
  connect->set_epoch(epoch);
  connect->set_node(1);
  connect->add_node_names("fake");
  connect->add_node_names("alpha");
  connect->set_address("127.0.0.1");
  connect->set_lanes(2);
  connect->set_chunk_bytes(2 << 20);
  connect->set_wire_type(v1::WIRE_TYPE_SAME);
  connect->set_silence_limit_ms(8000);
  return message;
}

bool FakeCoordinator::AskUntilRefused(Stream* stream, std::uint64_t* asked) {
  while (*asked < kEnginesAtOnce) stream->Write(ConnectEngine(++*asked));
  v1::AttachRequest message;
  while (stream->Read(&message)) {
    if (!message.has_launch_done()) continue;
    stream->Write(ConnectEngine(++*asked));
    const std::string& why = message.launch_done().status().message();
    if (why.find("has connected 4 engines") != std::string::npos) return true;
  }
  return false;
}

std::function<void(FakeCoordinator::Stream*)> FakeCoordinator::AskForEngines(
    std::atomic<bool>* full) {
  return [full](Stream* stream) {
    stream->Write(Welcome());
    std::uint64_t asked = 0;
    while (AskUntilRefused(stream, &asked)) *full = true;
  };
}

grpc::Status FakeCoordinator::Attach(grpc::ServerContext* /*context*/, Stream* stream) {
  script_(stream);
  return grpc::Status::OK;
}

}  // namespace gradsync::fault
