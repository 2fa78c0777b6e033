#include "daemon/peer/socket_table.h"

#include <fcntl.h>
#include <netinet/in.h>
#include <sys/socket.h>
#include <unistd.h>

#include <algorithm>
#include <cerrno>
#include <cstring>
#include <optional>

#include "absl/functional/function_ref.h"
#include "absl/strings/numbers.h"
#include "absl/strings/str_split.h"
#include "daemon/base/unique_fd.h"

namespace gradsync::daemon {
namespace {

constexpr absl::string_view kEstablished = "01";  // TCP_ESTABLISHED, as the tables write it
constexpr std::size_t kBlockBytes = 64 << 10;

// Calls `found` for each line that ends within the first `most` bytes of the file.
void ForEachLine(const std::string& path, std::size_t most,
                 absl::FunctionRef<void(absl::string_view)> found) {
  const UniqueFd file(open(path.c_str(), O_RDONLY | O_CLOEXEC));
  if (!file.valid()) return;
  std::string block(kBlockBytes, '\0');
  std::size_t kept = 0;  // bytes of a line whose end is in the next block
  while (most > 0) {
    const std::size_t wanted = std::min(most, block.size() - kept);
    const ssize_t got = read(file.get(), &block[kept], wanted);
    if (got < 0 && errno == EINTR) continue;
    if (got <= 0) return;
    most -= static_cast<std::size_t>(got);
    absl::string_view rest(block.data(), kept + static_cast<std::size_t>(got));
    for (std::size_t end = rest.find('\n'); end != rest.npos; end = rest.find('\n')) {
      found(rest.substr(0, end));
      rest.remove_prefix(end + 1);
    }
    kept = rest.size();
    std::memmove(block.data(), rest.data(), kept);
  }
}

// Reads the words of an address, each written as the machine reads it.
bool ReadWords(absl::string_view text, void* address, std::size_t bytes) {
  constexpr std::size_t kDigits = 8;
  if (text.size() != bytes / sizeof(std::uint32_t) * kDigits) return false;
  for (std::size_t at = 0; at < bytes; at += sizeof(std::uint32_t)) {
    std::uint32_t word = 0;
    if (!absl::SimpleHexAtoi(text.substr(at / sizeof(word) * kDigits, kDigits), &word)) {
      return false;
    }
    std::memcpy(static_cast<char*>(address) + at, &word, sizeof(word));
  }
  return true;
}

// An end as the tables write it: "0100007F:1267". They do not say the interface.
std::optional<TcpEnd> ReadEnd(absl::string_view text) {
  const std::size_t colon = text.rfind(':');
  std::uint32_t port = 0;
  if (colon == text.npos || !absl::SimpleHexAtoi(text.substr(colon + 1), &port) || port > 65535) {
    return std::nullopt;
  }
  const absl::string_view host = text.substr(0, colon);
  sockaddr_storage address{};
  auto& v4 = reinterpret_cast<sockaddr_in&>(address);
  auto& v6 = reinterpret_cast<sockaddr_in6&>(address);
  if (ReadWords(host, &v4.sin_addr, sizeof(v4.sin_addr))) {
    v4.sin_family = AF_INET;
    v4.sin_port = htons(static_cast<std::uint16_t>(port));
  } else if (ReadWords(host, &v6.sin6_addr, sizeof(v6.sin6_addr))) {
    v6.sin6_family = AF_INET6;
    v6.sin6_port = htons(static_cast<std::uint16_t>(port));
  } else {
    return std::nullopt;
  }
  return TcpEnd::Of(address);
}

}  // namespace

std::vector<std::uint32_t> SocketTable::UsersOf(const TcpEnd& own, std::uint16_t remote_port,
                                                std::uint64_t since_ns) {
  MutexLock lock(&mutex_);
  if (read_ns_ == 0 || read_ns_ < since_ns) {
    read_ns_ = clock_->NowNs();
    sockets_ = Read();
  }
  Socket wanted;
  wanted.own = own;
  wanted.own.interface = 0;
  std::vector<std::uint32_t> users;
  const auto [first, last] = std::equal_range(sockets_.begin(), sockets_.end(), wanted);
  for (auto it = first; it != last; ++it) {
    if (it->remote_port == remote_port) users.push_back(it->user);
  }
  return users;
}

std::vector<SocketTable::Socket> SocketTable::Read() const {
  std::vector<Socket> sockets;
  for (const std::string& file : files_) {
    ForEachLine(file, kMostBytes, [&](absl::string_view line) { AddLine(line, &sockets); });
  }
  std::stable_sort(sockets.begin(), sockets.end());
  return sockets;
}

void SocketTable::AddLine(absl::string_view line, std::vector<Socket>* sockets) {
  // sl local_address rem_address st tx_queue:rx_queue tr:tm->when retrnsmt uid ...
  const std::vector<absl::string_view> fields = absl::StrSplit(line, ' ', absl::SkipEmpty());
  Socket socket;
  if (fields.size() < 8 || fields[3] != kEstablished) return;
  const std::optional<TcpEnd> own = ReadEnd(fields[1]);
  const std::optional<TcpEnd> remote = ReadEnd(fields[2]);
  if (!own.has_value() || !remote.has_value()) return;
  if (!absl::SimpleAtoi(fields[7], &socket.user)) return;
  socket.own = *own;
  socket.remote_port = remote->port;
  sockets->push_back(socket);
}

}  // namespace gradsync::daemon
