#include "daemon/engine/watch_frame.h"

#include "daemon/base/error.h"

namespace gradsync::daemon {
namespace {

// A frame, little-endian: the length of the rest (4 bytes), the kind (4 bytes), then either `begun`
// (8 bytes each) or the status: its code (4 bytes), reason, node and message (each 4 bytes of
// length, then the text).
constexpr std::size_t kHeaderBytes = 8;
// The most bytes of each text of a status.
constexpr std::size_t kMaxTextBytes = 1024;

void AppendNumber(std::uint64_t number, std::size_t bytes, std::string* out) {
  for (std::size_t i = 0; i < bytes; ++i) out->push_back(static_cast<char>(number >> (8 * i)));
}

void AppendText(absl::string_view text, std::string* out) {
  const std::string cut = ValidText(text, kMaxTextBytes);
  AppendNumber(cut.size(), 4, out);
  out->append(cut);
}

// Takes from the front of `bytes`; false if they are too few.
bool TakeNumber(std::size_t size, absl::string_view* bytes, std::uint64_t* number) {
  if (bytes->size() < size) return false;
  *number = 0;
  for (std::size_t i = 0; i < size; ++i) {
    *number |= static_cast<std::uint64_t>(static_cast<unsigned char>((*bytes)[i])) << (8 * i);
  }
  bytes->remove_prefix(size);
  return true;
}

bool TakeText(absl::string_view* bytes, std::string* text) {
  std::uint64_t size = 0;
  if (!TakeNumber(4, bytes, &size) || bytes->size() < size) return false;
  // Otherwise this engine's own message about the failure could not be decoded.
  *text = ValidText(bytes->substr(0, size), kMaxTextBytes);
  bytes->remove_prefix(size);
  return true;
}

bool TakeFailure(absl::string_view* bytes, absl::Status* failure) {
  std::uint64_t code = 0;
  std::string reason, node, message;
  if (!TakeNumber(4, bytes, &code) || !TakeText(bytes, &reason) || !TakeText(bytes, &node) ||
      !TakeText(bytes, &message)) {
    return false;
  }
  if (code == 0 || code > 16) return false;
  *failure = MakeError(static_cast<absl::StatusCode>(code), Reason(reason), message,
                       {{field::kNode, node}});
  return true;
}

}  // namespace

std::string EncodeWatchFrame(const WatchFrame& frame) {
  std::string body;
  AppendNumber(static_cast<std::uint32_t>(frame.kind), 4, &body);
  if (frame.kind == WatchFrame::Kind::kFailed) {
    const ErrorDetails details = DetailsOf(frame.failure);
    AppendNumber(static_cast<std::uint32_t>(frame.failure.code()), 4, &body);
    AppendText(details.reason, &body);
    AppendText(details.Value(field::kNode), &body);
    AppendText(frame.failure.message(), &body);
  } else {
    for (const std::uint64_t begun : frame.begun) AppendNumber(begun, 8, &body);
  }
  std::string out;
  AppendNumber(body.size(), 4, &out);
  return out + body;
}

absl::StatusOr<bool> DecodeWatchFrame(absl::string_view* bytes, std::size_t lanes,
                                      WatchFrame* frame) {
  if (bytes->size() < kHeaderBytes) return false;
  absl::string_view rest = *bytes;
  std::uint64_t length = 0;
  TakeNumber(4, &rest, &length);
  if (length < 4 || length > kMaxWatchFrameBytes - 4) {
    return absl::InvalidArgumentError("a frame with an impossible length");
  }
  if (rest.size() < length) return false;
  absl::string_view body = rest.substr(0, length);
  rest.remove_prefix(length);
  std::uint64_t kind = 0;
  TakeNumber(4, &body, &kind);
  *frame = WatchFrame();
  frame->kind = static_cast<WatchFrame::Kind>(kind);
  switch (frame->kind) {
    case WatchFrame::Kind::kAlive:
    case WatchFrame::Kind::kLeft:
      if (body.size() != 8 * lanes)
        return absl::InvalidArgumentError("a frame for another number of lanes");
      frame->begun.resize(lanes);
      for (std::uint64_t& begun : frame->begun) TakeNumber(8, &body, &begun);
      break;
    case WatchFrame::Kind::kFailed:
      if (!TakeFailure(&body, &frame->failure)) {
        return absl::InvalidArgumentError("a frame with a malformed status");
      }
      break;
    default:
      return absl::InvalidArgumentError("a frame of an unknown kind");
  }
  *bytes = rest;
  return true;
}

}  // namespace gradsync::daemon
