// virtual-network: makes a virtual network for programs that are not C++, describes it in JSON and
// keeps it until its standard input ends.

#include <unistd.h>

#include <array>
#include <cstdio>
#include <string>

#include "absl/strings/numbers.h"
#include "absl/strings/str_cat.h"
#include "absl/strings/strip.h"
#include "nlohmann/json.hpp"
#include "tools/virtual_network/bit_rate.h"
#include "tools/virtual_network/virtual_network.h"

namespace gradsync {
namespace {

constexpr char kHelp[] =
    R"(Usage: virtual-network [--nodes=N] [--rate=RATE] [--loopback]

Makes N nodes on this machine (default 2), each a network namespace on one switch, and prints one
line of JSON:

  {"kind": "namespaces", "description": "2 network namespaces, links of 1gbit",
   "nodes": [{"address": "10.99.0.1", "command_prefix": ["/usr/bin/nsenter", "--net=..."]}, ...]}

A command behind a node's command_prefix runs on that node. The network exists until the standard
input ends, and as long as a process is in it. Namespaces need root and Debian's iproute2. Without
them "kind" is "loopback", "description" says why, the addresses are 127.0.0.1 and so on, the
prefixes are empty and no rate is kept.

  --nodes=N    1 to 250
  --rate=RATE  of each link, in each direction: 1gbit, 100mbit; default: as fast as memory
  --loopback   loopback addresses also where namespaces can be made; so does
               GRADSYNC_VIRTUAL_NETWORK=loopback in the environment

Exit status: 0, or 2 for wrong usage.
)";

// False if the argument is not valid.
bool Parse(absl::string_view argument, VirtualNetworkOptions* options) {
  if (argument == "--loopback") {
    options->loopback = true;
    return true;
  }
  if (absl::ConsumePrefix(&argument, "--nodes=")) {
    return absl::SimpleAtoi(argument, &options->nodes) && options->nodes >= 1 &&
           options->nodes <= 250;
  }
  if (!absl::ConsumePrefix(&argument, "--rate=")) return false;
  const auto rate = ParseBitRate(argument);
  options->bits_per_second = rate.value_or(0);
  return rate.has_value();
}

std::string Describe(const VirtualNetwork& network) {
  nlohmann::json nodes = nlohmann::json::array();
  for (int node = 0; node < network.nodes(); ++node) {
    nodes.push_back(
        {{"address", network.address(node)}, {"command_prefix", network.CommandPrefix(node)}});
  }
  const bool real = network.kind() == VirtualNetwork::Kind::kNamespaces;
  return nlohmann::json({{"kind", real ? "namespaces" : "loopback"},
                         {"description", network.description()},
                         {"nodes", nodes}})
      .dump();
}

int Main(int argc, char** argv) {
  VirtualNetworkOptions options;
  for (int i = 1; i < argc; ++i) {
    const absl::string_view argument = argv[i];
    if (argument == "--help" || argument == "-h") {
      std::fputs(kHelp, stdout);
      return 0;
    }
    if (!Parse(argument, &options)) {
      std::fprintf(stderr, "virtual-network: wrong argument '%s' (see --help)\n", argv[i]);
      return 2;
    }
  }
  const VirtualNetwork network(options);
  std::printf("%s\n", Describe(network).c_str());
  std::fflush(stdout);
  std::array<char, 256> ignored;
  while (read(STDIN_FILENO, ignored.data(), ignored.size()) > 0) {
  }
  return 0;
}

}  // namespace
}  // namespace gradsync

int main(int argc, char** argv) { return gradsync::Main(argc, argv); }
