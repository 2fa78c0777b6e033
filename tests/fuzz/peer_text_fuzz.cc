// Texts, statuses and messages of other nodes: a status in its bounds, addresses of daemons, what a
// message would take in memory.

#include <google/protobuf/io/zero_copy_stream_impl_lite.h>

#include <cstdint>
#include <string>

#include "daemon/peer/coordinator_list.h"
#include "daemon/peer/parsed_bytes.h"
#include "daemon/peer/peer_address.h"
#include "daemon/peer/peer_status.h"
#include "gradsync/v1/peer.pb.h"
#include "tests/fuzz/check.h"

extern "C" int LLVMFuzzerTestOneInput(const std::uint8_t* data, std::size_t size) {
  if (size == 0) return 0;
  const std::string text(reinterpret_cast<const char*>(data) + 1, size - 1);
  if (data[0] % 4 == 2) {
    // What the parser takes, also if it fails in the end.
    gradsync::v1::AttachResponse message;
    static_cast<void>(message.ParseFromString(text));
    google::protobuf::io::ArrayInputStream bytes(text.data(), static_cast<int>(text.size()));
    FUZZ_CHECK(
        !gradsync::daemon::ParsesWithin(message.SpaceUsedLong() - 1, message.descriptor(), &bytes));
    return 0;
  }
  if (data[0] % 2 == 0) {
    google::rpc::Status proto;
    if (!proto.ParseFromString(text)) return 0;
    const absl::Status status = gradsync::daemon::StatusFromPeer(proto);
    FUZZ_CHECK(status.ok() == (proto.code() == 0));
    FUZZ_CHECK(status.message().size() <= 4096);
    return 0;
  }
  const std::size_t line = text.find('\n');
  const auto list = gradsync::daemon::CoordinatorList::Parse(text.substr(0, line), 50051);
  const auto address = gradsync::daemon::ParsePeerAddress(
      line == std::string::npos ? text : text.substr(line + 1), 50051);
  if (!address.ok()) return 0;
  // An accepted address is accepted again as it is written, and is never another scheme of gRPC's.
  const auto again = gradsync::daemon::ParsePeerAddress(address->Text(), 1);
  FUZZ_CHECK(again.ok() && again->host == address->host && again->port == address->port);
  FUZZ_CHECK(address->Target().rfind("dns:///", 0) == 0);
  if (list.ok()) list->Allows(*address);
  return 0;
}
