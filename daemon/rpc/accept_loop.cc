#include "daemon/rpc/accept_loop.h"

#include <fcntl.h>
#include <linux/sockios.h>
#include <poll.h>
#include <sys/epoll.h>
#include <sys/eventfd.h>
#include <sys/ioctl.h>
#include <sys/socket.h>
#include <sys/timerfd.h>
#include <unistd.h>

#include <algorithm>
#include <cerrno>
#include <cstring>
#include <string_view>
#include <utility>
#include <vector>

#include "daemon/base/clock.h"
#include "daemon/base/error.h"
#include "daemon/base/logging.h"
#include "daemon/base/passed_descriptors.h"
#include "daemon/rpc/fd_request.h"
#include "proto/gradsync/shared_memory.h"

namespace gradsync::daemon {
namespace {

// Time that a client of the side socket has to send its request, the most clients of a user that
// have not sent it or not read the answer, and the descriptors of each: the accepted one and the
// process.
constexpr std::uint64_t kFdPatienceNs = 5'000'000'000;
constexpr std::size_t kFdClientsPerUser = 64;
constexpr std::size_t kFdClientDescriptors = 2;
constexpr int kEvents = 32;
// Descriptors that are kept back for connections of users who have few.
constexpr std::size_t kReserve = 96;
constexpr char kScarce[] = "the daemon has few descriptors left (LimitNOFILE=)";
// A user may connect at once as often as it may have sessions, and so many times more.
constexpr std::size_t kConnectsBesideSessions = 64;
constexpr char kNotWatched[] = "the kernel watches no more (fs.epoll.max_user_watches)";
constexpr char kTooOften[] = "the user connects too often; try again in some seconds";
// Connections that are accepted before other events are looked at.
constexpr int kAcceptedAtOnce = 64;

itimerspec Every(std::uint64_t ms) {
  itimerspec spec{};
  spec.it_interval.tv_sec = static_cast<time_t>(ms / 1000);
  spec.it_interval.tv_nsec = static_cast<long>(ms % 1000) * 1'000'000;
  spec.it_value = spec.it_interval;
  return spec;
}

// Users who may stop the daemon may also keep it busy.
bool IsTrusted(const Tenant& user) {
  return user.pod.none() && (user.uid == 0 || user.uid == geteuid());
}

// The user of a refused process. The process, or a new one with its pid, may have become another.
Tenant UserNow(const Tenant& refused, uid_t uid) {
  return refused.uid == uid ? refused : Tenant(uid);
}

void Drain(int fd) {
  std::uint64_t count = 0;
  // Nonblocking. The count does not matter.
  if (read(fd, &count, sizeof(count)) < 0) return;
}

// Sends the reply with its descriptors. False, and `errno` is set: the client does not get it.
bool SendReply(int socket, const FdReply& reply, const std::vector<SessionTable::Descriptor>& fds) {
  iovec data{const_cast<FdReply*>(&reply), sizeof(reply)};
  alignas(cmsghdr) char control[CMSG_SPACE(sizeof(int) * 4)] = {};
  msghdr message{};
  message.msg_iov = &data;
  message.msg_iovlen = 1;
  if (!fds.empty()) {
    message.msg_control = control;
    message.msg_controllen = CMSG_SPACE(sizeof(int) * fds.size());
    cmsghdr* const header = CMSG_FIRSTHDR(&message);
    header->cmsg_level = SOL_SOCKET;
    header->cmsg_type = SCM_RIGHTS;
    header->cmsg_len = CMSG_LEN(sizeof(int) * fds.size());
    int* const out = reinterpret_cast<int*>(CMSG_DATA(header));
    for (std::size_t i = 0; i < fds.size(); ++i) out[i] = fds[i].fd;
  }
  return sendmsg(socket, &message, MSG_NOSIGNAL | MSG_DONTWAIT) >= 0;
}

// True if the other side has not read all that was sent.
bool IsUnread(int socket) {
  int unread = 0;
  return ioctl(socket, SIOCOUTQ, &unread) == 0 && unread > 0;
}

}  // namespace

absl::StatusOr<std::unique_ptr<AcceptLoop>> AcceptLoop::Start(ListeningSocket grpc_socket,
                                                              ListeningSocket fd_socket,
                                                              Connections* connections,
                                                              SessionTable* sessions, Hooks hooks) {
  std::unique_ptr<AcceptLoop> loop(new AcceptLoop(std::move(grpc_socket), std::move(fd_socket),
                                                  connections, sessions, std::move(hooks)));
  if (absl::Status status = loop->Init(); !status.ok()) return status;
  loop->thread_ = std::thread([raw = loop.get()] { raw->Loop(); });
  return loop;
}

AcceptLoop::AcceptLoop(ListeningSocket grpc_socket, ListeningSocket fd_socket,
                       Connections* connections, SessionTable* sessions, Hooks hooks)
    : grpc_socket_(std::move(grpc_socket)),
      fd_socket_(std::move(fd_socket)),
      connections_(connections),
      sessions_(sessions),
      hooks_(std::move(hooks)),
      reserve_(kReserve, connections->quota()),
      rate_(kConnectsBesideSessions + sessions->policy().quota_sessions_per_user),
      side_rate_(kConnectsBesideSessions + sessions->policy().quota_sessions_per_user) {}

absl::Status AcceptLoop::Init() {
  epoll_ = UniqueFd(epoll_create1(EPOLL_CLOEXEC));
  timer_ = UniqueFd(timerfd_create(CLOCK_MONOTONIC, TFD_CLOEXEC | TFD_NONBLOCK));
  watchdog_ = UniqueFd(timerfd_create(CLOCK_MONOTONIC, TFD_CLOEXEC | TFD_NONBLOCK));
  wake_ = UniqueFd(eventfd(0, EFD_CLOEXEC | EFD_NONBLOCK));
  if (!epoll_.valid() || !timer_.valid() || !watchdog_.valid() || !wake_.valid()) {
    return absl::ErrnoToStatus(errno, "cannot make the accept loop's descriptors");
  }
  // The service manager's may block.
  for (const int fd : {grpc_socket_.fd(), fd_socket_.fd()}) {
    fcntl(fd, F_SETFL, fcntl(fd, F_GETFL) | O_NONBLOCK);
    // Otherwise the thread that reads a message with descriptors, or closes its connection, closes
    // these, too, and that may take long.
    if (!RefuseDescriptors(fd)) {
      LogLimited(LogLevel::kWarning,
                 "this kernel passes descriptors of clients to the daemon, and a client can stop "
                 "the daemon with them. Use Linux 6.16 or newer, or let in only users whom you "
                 "trust");
    }
  }
  const auto own = [](Kind kind) {
    Watched watched;
    watched.kind = kind;
    return watched;
  };
  if (!Watch(grpc_socket_.fd(), EPOLLIN, own(Kind::kGrpcListener)) ||
      !Watch(fd_socket_.fd(), EPOLLIN, own(Kind::kFdListener)) ||
      !Watch(timer_.get(), EPOLLIN, own(Kind::kTimer)) ||
      !Watch(watchdog_.get(), EPOLLIN, own(Kind::kWatchdog)) ||
      !Watch(wake_.get(), EPOLLIN, own(Kind::kWake))) {
    return absl::ErrnoToStatus(errno, "cannot watch the accept loop's descriptors");
  }
  if (hooks_.watchdog_period > absl::ZeroDuration()) {
    const itimerspec every = Every(static_cast<std::uint64_t>(
        std::max<std::int64_t>(1, absl::ToInt64Milliseconds(hooks_.watchdog_period))));
    timerfd_settime(watchdog_.get(), 0, &every, nullptr);
  }
  return absl::OkStatus();
}

AcceptLoop::~AcceptLoop() {
  if (!thread_.joinable()) return;
  stopping_.store(true);
  const std::uint64_t one = 1;
  while (write(wake_.get(), &one, sizeof(one)) < 0 && errno == EINTR) {
  }
  thread_.join();
}

bool AcceptLoop::Watch(int fd, std::uint32_t events, Watched watched) {
  const std::uint64_t key = ++last_key_;
  epoll_event event{};
  event.events = events;
  event.data.u64 = key;
  if (epoll_ctl(epoll_.get(), EPOLL_CTL_ADD, fd, &event) != 0) return false;
  watched_.emplace(key, std::move(watched));
  return true;
}

void AcceptLoop::Forget(std::uint64_t key) {
  const auto found = watched_.find(key);
  if (found == watched_.end()) return;
  if (found->second.kind == Kind::kProcess) {
    epoll_ctl(epoll_.get(), EPOLL_CTL_DEL, found->second.caller.pidfd->get(), nullptr);
  } else if (found->second.fd.valid()) {
    epoll_ctl(epoll_.get(), EPOLL_CTL_DEL, found->second.fd.get(), nullptr);
  }
  if (found->second.kind == Kind::kFdClient) {
    const auto clients = fd_clients_.find(found->second.caller.tenant());
    if (--clients->second == 0) fd_clients_.erase(clients);
  }
  watched_.erase(found);
}

void AcceptLoop::Loop() {
  epoll_event events[kEvents];
  while (!stopping_.load()) {
    const int count = epoll_wait(epoll_.get(), events, kEvents, -1);
    for (int i = 0; i < count; ++i) Handle(events[i].data.u64, events[i].events);
  }
}

void AcceptLoop::Handle(std::uint64_t key, std::uint32_t events) {
  const auto found = watched_.find(key);
  if (found == watched_.end()) return;  // forgotten earlier in this round
  switch (found->second.kind) {
    case Kind::kGrpcListener:
      for (int i = 0; i < kAcceptedAtOnce && AcceptConnection(); ++i) {
      }
      break;
    case Kind::kFdListener:
      AcceptFd();
      break;
    case Kind::kTimer:
      Drain(timer_.get());
      Tick();
      break;
    case Kind::kWatchdog:
      Drain(watchdog_.get());
      hooks_.watchdog();
      break;
    case Kind::kWake:
      Drain(wake_.get());
      break;
    case Kind::kConnection:
      if ((events & (EPOLLHUP | EPOLLERR | EPOLLRDHUP)) != 0) ConnectionClosed(key);
      break;
    case Kind::kProcess:
      ProcessEnded(key);
      break;
    case Kind::kFdClient:
      if (!found->second.answered && AnswerFd(&found->second)) {
        // From now on only the client's end is an event. Tick() sees that it has read.
        epoll_event none{};
        none.data.u64 = key;
        epoll_ctl(epoll_.get(), EPOLL_CTL_MOD, found->second.fd.get(), &none);
      } else {
        Forget(key);
      }
      break;
  }
}

UniqueFd AcceptLoop::Accept(Kind listener, bool* scarce) {
  const auto accept = [this, listener] {
    return UniqueFd(accept4(FdOf(listener), nullptr, nullptr, SOCK_CLOEXEC | SOCK_NONBLOCK));
  };
  UniqueFd accepted = accept();
  if (accepted.valid() || (errno != EMFILE && errno != ENFILE)) return accepted;
  *scarce = true;
  ArmTick(true);  // it refills the reserve
  if (!reserve_.Free(Connections::kDescriptors)) {
    Pause(listener);
    return accepted;
  }
  accepted = accept();
  if (accepted.valid()) return accepted;
  // If nobody waits, the kernel says so only if there is a descriptor.
  const bool none_left = errno == EMFILE || errno == ENFILE;
  reserve_.Refill();
  if (none_left) Pause(listener);
  return accepted;
}

bool AcceptLoop::HasDescriptors(bool* scarce) {
  // Besides the accepted one.
  constexpr std::size_t kMore = Connections::kDescriptors - 1;
  if (*scarce || DescriptorReserve(kMore).full()) return true;
  *scarce = true;
  ArmTick(true);
  return reserve_.Free(kMore);
}

std::string AcceptLoop::WhyRefused(const Tenant& user, bool scarce) {
  const bool trusted = IsTrusted(user);
  const bool full = connections_->IsFull(user);
  if (!full && scarce && !reserve_.Admits(connections_->Count(user), trusted)) return kScarce;
  // A refused connection takes as much of this thread's time as others do.
  if (!trusted && !rate_.Take(user, MonotonicNowNs())) return kTooOften;
  return full ? "the user has as many connections, or descriptors, as a user may" : "";
}

void AcceptLoop::Refused(std::string_view message, const Tenant& user, pid_t pid,
                         absl::string_view why) {
  connections_->CountRefused(user);
  LogLimited(LogLevel::kWarning, message, {{"uid", user}, {"pid", pid}, {"why", why}});
}

bool AcceptLoop::AcceptConnection() {
  // Descriptors of connections that were refused or have ended belong to the reserve first.
  reserve_.Refill();
  bool scarce = false;
  UniqueFd accepted = Accept(Kind::kGrpcListener, &scarce);
  if (!accepted.valid()) return false;
  AdmitOrRefuse(std::move(accepted), scarce);
  return true;
}

void AcceptLoop::AdmitOrRefuse(UniqueFd accepted, bool scarce) {
  const auto user = CredentialsOf(accepted.get());
  if (!user.ok()) return;
  constexpr std::string_view kRefused = "connection refused";
  if (const auto refused = rate_.Refuses(user->pid, MonotonicNowNs())) {
    return Refused(kRefused, UserNow(*refused, user->uid), user->pid, kTooOften);
  }
  absl::StatusOr<ClientProcess> caller = absl::ResourceExhaustedError("");
  if (HasDescriptors(&scarce)) {
    caller = ClientOf(accepted.get());
    if (!caller.ok()) return;
  }
  const Tenant tenant = caller.ok() ? caller->tenant() : Tenant(user->uid);
  const std::string why = caller.ok() ? WhyRefused(tenant, scarce) : kScarce;
  if (!why.empty()) {
    if (why == kTooOften) rate_.Refuse(user->pid, tenant, MonotonicNowNs());
    return Refused(kRefused, tenant, user->pid, why);
  }
  auto admitted = connections_->Admit(accepted, *caller);
  if (!admitted.ok()) {
    return Refused(kRefused, tenant, user->pid, admitted.status().message());
  }
  Watched connection;
  connection.kind = Kind::kConnection;
  connection.connection = admitted->id;
  connection.caller = *caller;
  const int fd = accepted.get();
  connection.fd = std::move(accepted);
  if (!Watch(fd, EPOLLRDHUP, std::move(connection))) {
    connections_->Remove(admitted->id);
    return Refused(kRefused, tenant, user->pid, kNotWatched);
  }
  if (caller->pidfd != nullptr) {
    Watched process;
    process.kind = Kind::kProcess;
    process.connection = admitted->id;
    process.caller = *caller;
    Watch(caller->pidfd->get(), EPOLLIN, std::move(process));  // else the connection's end tells
  }
  if (absl::Status given = hooks_.connected(*std::move(admitted), tenant); !given.ok()) {
    Refused(kRefused, tenant, user->pid, given.message());
    shutdown(fd, SHUT_RDWR);  // the loop sees its end
  }
  ArmTick(true);
}

void AcceptLoop::ConnectionClosed(std::uint64_t key) {
  // Only the bookkeeping ends here. The end of the stream ends the session.
  const std::uint64_t connection = watched_[key].connection;
  connections_->Remove(connection);
  Forget(key);
  for (auto it = watched_.begin(); it != watched_.end(); ++it) {
    if (it->second.kind == Kind::kProcess && it->second.connection == connection) {
      // The process may live on. Its session ends with the stream.
      Forget(it->first);
      break;
    }
  }
}

void AcceptLoop::ProcessEnded(std::uint64_t key) {
  const ClientProcess caller = watched_[key].caller;
  const std::uint64_t connection = watched_[key].connection;
  for (const auto& session : sessions_->Sessions()) {
    if (session->identity().process.pidfd != caller.pidfd) continue;
    sessions_->End(session, ProcessEndedError(caller));
  }
  // A forked child may still hold the socket, so end the connection too.
  for (auto& [other_key, other] : watched_) {
    if (other.kind == Kind::kConnection && other.connection == connection) {
      shutdown(other.fd.get(), SHUT_RDWR);
    }
  }
  Forget(key);
}

void AcceptLoop::AcceptFd() {
  reserve_.Refill();
  bool scarce = false;
  UniqueFd accepted = Accept(Kind::kFdListener, &scarce);
  if (!accepted.valid()) return;
  const auto credentials = CredentialsOf(accepted.get());
  if (!credentials.ok()) return;
  constexpr std::string_view kRefused = "side socket: connection refused";
  if (const auto refused = side_rate_.Refuses(credentials->pid, MonotonicNowNs())) {
    return Refused(kRefused, UserNow(*refused, credentials->uid), credentials->pid, kTooOften);
  }
  if (!HasDescriptors(&scarce)) {
    return Refused(kRefused, Tenant(credentials->uid), credentials->pid, kScarce);
  }
  const auto caller = ClientOf(accepted.get());
  if (!caller.ok()) return;
  const Tenant user = caller->tenant();
  Watched client;
  const std::string why = WhySideRefused(user, scarce, &client.descriptors);
  if (!why.empty()) {
    if (why == kTooOften) side_rate_.Refuse(credentials->pid, user, MonotonicNowNs());
    if (why != kScarce) CountInVain(*caller);  // others may be the cause
    return Refused(kRefused, user, credentials->pid, why);
  }
  client.kind = Kind::kFdClient;
  client.caller = *caller;
  client.deadline_ns = MonotonicNowNs() + kFdPatienceNs;
  const int fd = accepted.get();
  client.fd = std::move(accepted);
  if (!Watch(fd, EPOLLIN, std::move(client))) {
    return Refused(kRefused, user, credentials->pid, kNotWatched);
  }
  ++fd_clients_[user];
  ArmTick(true);
}

std::string AcceptLoop::WhySideRefused(const Tenant& user, bool scarce,
                                       std::shared_ptr<void>* descriptors) {
  const bool trusted = IsTrusted(user);
  if (!trusted && !side_rate_.Has(user, MonotonicNowNs())) return kTooOften;
  const auto found = fd_clients_.find(user);
  const std::size_t clients = found == fd_clients_.end() ? 0 : found->second;
  if (clients >= kFdClientsPerUser) {
    return "the user has too many that say nothing, or do not read the answer";
  }
  if (scarce && !reserve_.Admits(clients, trusted)) return kScarce;
  auto taken = connections_->TakeDescriptors(user, kFdClientDescriptors);
  if (!taken.ok()) return std::string(taken.status().message());
  *descriptors = *std::move(taken);
  return "";
}

void AcceptLoop::CountInVain(const ClientProcess& caller) {
  if (!IsTrusted(caller.tenant())) side_rate_.Take(caller.tenant(), MonotonicNowNs());
}

bool AcceptLoop::AnswerFd(Watched* client) {
  char message[sizeof(FdRequest) + 1];  // one more: a longer message is no request
  const ssize_t size = recv(client->fd.get(), message, sizeof(message), MSG_DONTWAIT);
  const auto nonce =
      DecodeFdRequest({message, static_cast<std::size_t>(std::max<ssize_t>(size, 0))});
  using Claimed = absl::StatusOr<std::vector<SessionTable::Descriptor>>;
  const Claimed claimed =
      nonce.ok() ? sessions_->Claim(*nonce, client->caller) : Claimed(nonce.status());
  if (!claimed.ok()) {
    LogLimited(LogLevel::kWarning, "side socket: request refused",
               {{"uid", client->caller.tenant()},
                {"pid", client->caller.pid},
                {"why", claimed.status().message()}});
    CountInVain(client->caller);
    SendReply(client->fd.get(), EncodeFdReply(claimed.status(), 0), {});
    return false;
  }
  client->answered =
      SendReply(client->fd.get(), EncodeFdReply(absl::OkStatus(), claimed->size()), *claimed);
  if (!client->answered) {
    LogLimited(LogLevel::kWarning, "side socket: answer not sent",
               {{"uid", client->caller.tenant()},
                {"pid", client->caller.pid},
                {"why", std::strerror(errno)}});
  }
  return client->answered;
}

void AcceptLoop::Tick() {
  Resume();
  const bool more = hooks_.tick();
  const std::uint64_t now_ns = MonotonicNowNs();
  std::vector<std::uint64_t> expired;
  for (const auto& [key, watched] : watched_) {
    if (watched.kind != Kind::kFdClient) continue;
    const bool done = watched.answered ? !IsUnread(watched.fd.get()) : now_ns > watched.deadline_ns;
    if (done) expired.push_back(key);
  }
  for (const std::uint64_t key : expired) {
    if (!watched_[key].answered) CountInVain(watched_[key].caller);
    Forget(key);
  }
  // Nobody else refills the reserve.
  const bool busy = !fd_clients_.empty() || !paused_.empty() || !reserve_.full() ||
                    std::any_of(watched_.begin(), watched_.end(), [](const auto& entry) {
                      return entry.second.kind == Kind::kConnection;
                    });
  if (!busy && !more && sessions_->Sessions().empty()) ArmTick(false);
}

void AcceptLoop::ArmTick(bool on) {
  if (ticking_ == on) return;
  ticking_ = on;
  const itimerspec spec = on ? Every(kTickMs) : itimerspec{};
  timerfd_settime(timer_.get(), 0, &spec, nullptr);
}

void AcceptLoop::ListenTo(Kind listener, bool on) {
  for (const auto& [key, watched] : watched_) {
    if (watched.kind != listener) continue;
    epoll_event event{};
    event.events = on ? static_cast<std::uint32_t>(EPOLLIN) : 0;
    event.data.u64 = key;
    epoll_ctl(epoll_.get(), EPOLL_CTL_MOD, FdOf(listener), &event);
  }
}

void AcceptLoop::Pause(Kind listener) {
  paused_.insert(listener);
  ListenTo(listener, false);
  LogLimited(LogLevel::kError,
             "out of file descriptors: accepting no connections until the next tick");
  ArmTick(true);
}

void AcceptLoop::Resume() {
  reserve_.Refill();
  for (const Kind listener : paused_) ListenTo(listener, true);
  paused_.clear();
}

}  // namespace gradsync::daemon
