#include "daemon/peer/peer_status.h"

#include <cstddef>
#include <string>

#include "daemon/rpc/status_mapping.h"

namespace gradsync::daemon {
namespace {

// At most 4 KiB of UTF-8. Nobody could decode a message with a part of a character.
std::string Clip(const std::string& text) {
  constexpr std::size_t kMaxMessageBytes = 4096;
  constexpr unsigned char kMask = 0xC0, kContinues = 0x80;
  if (text.size() <= kMaxMessageBytes) return text;
  std::size_t end = kMaxMessageBytes;
  while (end > 0 && (static_cast<unsigned char>(text[end]) & kMask) == kContinues) --end;
  return text.substr(0, end);
}

}  // namespace

absl::Status StatusFromPeer(const google::rpc::Status& proto) {
  constexpr std::size_t kMaxDetailsBytes = 8192;
  google::rpc::Status clipped;
  const bool known = proto.code() >= 0 && proto.code() <= 16;
  clipped.set_code(known ? proto.code() : static_cast<int>(absl::StatusCode::kUnknown));
  clipped.set_message(Clip(proto.message()));
  if (proto.details_size() == 1 && proto.details(0).ByteSizeLong() <= kMaxDetailsBytes) {
    *clipped.add_details() = proto.details(0);
  }
  return FromProto(clipped);
}

}  // namespace gradsync::daemon
