#include "tests/client/scripted_daemon.h"

#include <fcntl.h>
#include <sys/mman.h>
#include <sys/socket.h>
#include <sys/un.h>
#include <unistd.h>

#include <array>
#include <chrono>
#include <cstring>
#include <utility>

#include "gradsync/limits.h"
#include "gradsync/shared_memory.h"
#include "gtest/gtest.h"

namespace gradsync {
namespace {

constexpr std::chrono::seconds kPatience(15);
constexpr char kStagingNonce[] = "scripted staging";
static_assert(sizeof(kStagingNonce) - 1 == kNonceBytes);
constexpr std::size_t kMaxDescriptors = 2;

client::FileDescriptor NewMemory(std::uint64_t bytes) {
  client::FileDescriptor memory(memfd_create("staging", MFD_CLOEXEC | MFD_ALLOW_SEALING));
  EXPECT_EQ(ftruncate(memory.get(), static_cast<off_t>(bytes)), 0);
  fcntl(memory.get(), F_ADD_SEALS, F_SEAL_SHRINK);
  return memory;
}

std::byte* Mapped(int memory, std::uint64_t bytes) {
  if (bytes == 0) return nullptr;
  void* const data = mmap(nullptr, bytes, PROT_READ | PROT_WRITE, MAP_SHARED, memory, 0);
  EXPECT_NE(data, MAP_FAILED);
  return static_cast<std::byte*>(data);
}

void Answer(int client, const std::vector<int>& descriptors) {
  FdReply reply;
  reply.fd_count = static_cast<std::uint32_t>(descriptors.size());
  iovec part{&reply, sizeof(reply)};
  alignas(cmsghdr) std::array<char, CMSG_SPACE(kMaxDescriptors * sizeof(int))> control{};
  msghdr message{};
  message.msg_iov = &part;
  message.msg_iovlen = 1;
  message.msg_control = control.data();
  message.msg_controllen = CMSG_SPACE(descriptors.size() * sizeof(int));
  cmsghdr* const header = CMSG_FIRSTHDR(&message);
  header->cmsg_level = SOL_SOCKET;
  header->cmsg_type = SCM_RIGHTS;
  header->cmsg_len = CMSG_LEN(descriptors.size() * sizeof(int));
  std::memcpy(CMSG_DATA(header), descriptors.data(), descriptors.size() * sizeof(int));
  sendmsg(client, &message, MSG_NOSIGNAL);
}

}  // namespace

ScriptedDaemon::ScriptedDaemon(v1::SessionOpened opened)
    : opened_(std::move(opened)),
      staging_memfd_(NewMemory(opened_.staging_bytes())),
      staging_(Mapped(staging_memfd_.get(), opened_.staging_bytes())),
      listener_(::socket(AF_UNIX, SOCK_SEQPACKET | SOCK_CLOEXEC, 0)) {
  sockaddr_un address{};
  address.sun_family = AF_UNIX;
  std::strcpy(address.sun_path, directory_.File("scripted-fd.sock").c_str());
  EXPECT_EQ(bind(listener_.get(), reinterpret_cast<sockaddr*>(&address), sizeof(address)), 0);
  EXPECT_EQ(listen(listener_.get(), 8), 0);
  descriptors_ = std::thread([this] { ServeDescriptors(); });
  grpc::ServerBuilder builder;
  builder.AddListeningPort("unix:" + socket(), grpc::InsecureServerCredentials());
  builder.RegisterService(this);
  server_ = builder.BuildAndStart();
}

ScriptedDaemon::~ScriptedDaemon() {
  Die();
  server_->Shutdown(std::chrono::system_clock::now());
  shutdown(listener_.get(), SHUT_RDWR);
  descriptors_.join();
  if (staging_ != nullptr) munmap(staging_, opened_.staging_bytes());
}

std::optional<v1::SessionRequest> ScriptedDaemon::Next() {
  std::unique_lock<std::mutex> lock(mutex_);
  if (!arrived_.wait_for(lock, kPatience, [this] { return !requests_.empty(); })) {
    return std::nullopt;
  }
  auto request = std::move(requests_.front());
  requests_.pop_front();
  return request;
}

bool ScriptedDaemon::Silent() {
  const std::lock_guard<std::mutex> lock(mutex_);
  return requests_.empty();
}

void ScriptedDaemon::Say(const v1::SessionResponse& response) {
  const std::lock_guard<std::mutex> lock(mutex_);
  if (stream_ != nullptr) stream_->Write(response);
}

void ScriptedDaemon::Offer(const std::string& nonce, std::vector<int> descriptors) {
  const std::lock_guard<std::mutex> lock(mutex_);
  offers_[nonce] = std::move(descriptors);
}

void ScriptedDaemon::Die() {
  const std::lock_guard<std::mutex> lock(mutex_);
  if (context_ != nullptr) context_->TryCancel();
}

grpc::Status ScriptedDaemon::Session(grpc::ServerContext* context, Stream* stream) {
  v1::SessionRequest request;
  if (!stream->Read(&request) || !request.has_open_session()) {
    return {grpc::StatusCode::INVALID_ARGUMENT, "no OpenSession"};
  }
  Offer(kStagingNonce, {staging_memfd_.get()});
  {
    const std::lock_guard<std::mutex> lock(mutex_);
    stream_ = stream;
    context_ = context;
  }
  v1::SessionResponse response;
  v1::SessionOpened& opened = *response.mutable_session_opened();
  opened = opened_;
  opened.set_protocol(kProtocolNewest);
  opened.set_incarnation(1);
  opened.set_generation(1);
  opened.set_staging_nonce(kStagingNonce);
  Say(response);
  while (stream->Read(&request)) {
    const std::lock_guard<std::mutex> lock(mutex_);
    requests_.push_back(request);
    arrived_.notify_all();
  }
  const std::lock_guard<std::mutex> lock(mutex_);
  stream_ = nullptr;
  context_ = nullptr;
  return grpc::Status::OK;
}

void ScriptedDaemon::ServeDescriptors() {
  for (;;) {
    const client::FileDescriptor client(accept4(listener_.get(), nullptr, nullptr, SOCK_CLOEXEC));
    if (client.get() < 0) return;
    FdRequest request;
    if (recv(client.get(), &request, sizeof(request), 0) != sizeof(request)) continue;
    const std::string nonce(reinterpret_cast<const char*>(request.nonce), kNonceBytes);
    const std::lock_guard<std::mutex> lock(mutex_);
    Answer(client.get(), offers_[nonce]);
  }
}

}  // namespace gradsync
