#include "daemon/peer/peer_status.h"

#include <cstddef>

#include "daemon/base/error.h"
#include "daemon/rpc/status_mapping.h"

namespace gradsync::daemon {

absl::Status StatusFromPeer(const google::rpc::Status& proto) {
  constexpr std::size_t kMaxMessageBytes = 4096;
  constexpr std::size_t kMaxDetailsBytes = 8192;
  google::rpc::Status clipped;
  const bool known = proto.code() >= 0 && proto.code() <= 16;
  clipped.set_code(known ? proto.code() : static_cast<int>(absl::StatusCode::kUnknown));
  // gRPC's own status of a stream may have any bytes.
  clipped.set_message(ValidText(proto.message(), kMaxMessageBytes));
  if (proto.details_size() == 1 && proto.details(0).ByteSizeLong() <= kMaxDetailsBytes) {
    *clipped.add_details() = proto.details(0);
  }
  return FromProto(clipped);
}

}  // namespace gradsync::daemon
