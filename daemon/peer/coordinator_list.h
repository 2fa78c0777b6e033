// Which daemons may coordinate jobs of this node's trainers, as the operator lists them.

#ifndef DAEMON_PEER_COORDINATOR_LIST_H_
#define DAEMON_PEER_COORDINATOR_LIST_H_

#include <string>
#include <vector>

#include "absl/status/statusor.h"
#include "absl/strings/string_view.h"
#include "daemon/peer/peer_address.h"

namespace gradsync::daemon {

// Immutable; thread-safe.
class CoordinatorList {
 public:
  // Entries are separated by commas. An entry is a host ("node7"), every host of a domain
  // ("*.cluster.example"), or a network of numeric addresses ("10.0.0.0/8"). A port may follow
  // ("node7:7418", "10.0.0.0/8:7418"); without one only `default_port` is allowed.
  // INVALID_ARGUMENT names the entry that is none of these.
  static absl::StatusOr<CoordinatorList> Parse(absl::string_view text, std::uint16_t default_port);

  // An empty list allows every address. Names are compared as they are written: a list of networks
  // allows no name.
  bool Allows(const PeerAddress& address) const;

 private:
  struct Entry {
    std::string host;        // in lower case; ".cluster.example" for a domain; empty for a network
    std::string network;     // the bytes of its address
    std::size_t prefix = 0;  // how many bits of them count
    std::uint16_t port = 0;
  };

  static absl::StatusOr<Entry> ParseEntry(absl::string_view text, std::uint16_t default_port);
  static bool Matches(const Entry& entry, const PeerAddress& address);

  std::vector<Entry> entries_;
};

}  // namespace gradsync::daemon

#endif  // DAEMON_PEER_COORDINATOR_LIST_H_
