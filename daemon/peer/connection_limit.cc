#include "daemon/peer/connection_limit.h"

#include <netinet/in.h>

#include <algorithm>
#include <iterator>
#include <string>
#include <utility>

#include "absl/strings/str_cat.h"
#include "daemon/base/error.h"
#include "daemon/session/descriptor_quota.h"

namespace gradsync::daemon {
namespace {

// Each job that spans two nodes has a connection between them.
constexpr std::size_t kMostPerAddress = 1024;
constexpr std::size_t kMost = 8192;
// It looks for closed connections this often. Otherwise each one that is refused would cost a look
// at all.
constexpr std::uint64_t kLookNs = 100'000'000;
// An address waits so long after an End(). Meanwhile its calls end.
constexpr std::uint64_t kPauseNs = 1'000'000'000;

// The peer's address, in the network's order, and its port.
std::pair<absl::string_view, std::uint16_t> EndOf(const sockaddr_storage& peer) {
  if (peer.ss_family == AF_INET6) {
    const auto& v6 = reinterpret_cast<const sockaddr_in6&>(peer);
    return {{reinterpret_cast<const char*>(&v6.sin6_addr), sizeof(v6.sin6_addr)},
            ntohs(v6.sin6_port)};
  }
  const auto& v4 = reinterpret_cast<const sockaddr_in&>(peer);
  return {{reinterpret_cast<const char*>(&v4.sin_addr), sizeof(v4.sin_addr)}, ntohs(v4.sin_port)};
}

}  // namespace

ConnectionLimit::Bounds ConnectionLimit::OfProcess() {
  const std::size_t descriptors = DescriptorQuota::PerUserOfProcess();
  return {std::min(kMostPerAddress, descriptors / 2), std::min(kMost, descriptors)};
}

ConnectionLimit::Key ConnectionLimit::KeyOf(absl::string_view ip) {
  Key key{};
  if (ip.size() == key.size()) {
    std::copy(ip.begin(), ip.end(), key.begin());
  } else if (ip.size() == 4) {
    key[10] = key[11] = 0xFF;
    std::copy(ip.begin(), ip.end(), key.begin() + 12);
  }
  return key;
}

absl::Status ConnectionLimit::Admit(int connection, const sockaddr_storage& peer) {
  const std::uint64_t now_ns = clock_->NowNs();
  const auto [ip, port] = EndOf(peer);
  MutexLock lock(&mutex_);
  if (all_ended_) return absl::UnavailableError("the daemon is stopping");
  if (count_ >= bounds_.all && now_ns >= looked_ns_ + kLookNs) {
    looked_ns_ = now_ns;
    ForgetAllClosedLocked();
  }
  Address& address = addresses_[KeyOf(ip)];
  if (address.open.size() >= bounds_.per_address && now_ns >= address.looked_ns + kLookNs) {
    address.looked_ns = now_ns;
    ForgetClosedLocked(&address);
  }
  std::string why;
  if (now_ns < address.refused_until_ns) {
    why = "its address had too many open calls a moment ago";
  } else if (address.open.size() >= bounds_.per_address) {
    why = absl::StrCat("its address has ", address.open.size(), " connections, as many as it may (",
                       "LimitNOFILE= raises that to ", kMostPerAddress, ")");
  } else if (count_ >= bounds_.all) {
    why = absl::StrCat("other nodes have ", count_, " connections, as many as they may (",
                       "LimitNOFILE= raises that to ", kMost, ")");
  } else {
    address.open.push_back({BorrowedSocket(connection), port});
    ++count_;
    return absl::OkStatus();
  }
  return MakeError(absl::StatusCode::kResourceExhausted, reason::kQuota, why);
}

bool ConnectionLimit::End(const std::string& ip, std::uint16_t port) {
  MutexLock lock(&mutex_);
  const auto found = addresses_.find(KeyOf(ip));
  if (found == addresses_.end()) return false;
  bool ended = false;
  // An earlier connection from this port may not be forgotten yet.
  for (const Open& one : found->second.open) {
    if (one.port == port && one.socket.End()) ended = true;
  }
  if (ended) found->second.refused_until_ns = clock_->NowNs() + kPauseNs;
  return ended;
}

void ConnectionLimit::EndAll() {
  MutexLock lock(&mutex_);
  all_ended_ = true;
  for (const auto& address : addresses_) {
    for (const Open& one : address.second.open) one.socket.End();
  }
}

std::vector<sockaddr_storage> ConnectionLimit::OwnEnds(const std::string& ip, std::uint16_t port) {
  std::vector<sockaddr_storage> ends;
  MutexLock lock(&mutex_);
  const auto found = addresses_.find(KeyOf(ip));
  if (found == addresses_.end()) return ends;
  for (const Open& one : found->second.open) {
    if (one.port != port) continue;
    if (const auto own = one.socket.OwnAddress()) ends.push_back(*own);
  }
  return ends;
}

void ConnectionLimit::ForgetClosedLocked(Address* address) {
  std::vector<Open>& open = address->open;
  const auto closed = std::remove_if(open.begin(), open.end(),
                                     [](const Open& one) { return !one.socket.IsOpen(); });
  count_ -= static_cast<std::size_t>(open.end() - closed);
  open.erase(closed, open.end());
}

void ConnectionLimit::ForgetAllClosedLocked() {
  const std::uint64_t now_ns = clock_->NowNs();
  for (auto it = addresses_.begin(); it != addresses_.end();) {
    ForgetClosedLocked(&it->second);
    const bool unused = it->second.open.empty() && now_ns >= it->second.refused_until_ns;
    it = unused ? addresses_.erase(it) : std::next(it);
  }
}

}  // namespace gradsync::daemon
