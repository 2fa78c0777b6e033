// A client of the daemon's protocol without the checks of the client library.

#ifndef TESTS_FAULT_RAW_SESSION_H_
#define TESTS_FAULT_RAW_SESSION_H_

#include <grpcpp/grpcpp.h>

#include <cstdint>
#include <memory>
#include <optional>
#include <string>
#include <vector>

#include "gradsync/shared_memory.h"
#include "gradsync/v1/gradsync.grpc.pb.h"
#include "tests/kit/child_process.h"

namespace gradsync::fault {

// A status with the contents of its google.rpc.ErrorInfo.
struct RawStatus {
  int code = 0;
  std::string message;
  std::string reason;
  std::string Field(const std::string& name) const;
  std::vector<std::pair<std::string, std::string>> fields;
};
RawStatus RawStatusOf(const google::rpc::Status& status);
std::ostream& operator<<(std::ostream& out, const RawStatus& status);

// The answer of the side socket.
struct FdAnswer {
  bool answered = false;  // false: closed without a reply
  std::uint32_t status = 0;
  std::string message;
  std::vector<Descriptor> descriptors;
};
// Sends `bytes` as one packet and returns the answer.
FdAnswer AskSideSocket(const std::string& path, const std::string& bytes);
// A well-formed FdRequest.
std::string FdRequestBytes(const std::string& nonce);
// "X-fd.sock" of "X.sock".
std::string SideSocketOf(const std::string& socket);

// A shared mapping of a memfd.
class RawMemory {
 public:
  RawMemory(Descriptor fd, std::size_t bytes);
  RawMemory(const RawMemory&) = delete;
  RawMemory& operator=(const RawMemory&) = delete;
  ~RawMemory();
  // As the library does: allocates every page, and seals them.
  bool Populate();
  bool Seal();
  char* data() const { return data_; }
  std::size_t size() const { return bytes_; }
  int fd() const { return fd_.get(); }

 private:
  Descriptor fd_;
  std::size_t bytes_;
  char* data_;
};

// A rank's layout that is ready for steps.
struct RawLayout {
  std::uint32_t channel = 0;
  std::shared_ptr<RawMemory> arena;
};

// One session stream on a connection of its own. A read fails at the deadline of the call. Not
// thread-safe.
class RawSession {
 public:
  explicit RawSession(const std::string& socket);
  ~RawSession();
  RawSession(const RawSession&) = delete;
  RawSession& operator=(const RawSession&) = delete;

  // False once the stream has ended.
  bool Send(const v1::SessionRequest& request);
  // Returns the next message, or nothing at the stream's end. Answers lease questions and skips
  // them.
  std::optional<v1::SessionResponse> Receive();
  // Skips messages until one of `kind`. Returns nothing at the stream's end.
  std::optional<v1::SessionResponse> Await(v1::SessionResponse::KindCase kind);
  // Reads to the end of the stream and returns its status.
  RawStatus End();
  void Cancel() { context_.TryCancel(); }

  // ---- Short forms of Send().
  static v1::SessionRequest OpenRequest(std::uint32_t rank, std::uint32_t world_size,
                                        const std::string& job);
  // Opens the session and returns the answer.
  std::optional<v1::SessionOpened> Open(std::uint32_t rank, std::uint32_t world_size,
                                        const std::string& job);
  // Maps the session's staging memory, and populates none of it. Null on failure.
  static std::unique_ptr<RawMemory> MapStaging(const v1::SessionOpened& opened,
                                               const std::string& side_socket);
  // The sum of so many float32 values at the start of the staging memory, as the first operation.
  static v1::SessionRequest AllReduceRequest(std::uint64_t count);
  static v1::SessionRequest LayoutRequest(std::size_t buckets, std::uint64_t count,
                                          const std::string& name = "default");
  std::optional<v1::LayoutAssigned> Register(const v1::SessionRequest& request);
  // Claims and maps arena and semaphores. `populate`: touches all their pages, and seals them, too.
  // Null on failure.
  std::shared_ptr<RawMemory> Map(const v1::LayoutAssigned& assigned, const std::string& side_socket,
                                 bool populate = true);
  // The semaphores of the last Map().
  const std::shared_ptr<RawMemory>& semaphores() const { return semaphores_; }
  bool Mapped(std::uint32_t channel);
  // Registers the layout, maps its memory and waits until all ranks have. Nothing on failure.
  std::optional<RawLayout> JoinLayout(const v1::SessionRequest& request,
                                      const std::string& side_socket);
  bool Ready(std::uint32_t channel, std::uint64_t step, const std::vector<std::uint32_t>& buckets);
  bool EndStep(std::uint32_t channel, std::uint64_t step, bool ready_rest = false);

 private:
  grpc::ClientContext context_;
  std::shared_ptr<grpc::Channel> channel_;
  std::unique_ptr<v1::GradientSync::Stub> stub_;
  std::unique_ptr<grpc::ClientReaderWriter<v1::SessionRequest, v1::SessionResponse>> stream_;
  std::shared_ptr<RawMemory> semaphores_;
  bool finished_ = false;
};

}  // namespace gradsync::fault

#endif  // TESTS_FAULT_RAW_SESSION_H_
