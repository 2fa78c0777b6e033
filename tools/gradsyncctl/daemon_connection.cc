#include "tools/gradsyncctl/daemon_connection.h"

#include <grp.h>
#include <grpcpp/client_context.h>
#include <grpcpp/create_channel_posix.h>
#include <grpcpp/support/channel_arguments.h>
#include <sys/socket.h>
#include <sys/stat.h>
#include <sys/time.h>
#include <sys/un.h>

#include <cerrno>
#include <chrono>
#include <cstring>
#include <utility>

#include "absl/strings/match.h"
#include "absl/strings/str_cat.h"
#include "absl/time/clock.h"
#include "daemon/base/unique_fd.h"
#include "proto/gradsync/duration_text.h"
#include "tools/gradsyncctl/quantity.h"

namespace gradsync {
namespace {

std::string HowToStart(const std::string& socket) {
  return absl::StrCat("start it with 'gradsyncd --socket=", socket,
                      "', or name its socket with --socket PATH or GRADSYNC_SOCKET");
}

absl::Status PermissionDenied(const std::string& socket, const struct stat* file) {
  std::string group_hint = "join the group of the socket's directory";
  const std::string folder = socket.substr(0, socket.rfind('/'));
  struct stat around = {};
  if (file != nullptr) {
    if (const group* owner = getgrgid(file->st_gid); owner != nullptr) {
      group_hint = absl::StrCat("join its group ", owner->gr_name);
    }
  } else if (stat(folder.c_str(), &around) == 0 && (around.st_mode & S_IXGRP) != 0) {
    if (const group* owner = getgrgid(around.st_gid); owner != nullptr) {
      group_hint = absl::StrCat("join group ", owner->gr_name, " of its folder ", folder);
    }
  }
  return absl::PermissionDeniedError(absl::StrCat("not allowed to connect to ", socket, ": ",
                                                  group_hint, ", or ask as the daemon's user"));
}

absl::Status ConnectError(int error, const std::string& socket) {
  struct stat file = {};
  const bool found = stat(socket.c_str(), &file) == 0;
  switch (error) {
    case ENOENT:
    case ENOTDIR:
      return absl::NotFoundError(absl::StrCat("no daemon at ", socket, ": ", HowToStart(socket)));
    case ECONNREFUSED:
      if (found && !S_ISSOCK(file.st_mode)) {
        return absl::InvalidArgumentError(absl::StrCat(
            socket, " is not a socket; name the daemon's with --socket PATH or GRADSYNC_SOCKET"));
      }
      return absl::UnavailableError(absl::StrCat(
          "no daemon at ", socket, " any more: nobody listens there; ", HowToStart(socket)));
    case EACCES:
    case EPERM:
      return PermissionDenied(socket, found ? &file : nullptr);
    case EAGAIN:  // connect() ran into SO_SNDTIMEO: the queue of connections is full
      return absl::DeadlineExceededError(
          absl::StrCat("the daemon at ", socket,
                       " accepts no connection: it is overloaded or stopped; look at "
                       "its log, or allow more time with --timeout SECONDS"));
    default:
      return absl::UnavailableError(
          absl::StrCat("cannot connect to ", socket, ": ", strerror(error),
                       "; check the path that --socket or GRADSYNC_SOCKET names"));
  }
}

absl::StatusOr<daemon::UniqueFd> Connect(const std::string& socket_path, absl::Duration timeout) {
  sockaddr_un address = {};
  address.sun_family = AF_UNIX;
  if (socket_path.size() >= sizeof(address.sun_path)) {
    return absl::InvalidArgumentError(absl::StrCat(
        "the socket's path ", socket_path, " is longer than ", sizeof(address.sun_path) - 1,
        " bytes, which no socket's can be; name a shorter one with --socket PATH"));
  }
  std::memcpy(address.sun_path, socket_path.data(), socket_path.size());

  daemon::UniqueFd fd(socket(AF_UNIX, SOCK_STREAM | SOCK_CLOEXEC, 0));
  if (!fd.valid()) return ConnectError(errno, socket_path);
  const timeval limit = absl::ToTimeval(timeout);
  if (setsockopt(fd.get(), SOL_SOCKET, SO_SNDTIMEO, &limit, sizeof(limit)) != 0 ||
      connect(fd.get(), reinterpret_cast<const sockaddr*>(&address), sizeof(address)) != 0) {
    return ConnectError(errno, socket_path);
  }
  return fd;
}

// Whether gRPC refused the answer here, because it has more than `most_bytes`. The daemon's
// refusals have the same code. If the daemon refuses a long question, its message even has the same
// words, but with another number.
bool IsTooLong(const grpc::Status& status, std::size_t most_bytes) {
  return status.error_code() == grpc::StatusCode::RESOURCE_EXHAUSTED &&
         absl::StrContains(status.error_message(), "Received message larger than max") &&
         absl::EndsWith(status.error_message(), absl::StrCat("vs. ", most_bytes, ")"));
}

// Runs one unary call of a stub.
template <typename Stub, typename Request, typename Response>
grpc::Status Call(absl::Time deadline, Stub* stub,
                  grpc::Status (Stub::*method)(grpc::ClientContext*, const Request&, Response*),
                  const Request& request, Response* response) {
  grpc::ClientContext context;
  context.set_deadline(absl::ToChronoTime(deadline));
  return (stub->*method)(&context, request, response);
}

}  // namespace

absl::StatusOr<DaemonConnection> DaemonConnection::Open(const std::string& socket,
                                                        absl::Duration timeout,
                                                        std::size_t most_bytes) {
  DaemonConnection connection(socket, timeout, absl::Now() + timeout, most_bytes);
  absl::StatusOr<daemon::UniqueFd> fd = Connect(socket, timeout);
  if (!fd.ok()) return std::move(fd).status();
  grpc::ChannelArguments arguments;
  arguments.SetMaxReceiveMessageSize(static_cast<int>(most_bytes));
  const std::shared_ptr<grpc::Channel> channel =
      grpc::CreateCustomInsecureChannelFromFd("gradsyncd", fd->release(), arguments);
  connection.introspection_ = v1::Introspection::NewStub(channel);
  connection.health_ = grpc::health::v1::Health::NewStub(channel);
  return connection;
}

absl::StatusOr<v1::GetStatusResponse> DaemonConnection::GetStatus(const std::string& job) {
  v1::GetStatusRequest request;
  request.set_job_id(job);
  v1::GetStatusResponse response;
  absl::Status status = Translate(Call(deadline_, introspection_.get(),
                                       &v1::Introspection::Stub::GetStatus, request, &response));
  if (!status.ok()) return status;
  return response;
}

absl::StatusOr<v1::GetStatsResponse> DaemonConnection::GetStats(const std::string& job) {
  v1::GetStatsRequest request;
  request.set_job_id(job);
  v1::GetStatsResponse response;
  absl::Status status = Translate(Call(deadline_, introspection_.get(),
                                       &v1::Introspection::Stub::GetStats, request, &response));
  if (!status.ok()) return status;
  return response;
}

absl::StatusOr<v1::GetTimelineResponse> DaemonConnection::GetTimeline(const std::string& job,
                                                                      const std::string& layout,
                                                                      std::uint32_t steps) {
  v1::GetTimelineRequest request;
  request.set_job_id(job);
  request.set_layout(layout);
  request.set_steps(steps);
  v1::GetTimelineResponse response;
  absl::Status status = Translate(Call(deadline_, introspection_.get(),
                                       &v1::Introspection::Stub::GetTimeline, request, &response));
  if (!status.ok()) return status;
  return response;
}

absl::StatusOr<ServiceHealth> DaemonConnection::CheckHealth(const std::string& service) {
  grpc::health::v1::HealthCheckRequest request;
  request.set_service(service);
  grpc::health::v1::HealthCheckResponse response;
  const grpc::Status status =
      Call(deadline_, health_.get(), &grpc::health::v1::Health::Stub::Check, request, &response);
  if (status.error_code() == grpc::StatusCode::NOT_FOUND) {
    return ServiceHealth{service, grpc::health::v1::HealthCheckResponse::SERVICE_UNKNOWN};
  }
  if (!status.ok()) return Translate(status);
  return ServiceHealth{service, response.status()};
}

absl::Status DaemonConnection::Translate(const grpc::Status& status) const {
  if (IsTooLong(status, most_bytes_)) {
    return absl::ResourceExhaustedError(absl::StrCat(
        "the daemon at ", socket_, " has an answer of more than ", FormatBytes(most_bytes_),
        ": ask about one job, as with 'gradsyncctl status --job ID', or for fewer steps"));
  }
  switch (status.error_code()) {
    case grpc::StatusCode::OK:
      return absl::OkStatus();
    case grpc::StatusCode::DEADLINE_EXCEEDED:
      return absl::DeadlineExceededError(absl::StrCat(
          "the daemon at ", socket_, " did not answer within ", DurationText(timeout_),
          ": it is overloaded or stopped; look at its log, or allow more time with --timeout "
          "SECONDS"));
    case grpc::StatusCode::UNAVAILABLE:
      return absl::UnavailableError(absl::StrCat(
          "what listens at ", socket_, " closed the connection (", status.error_message(),
          "): it is ending, or it is not a gradsyncd; ask "
          "again, or give gradsyncd's socket with --socket"));
    case grpc::StatusCode::UNIMPLEMENTED:
      return absl::UnimplementedError(
          absl::StrCat("what listens at ", socket_,
                       " does not know this question: it is not a gradsyncd, or an older one than "
                       "this gradsyncctl; install both from one release"));
    default:
      return absl::Status(static_cast<absl::StatusCode>(status.error_code()),
                          absl::StrCat("the daemon at ", socket_, ": ", status.error_message()));
  }
}

}  // namespace gradsync
