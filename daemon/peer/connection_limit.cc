#include "daemon/peer/connection_limit.h"

#include <netinet/in.h>
#include <sys/stat.h>

#include <algorithm>
#include <cstring>
#include <iterator>
#include <string>

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

// The number of the socket that the descriptor names; 0: none.
ino_t SocketOf(int descriptor) {
  struct stat named {};
  return fstat(descriptor, &named) == 0 && S_ISSOCK(named.st_mode) ? named.st_ino : 0;
}

}  // namespace

ConnectionLimit::Bounds ConnectionLimit::OfProcess() {
  const std::size_t descriptors = DescriptorQuota::PerUserOfProcess();
  return {std::min(kMostPerAddress, descriptors / 2), std::min(kMost, descriptors)};
}

ConnectionLimit::Key ConnectionLimit::KeyOf(const sockaddr_storage& peer) {
  Key key{};
  if (peer.ss_family == AF_INET6) {
    std::memcpy(key.data(), &reinterpret_cast<const sockaddr_in6&>(peer).sin6_addr, key.size());
  } else {
    key[10] = key[11] = 0xFF;
    std::memcpy(&key[12], &reinterpret_cast<const sockaddr_in&>(peer).sin_addr, 4);
  }
  return key;
}

absl::Status ConnectionLimit::Admit(int connection, const sockaddr_storage& peer) {
  const std::uint64_t now_ns = clock_->NowNs();
  if (count_ >= bounds_.all && now_ns >= looked_ns_ + kLookNs) {
    looked_ns_ = now_ns;
    ForgetAllClosed();
  }
  Address& address = addresses_[KeyOf(peer)];
  if (address.open.size() >= bounds_.per_address && now_ns >= address.looked_ns + kLookNs) {
    address.looked_ns = now_ns;
    ForgetClosed(&address);
  }
  std::string why;
  if (address.open.size() >= bounds_.per_address) {
    why = absl::StrCat("its address has ", address.open.size(), " connections, as many as it may (",
                       "LimitNOFILE= raises that to ", kMostPerAddress, ")");
  } else if (count_ >= bounds_.all) {
    why = absl::StrCat("other nodes have ", count_, " connections, as many as they may (",
                       "LimitNOFILE= raises that to ", kMost, ")");
  } else {
    address.open.push_back({connection, SocketOf(connection)});
    ++count_;
    return absl::OkStatus();
  }
  return MakeError(absl::StatusCode::kResourceExhausted, reason::kQuota, why);
}

void ConnectionLimit::ForgetClosed(Address* address) {
  std::vector<Open>& open = address->open;
  const auto closed = std::remove_if(open.begin(), open.end(), [](const Open& one) {
    return SocketOf(one.descriptor) != one.socket;
  });
  count_ -= static_cast<std::size_t>(open.end() - closed);
  open.erase(closed, open.end());
}

void ConnectionLimit::ForgetAllClosed() {
  for (auto it = addresses_.begin(); it != addresses_.end();) {
    ForgetClosed(&it->second);
    it = it->second.open.empty() ? addresses_.erase(it) : std::next(it);
  }
}

}  // namespace gradsync::daemon
