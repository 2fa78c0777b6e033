#include "tests/fault/raw_session.h"

#include <fcntl.h>
#include <sys/mman.h>
#include <sys/socket.h>
#include <unistd.h>

#include <chrono>
#include <cstring>
#include <utility>

#include "google/rpc/error_details.pb.h"
#include "proto/gradsync/limits.h"
#include "tests/kit/connect.h"
#include "tests/kit/deadline.h"

namespace gradsync::fault {

std::string RawStatus::Field(const std::string& name) const {
  for (const auto& [key, value] : fields) {
    if (key == name) return value;
  }
  return "";
}

RawStatus RawStatusOf(const google::rpc::Status& status) {
  RawStatus raw{status.code(), status.message(), "", {}};
  for (const auto& detail : status.details()) {
    google::rpc::ErrorInfo info;
    if (!detail.UnpackTo(&info)) continue;
    raw.reason = info.reason();
    for (const auto& [key, value] : info.metadata()) raw.fields.emplace_back(key, value);
  }
  return raw;
}

std::ostream& operator<<(std::ostream& out, const RawStatus& status) {
  return out << status.code << " " << status.reason << ": " << status.message;
}

std::string FdRequestBytes(const std::string& nonce) {
  FdRequest request;
  std::memcpy(request.nonce, nonce.data(), std::min(nonce.size(), kNonceBytes));
  return std::string(reinterpret_cast<const char*>(&request), sizeof(request));
}

std::string SideSocketOf(const std::string& socket) {
  return socket.substr(0, socket.size() - std::string(".sock").size()) + "-fd.sock";
}

FdAnswer AskSideSocket(const std::string& path, const std::string& bytes) {
  FdAnswer answer;
  const Descriptor fd = ConnectUnix(path, SOCK_SEQPACKET);
  if (fd.get() < 0 || send(fd.get(), bytes.data(), bytes.size(), MSG_NOSIGNAL) < 0 ||
      !AwaitReadable(fd.get(), kPatienceMs)) {
    return answer;
  }
  FdReply reply;
  iovec data{&reply, sizeof(reply)};
  alignas(cmsghdr) char control[CMSG_SPACE(sizeof(int) * 8)] = {};
  msghdr message{};
  message.msg_iov = &data;
  message.msg_iovlen = 1;
  message.msg_control = control;
  message.msg_controllen = sizeof(control);
  if (recvmsg(fd.get(), &message, MSG_CMSG_CLOEXEC) != static_cast<ssize_t>(sizeof(reply))) {
    return answer;
  }
  answer.answered = true;
  answer.status = reply.status;
  answer.message = reply.message;
  const cmsghdr* const header = CMSG_FIRSTHDR(&message);
  if (header != nullptr && header->cmsg_type == SCM_RIGHTS) {
    const std::size_t count = (header->cmsg_len - CMSG_LEN(0)) / sizeof(int);
    for (std::size_t i = 0; i < count; ++i) {
      int passed = -1;
      std::memcpy(&passed, CMSG_DATA(header) + i * sizeof(int), sizeof(int));
      answer.descriptors.emplace_back(passed);
    }
  }
  return answer;
}

RawMemory::RawMemory(Descriptor fd, std::size_t bytes) : fd_(std::move(fd)), bytes_(bytes) {
  void* const mapped = mmap(nullptr, bytes_, PROT_READ | PROT_WRITE, MAP_SHARED, fd_.get(), 0);
  data_ = mapped == MAP_FAILED ? nullptr : static_cast<char*>(mapped);
}

RawMemory::~RawMemory() {
  if (data_ != nullptr) munmap(data_, bytes_);
}

bool RawMemory::Seal() {
  return fcntl(fd_.get(), F_ADD_SEALS, F_SEAL_FUTURE_WRITE | F_SEAL_SEAL) == 0;
}

bool RawMemory::Populate() {
  return data_ != nullptr && madvise(data_, bytes_, MADV_POPULATE_WRITE) == 0 && Seal();
}

RawSession::RawSession(const std::string& socket) {
  grpc::ChannelArguments arguments;
  arguments.SetInt(GRPC_ARG_USE_LOCAL_SUBCHANNEL_POOL, 1);
  // The window does not grow, so the daemon can soon send no more to a client that does not read.
  arguments.SetInt(GRPC_ARG_HTTP2_BDP_PROBE, 0);
  arguments.SetInt(GRPC_ARG_HTTP2_STREAM_LOOKAHEAD_BYTES, 65536);
  arguments.SetMaxSendMessageSize(-1);
  arguments.SetMaxReceiveMessageSize(-1);
  channel_ =
      grpc::CreateCustomChannel("unix:" + socket, grpc::InsecureChannelCredentials(), arguments);
  stub_ = v1::GradientSync::NewStub(channel_);
  context_.set_deadline(std::chrono::system_clock::now() + std::chrono::milliseconds(kPatienceMs));
  context_.set_wait_for_ready(true);
  stream_ = stub_->Session(&context_);
}

RawSession::~RawSession() {
  if (finished_) return;
  context_.TryCancel();
  stream_->Finish();
}

bool RawSession::Send(const v1::SessionRequest& request) { return stream_->Write(request); }

std::optional<v1::SessionResponse> RawSession::Receive() {
  v1::SessionResponse response;
  while (stream_->Read(&response)) {
    if (response.has_still_waiting()) continue;
    if (!response.has_lease_question()) return response;
    v1::SessionRequest answer;
    answer.mutable_lease_answer()->set_number(response.lease_question().number());
    Send(answer);
  }
  return std::nullopt;
}

std::optional<v1::SessionResponse> RawSession::Await(v1::SessionResponse::KindCase kind) {
  for (;;) {
    auto response = Receive();
    if (!response.has_value() || response->kind_case() == kind) return response;
  }
}

RawStatus RawSession::End() {
  while (Receive().has_value()) {
  }
  finished_ = true;
  const grpc::Status status = stream_->Finish();
  google::rpc::Status details;
  details.ParseFromString(status.error_details());
  RawStatus raw = RawStatusOf(details);
  raw.code = status.error_code();
  raw.message = status.error_message();
  return raw;
}

v1::SessionRequest RawSession::OpenRequest(std::uint32_t rank, std::uint32_t world_size,
                                           const std::string& job) {
  v1::SessionRequest request;
  v1::OpenSession& open = *request.mutable_open_session();
  open.mutable_protocol()->set_oldest(kProtocolOldest);
  open.mutable_protocol()->set_newest(kProtocolNewest);
  open.set_shared_memory_abi(kSharedMemoryAbi);
  open.set_job_id(job);
  open.set_rank(rank);
  open.set_world_size(world_size);
  open.set_client("raw");
  return request;
}

std::optional<v1::SessionOpened> RawSession::Open(std::uint32_t rank, std::uint32_t world_size,
                                                  const std::string& job) {
  if (!Send(OpenRequest(rank, world_size, job))) return std::nullopt;
  auto response = Await(v1::SessionResponse::kSessionOpened);
  if (!response.has_value()) return std::nullopt;
  return response->session_opened();
}

std::unique_ptr<RawMemory> RawSession::MapStaging(const v1::SessionOpened& opened,
                                                  const std::string& side_socket) {
  FdAnswer answer = AskSideSocket(side_socket, FdRequestBytes(opened.staging_nonce()));
  if (answer.descriptors.size() != 1) return nullptr;
  return std::make_unique<RawMemory>(std::move(answer.descriptors[0]), opened.staging_bytes());
}

v1::SessionRequest RawSession::AllReduceRequest(std::uint64_t count) {
  v1::SessionRequest request;
  request.mutable_all_reduce()->set_sequence(1);
  request.mutable_all_reduce()->set_dtype(v1::DATA_TYPE_FLOAT32);
  request.mutable_all_reduce()->set_count(count);
  request.mutable_all_reduce()->set_op(v1::REDUCE_OP_SUM);
  return request;
}

v1::SessionRequest RawSession::LayoutRequest(std::size_t buckets, std::uint64_t count,
                                             const std::string& name) {
  v1::SessionRequest request;
  v1::RegisterLayout& layout = *request.mutable_register_layout();
  layout.set_request_id(1);
  layout.set_name(name);
  for (std::size_t i = 0; i < buckets; ++i) {
    v1::ExplicitBucket& bucket = *layout.add_explicit_buckets();
    bucket.set_dtype(v1::DATA_TYPE_FLOAT32);
    bucket.set_count(count);
  }
  return request;
}

std::optional<v1::LayoutAssigned> RawSession::Register(const v1::SessionRequest& request) {
  if (!Send(request)) return std::nullopt;
  auto response = Await(v1::SessionResponse::kLayoutAssigned);
  if (!response.has_value()) return std::nullopt;
  return response->layout_assigned();
}

std::shared_ptr<RawMemory> RawSession::Map(const v1::LayoutAssigned& assigned,
                                           const std::string& side_socket, bool populate) {
  FdAnswer answer = AskSideSocket(side_socket, FdRequestBytes(assigned.nonce()));
  if (!answer.answered || answer.status != 0 || answer.descriptors.size() != 2) return nullptr;
  auto arena =
      std::make_shared<RawMemory>(std::move(answer.descriptors[0]), assigned.arena_bytes());
  semaphores_ = std::make_shared<RawMemory>(
      std::move(answer.descriptors[1]),
      SemaphoreBytes(static_cast<std::size_t>(assigned.buckets_size())));
  if (populate && !(arena->Populate() && semaphores_->Populate())) return nullptr;
  return arena;
}

bool RawSession::Mapped(std::uint32_t channel) {
  v1::SessionRequest request;
  request.mutable_arena_mapped()->set_channel(channel);
  return Send(request);
}

std::optional<RawLayout> RawSession::JoinLayout(const v1::SessionRequest& request,
                                                const std::string& side_socket) {
  const auto assigned = Register(request);
  if (!assigned.has_value()) return std::nullopt;
  RawLayout layout{assigned->channel(), Map(*assigned, side_socket)};
  if (layout.arena == nullptr || !Mapped(layout.channel) ||
      !Await(v1::SessionResponse::kLayoutReady).has_value()) {
    return std::nullopt;
  }
  return layout;
}

bool RawSession::Ready(std::uint32_t channel, std::uint64_t step,
                       const std::vector<std::uint32_t>& buckets) {
  v1::SessionRequest request;
  request.mutable_bucket_ready()->set_channel(channel);
  request.mutable_bucket_ready()->set_step(step);
  for (const std::uint32_t bucket : buckets) request.mutable_bucket_ready()->add_buckets(bucket);
  return Send(request);
}

bool RawSession::EndStep(std::uint32_t channel, std::uint64_t step, bool ready_rest) {
  v1::SessionRequest request;
  request.mutable_end_step()->set_channel(channel);
  request.mutable_end_step()->set_step(step);
  request.mutable_end_step()->set_ready_rest(ready_rest);
  return Send(request);
}

}  // namespace gradsync::fault
