#include "tools/virtual_network/virtual_network.h"

#include <errno.h>
#include <fcntl.h>
#include <sched.h>
#include <stdio.h>
#include <unistd.h>

#include <algorithm>
#include <array>
#include <cstdlib>
#include <cstring>
#include <thread>

#include "absl/status/statusor.h"
#include "absl/strings/str_cat.h"
#include "absl/strings/str_join.h"
#include "absl/strings/str_split.h"
#include "absl/strings/strip.h"
#include "tools/virtual_network/bit_rate.h"

namespace gradsync {
namespace {

// The smallest burst of a token bucket, in bytes: a few packets always fit.
constexpr std::uint64_t kLeastBurst = 16 << 10;

absl::Status SystemError(absl::string_view call) {
  return absl::UnavailableError(absl::StrCat(call, ": ", std::strerror(errno)));
}

// A path of the namespace `fd` for every process, valid while this process has it open.
std::string NamespacePath(const daemon::UniqueFd& fd) {
  return absl::StrCat("/proc/", getpid(), "/fd/", fd.get());
}

std::vector<std::string> PrefixOf(const daemon::UniqueFd& fd) {
  return {"/usr/bin/nsenter", absl::StrCat("--net=", NamespacePath(fd))};
}

absl::StatusOr<daemon::UniqueFd> MakeNamespace() {
  daemon::UniqueFd fd;
  absl::Status status;
  // unshare() moves the calling thread into the new namespace, so a thread of its own calls it.
  std::thread([&] {
    if (unshare(CLONE_NEWNET) != 0) {
      status = SystemError("unshare(CLONE_NEWNET)");
      return;
    }
    fd = daemon::UniqueFd(open("/proc/thread-self/ns/net", O_RDONLY | O_CLOEXEC));
    if (!fd.valid()) status = SystemError("/proc/thread-self/ns/net");
  }).join();
  if (!status.ok()) return status;
  return fd;
}

// Runs the commands in the namespace with a shell. Stops at the first failure, and returns
// UNAVAILABLE with the command and its output. The commands must not contain quotes.
absl::Status RunIn(const daemon::UniqueFd& fd, const std::vector<std::string>& commands) {
  const std::string shell =
      absl::StrCat("PATH=$PATH:/usr/sbin:/sbin exec ", absl::StrJoin(PrefixOf(fd), " "),
                   " sh -exc '", absl::StrJoin(commands, "\n"), "' 2>&1");
  std::FILE* const output = popen(shell.c_str(), "re");
  if (output == nullptr) return SystemError("popen");
  std::string said;
  std::array<char, 4096> chunk;
  for (std::size_t size; (size = fread(chunk.data(), 1, chunk.size(), output)) > 0;) {
    said.append(chunk.data(), size);
  }
  if (pclose(output) == 0) return absl::OkStatus();
  const std::vector<std::string> lines =
      absl::StrSplit(absl::StripTrailingAsciiWhitespace(said), '\n');
  const auto last_two = lines.end() - std::min<std::ptrdiff_t>(2, lines.end() - lines.begin());
  return absl::UnavailableError(absl::StrJoin(last_two, lines.end(), ": "));
}

std::string PortOf(int node) { return absl::StrCat("port", node); }

// The command that makes a token bucket for packets that leave by `interface`.
std::string Shaper(absl::string_view interface, std::uint64_t bits_per_second) {
  return absl::StrCat("tc qdisc add dev ", interface, " root tbf rate ", bits_per_second,
                      "bit burst ", std::max(bits_per_second / 8 / 250, kLeastBurst),
                      " latency 20ms");
}

}  // namespace

VirtualNetwork::VirtualNetwork(const VirtualNetworkOptions& options) : nodes_(options.nodes) {
  const char* const wanted = std::getenv("GRADSYNC_VIRTUAL_NETWORK");
  if (options.loopback || (wanted != nullptr && absl::string_view(wanted) == "loopback")) {
    description_ = "loopback addresses, as asked for";
    return;
  }
  if (const absl::Status status = MakeNamespaces(options.bits_per_second); !status.ok()) {
    namespaces_.clear();
    switch_.reset();
    description_ = absl::StrCat("loopback addresses, as network namespaces cannot be made here (",
                                status.message(), ")");
    return;
  }
  kind_ = Kind::kNamespaces;
  description_ = absl::StrCat(nodes_, " network namespaces");
  if (options.bits_per_second > 0) {
    absl::StrAppend(&description_, ", links of ", FormatBitRate(options.bits_per_second));
  }
}

absl::Status VirtualNetwork::MakeNamespaces(std::uint64_t bits_per_second) {
  absl::StatusOr<daemon::UniqueFd> fd = MakeNamespace();
  if (!fd.ok()) return fd.status();
  switch_ = *std::move(fd);
  std::vector<std::string> commands = {"ip link add switch type bridge", "ip link set switch up"};
  for (int node = 0; node < nodes_; ++node) {
    if (fd = MakeNamespace(); !fd.ok()) return fd.status();
    namespaces_.push_back(*std::move(fd));
    const std::string port = PortOf(node);
    commands.push_back(absl::StrCat("ip link add ", port, " master switch type veth peer name ",
                                    "eth0 netns ", NamespacePath(namespaces_.back())));
    if (bits_per_second > 0) commands.push_back(Shaper(port, bits_per_second));
  }
  if (absl::Status status = RunIn(switch_, commands); !status.ok()) return status;
  for (int node = 0; node < nodes_; ++node) {
    commands = {"ip link set lo up",
                absl::StrCat("ip address add 10.99.0.", node + 1, "/24 dev eth0"),
                "ip link set eth0 up"};
    if (bits_per_second > 0) commands.push_back(Shaper("eth0", bits_per_second));
    absl::Status status = RunIn(namespaces_[node], commands);
    if (!status.ok()) return status;
  }
  commands.clear();
  for (int node = 0; node < nodes_; ++node) {
    commands.push_back(absl::StrCat("ip link set ", PortOf(node), " up"));
  }
  return RunIn(switch_, commands);
}

std::string VirtualNetwork::address(int node) const {
  return absl::StrCat(kind_ == Kind::kNamespaces ? "10.99.0." : "127.0.0.", node + 1);
}

std::vector<std::string> VirtualNetwork::CommandPrefix(int node) const {
  if (kind_ == Kind::kLoopback) return {};
  return PrefixOf(namespaces_[node]);
}

absl::Status VirtualNetwork::Enter(int node) const {
  if (kind_ == Kind::kLoopback) return absl::OkStatus();
  return setns(namespaces_[node].get(), CLONE_NEWNET) == 0 ? absl::OkStatus()
                                                           : SystemError("setns");
}

absl::Status VirtualNetwork::SetLink(int node, bool up) {
  if (kind_ == Kind::kLoopback) {
    return absl::UnimplementedError(absl::StrCat("no link to set: ", description_));
  }
  return RunIn(switch_, {absl::StrCat("ip link set ", PortOf(node), up ? " up" : " down")});
}

absl::Status VirtualNetwork::SetIsolated(int node, bool isolated) {
  if (kind_ == Kind::kLoopback) {
    return absl::UnimplementedError(absl::StrCat("no switch to isolate at: ", description_));
  }
  return RunIn(switch_, {absl::StrCat("ip link set ", PortOf(node), " type bridge_slave isolated ",
                                      isolated ? "on" : "off")});
}

}  // namespace gradsync
