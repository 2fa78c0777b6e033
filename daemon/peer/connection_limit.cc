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
constexpr std::size_t kMostPerCaller = 1024;
constexpr std::size_t kMost = 8192;
constexpr std::uint64_t kSecondNs = 1'000'000'000;
// It looks for closed connections this often. Otherwise each one that is refused would cost a look
// at all.
constexpr std::uint64_t kLookNs = 100'000'000;
// Callers whose pause has ended are remembered up to this many, beside those with connections.
constexpr std::size_t kMostRemembered = 8192;

// The address of the other end, in the network's order, and its port.
std::pair<absl::string_view, std::uint16_t> EndOf(const sockaddr_storage& other_end) {
  if (other_end.ss_family == AF_INET6) {
    const auto& v6 = reinterpret_cast<const sockaddr_in6&>(other_end);
    return {{reinterpret_cast<const char*>(&v6.sin6_addr), sizeof(v6.sin6_addr)},
            ntohs(v6.sin6_port)};
  }
  const auto& v4 = reinterpret_cast<const sockaddr_in&>(other_end);
  return {{reinterpret_cast<const char*>(&v4.sin_addr), sizeof(v4.sin_addr)}, ntohs(v4.sin_port)};
}

absl::Status Refused(const std::string& why) {
  return MakeError(absl::StatusCode::kResourceExhausted, reason::kQuota, why);
}

}  // namespace

ConnectionLimit::Bounds ConnectionLimit::OfProcess() {
  const std::size_t descriptors = DescriptorQuota::PerUserOfProcess();
  const std::size_t all = std::min(kMost, descriptors);
  return {std::min(kMostPerCaller, all / 4), all / 2, all};
}

ConnectionLimit::Address ConnectionLimit::AddressOf(absl::string_view ip) {
  Address address{};
  if (ip.size() == address.size()) {
    std::copy(ip.begin(), ip.end(), address.begin());
  } else if (ip.size() == 4) {
    address[10] = address[11] = 0xFF;
    std::copy(ip.begin(), ip.end(), address.begin() + 12);
  }
  return address;
}

void ConnectionLimit::ForEachLocked(
    absl::string_view ip, std::uint16_t port,
    absl::FunctionRef<void(Callers::value_type*, const Open&)> found) {
  const Address address = AddressOf(ip);
  for (const Address& key : {Address{}, address}) {
    for (auto caller = callers_.lower_bound(CallerKey(key, std::nullopt));
         caller != callers_.end() && caller->first.first == key; ++caller) {
      // An earlier connection from this port may not be forgotten yet.
      for (const Open& one : caller->second.open) {
        if (one.other_end.port == port && one.other_end.ip == address && one.socket.IsOpen()) {
          found(&*caller, one);
        }
      }
    }
  }
}

absl::Status ConnectionLimit::CheckPause(const Caller& caller, const std::string& who,
                                         std::uint64_t now_ns) {
  const std::uint64_t left_ns = caller.pause.LeftNs(now_ns);
  if (left_ns == 0) return absl::OkStatus();
  return Refused(absl::StrCat("connections of ", who, " did harm; it may connect again in ",
                              (left_ns + kSecondNs - 1) / kSecondNs, " s"));
}

absl::Status ConnectionLimit::CheckPlacesLocked(const CallerKey& network) const {
  const std::size_t held = InNetworkLocked(network);
  if (held >= bounds_.per_network) {
    return Refused(absl::StrCat("the network ", NetworkText(network.first), " has ", held,
                                " connections, as many as it may"));
  }
  if (count_ >= bounds_.all) {
    return Refused(absl::StrCat("other nodes have ", count_, " connections, as many as they may (",
                                "LimitNOFILE= raises that to ", kMost, ")"));
  }
  if (held >= kFew && count_ >= bounds_.all - bounds_.all / kReservedPart) {
    return Refused(absl::StrCat("other nodes have ", count_, " connections of ", bounds_.all,
                                "; the last places are for those that have fewer than ", kFew));
  }
  return absl::OkStatus();
}

absl::Status ConnectionLimit::CheckCallerLocked(const Caller& caller,
                                                const std::string& who) const {
  if (caller.open.size() < bounds_.per_caller) return absl::OkStatus();
  return Refused(absl::StrCat(who, " has ", caller.open.size(), " connections, as many as it may (",
                              "LimitNOFILE= raises that to ", kMostPerCaller, ")"));
}

std::size_t ConnectionLimit::InNetworkLocked(const CallerKey& network) const {
  const auto found = networks_.find(network);
  return found == networks_.end() ? 0 : found->second;
}

absl::Status ConnectionLimit::Admit(int connection, const sockaddr_storage& other_end,
                                    absl::FunctionRef<Place()> place) {
  const std::uint64_t now_ns = clock_->NowNs();
  const auto [ip, port] = EndOf(other_end);
  const Address address = AddressOf(ip);
  {
    MutexLock lock(&mutex_);
    if (all_ended_) return absl::UnavailableError("the daemon is stopping");
    const auto known = callers_.find(CallerKey(address, std::nullopt));
    if (known != callers_.end() && known->second.pause.Lasts(now_ns)) {
      return CheckPause(known->second, "its address", now_ns);
    }
  }
  const Place where = place();
  const std::string who = !where.local ? "its address"
                          : where.user.has_value()
                              ? absl::StrCat("user ", *where.user, " of this machine")
                              : "unknown users of this machine";
  MutexLock lock(&mutex_);
  if (all_ended_) return absl::UnavailableError("the daemon is stopping");
  const CallerKey key = CallerKeyOf(address, where);
  const CallerKey network = NetworkOf(key);
  const bool many =
      !CheckPlacesLocked(network).ok() || callers_.size() >= bounds_.all + kMostRemembered;
  if (many && now_ns >= looked_ns_ + kLookNs) {
    looked_ns_ = now_ns;
    ForgetAllClosedLocked();
  }
  bool port_in_use = false;
  ForEachLocked(ip, port, [&](Callers::value_type*, const Open&) { port_in_use = true; });
  if (port_in_use) {
    return Refused(absl::StrCat("another connection from port ", port, " of its address is open"));
  }
  Callers::value_type& entry = *callers_.try_emplace(key).first;
  Caller& caller = entry.second;
  if (caller.open.size() >= bounds_.per_caller && now_ns >= caller.looked_ns + kLookNs) {
    caller.looked_ns = now_ns;
    ForgetClosedLocked(&entry);
  }
  absl::Status checked = CheckPause(caller, who, now_ns);
  if (checked.ok()) checked = CheckCallerLocked(caller, who);
  if (checked.ok()) checked = CheckPlacesLocked(network);
  if (!checked.ok()) return checked;
  caller.open.push_back({BorrowedSocket(connection), TcpEnd::Of(other_end)});
  ++count_;
  ++networks_[network];
  return absl::OkStatus();
}

bool ConnectionLimit::End(const std::string& ip, std::uint16_t port) {
  MutexLock lock(&mutex_);
  bool any = false;
  ForEachLocked(ip, port, [&](Callers::value_type* caller, const Open& one) {
    if (!one.socket.End()) return;
    caller->second.pause.Extend(clock_->NowNs());
    any = true;
  });
  return any;
}

std::vector<TcpEnd> ConnectionLimit::EndSilent(const SilentBytes& most,
                                               absl::FunctionRef<std::set<TcpEnd>()> greeted) {
  std::map<CallerKey, std::vector<Sender>> suspects;  // some of their senders may be silent
  {
    MutexLock lock(&mutex_);
    for (auto& [key, caller] : callers_) {
      std::vector<Sender> senders = SendersOf(&caller);
      if (IsMuch(senders, most)) {
        suspects.emplace(key, std::move(senders));
      } else {
        caller.sent_much = false;
      }
    }
  }
  if (suspects.empty()) return {};
  const std::set<TcpEnd> known = greeted();
  const auto is_known = [&](TcpEnd end) {
    end.interface = 0;  // gRPC does not name it
    return known.count(end) > 0;
  };
  std::vector<TcpEnd> ended;
  MutexLock lock(&mutex_);
  for (auto& [key, senders] : suspects) {
    const auto found = callers_.find(key);
    if (found == callers_.end()) continue;
    Caller& caller = found->second;
    for (Open& one : caller.open) one.greeted = one.greeted || is_known(one.other_end);
    senders.erase(std::remove_if(senders.begin(), senders.end(),
                                 [&](const Sender& sender) { return is_known(sender.other_end); }),
                  senders.end());
    const bool sent_much = std::exchange(caller.sent_much, IsMuch(senders, most));
    if (!sent_much || !caller.sent_much) continue;
    for (const Sender& sender : senders) {
      if (sender.socket.End()) ended.push_back(sender.other_end);
    }
    caller.pause.Extend(clock_->NowNs());
  }
  return ended;
}

std::vector<ConnectionLimit::Sender> ConnectionLimit::SendersOf(Caller* caller) {
  std::vector<Sender> senders;
  for (Open& one : caller->open) {
    const std::uint64_t received = one.socket.ReceivedBytes();
    if (received <= one.received) continue;  // or it is closed
    senders.push_back(
        {one.socket, one.other_end, received - one.received, one.greeted ? 0 : received});
    one.received = received;
  }
  return senders;
}

bool ConnectionLimit::IsMuch(const std::vector<Sender>& senders, const SilentBytes& most) {
  std::uint64_t bytes = 0;
  for (const Sender& sender : senders) {
    if (sender.first > most.first) return true;
    bytes += sender.bytes;
  }
  return bytes > most.per_look;
}

std::vector<TcpEnd> ConnectionLimit::EndVain(const VainBytes::Most& most) {
  std::vector<TcpEnd> ended;
  MutexLock lock(&mutex_);
  for (auto& [key, caller] : callers_) {
    std::uint64_t sum = 0;
    for (Open& one : caller.open) sum += one.vain.Look(one.socket, *one.input);
    for (Open& one : caller.open) {
      const bool refused = TakeRefusal(&one);
      const bool harmed = refused || one.input->long_headers.exchange(false);
      if (!harmed && !one.vain.AreMany(most, sum)) continue;
      one.vain.Forget();
      if (!one.socket.End() && !harmed) continue;
      ended.push_back(one.other_end);
      caller.pause.Extend(clock_->NowNs());
    }
  }
  return ended;
}

bool ConnectionLimit::TakeRefusal(Open* one) {
  return !one->refused && (one->refused = one->socket.Headers().refused);
}

void ConnectionLimit::EndAll() {
  MutexLock lock(&mutex_);
  all_ended_ = true;
  for (const auto& caller : callers_) {
    for (const Open& one : caller.second.open) one.socket.End();
  }
}

std::optional<CallerKey> ConnectionLimit::CallerAt(const std::string& ip, std::uint16_t port) {
  std::optional<CallerKey> key;
  MutexLock lock(&mutex_);
  ForEachLocked(ip, port, [&](Callers::value_type* caller, const Open&) { key = caller->first; });
  return key;
}

std::shared_ptr<ClientInput> ConnectionLimit::InputOf(const std::string& ip, std::uint16_t port) {
  std::shared_ptr<ClientInput> input;
  MutexLock lock(&mutex_);
  ForEachLocked(ip, port, [&](Callers::value_type*, const Open& one) { input = one.input; });
  return input;
}

std::size_t ConnectionLimit::UnreadBytes(const std::string& ip, std::uint16_t port) {
  std::size_t bytes = 0;
  MutexLock lock(&mutex_);
  ForEachLocked(ip, port,
                [&](Callers::value_type*, const Open& one) { bytes += one.socket.UnreadBytes(); });
  return bytes;
}

std::vector<sockaddr_storage> ConnectionLimit::OwnEnds(const std::string& ip, std::uint16_t port) {
  std::vector<sockaddr_storage> ends;
  MutexLock lock(&mutex_);
  ForEachLocked(ip, port, [&](Callers::value_type*, const Open& one) {
    if (const auto own = one.socket.OwnAddress()) ends.push_back(*own);
  });
  return ends;
}

void ConnectionLimit::ForgetClosedLocked(Callers::value_type* caller) {
  std::vector<Open>& open = caller->second.open;
  // Otherwise a client that connects again before EndVain() looks would escape the pause.
  for (Open& one : open) {
    if (!one.socket.IsOpen() && TakeRefusal(&one)) caller->second.pause.Extend(clock_->NowNs());
  }
  const auto closed = std::remove_if(open.begin(), open.end(),
                                     [](const Open& one) { return !one.socket.IsOpen(); });
  const auto count = static_cast<std::size_t>(open.end() - closed);
  if (count == 0) return;
  open.erase(closed, open.end());
  count_ -= count;
  const auto network = networks_.find(NetworkOf(caller->first));
  network->second -= count;
  if (network->second == 0) networks_.erase(network);
}

void ConnectionLimit::ForgetAllClosedLocked() {
  const std::uint64_t now_ns = clock_->NowNs();
  const bool too_many = callers_.size() >= bounds_.all + kMostRemembered;
  for (auto it = callers_.begin(); it != callers_.end();) {
    Caller& caller = it->second;
    ForgetClosedLocked(&*it);
    const bool forgotten = too_many ? !caller.pause.Lasts(now_ns) : caller.pause.IsForgiven(now_ns);
    it = caller.open.empty() && forgotten ? callers_.erase(it) : std::next(it);
  }
}

}  // namespace gradsync::daemon
