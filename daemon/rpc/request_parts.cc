#include "daemon/rpc/request_parts.h"

#include <utility>

#include "absl/strings/str_cat.h"
#include "daemon/base/error.h"

namespace gradsync::daemon {

void RequestParts::AddLayoutPart(const v1::SessionRequest& request, const DecodeLimits& limits,
                                 bool forward) {
  if (!wrong_.ok()) return;
  wrong_ = DecodeLayoutItems(request.layout_part(), limits, &items_);
  if (!wrong_.ok()) {
    items_ = LayoutItems{};
    messages_.clear();
  } else if (forward) {
    messages_.push_back(std::make_shared<const v1::SessionRequest>(request));
  }
}

absl::StatusOr<LayoutRequest> RequestParts::TakeLayout(const v1::SessionRequest& request,
                                                       const DecodeLimits& limits, bool forward,
                                                       std::uint64_t now_ns) {
  LayoutItems items = std::exchange(items_, {});
  const absl::Status wrong = std::exchange(wrong_, absl::OkStatus());
  auto messages = std::exchange(messages_, {});
  if (!wrong.ok()) return wrong;
  auto layout = DecodeLayout(request.register_layout(), std::move(items), limits, now_ns);
  if (layout.ok() && forward) {
    messages.push_back(std::make_shared<const v1::SessionRequest>(request));
    layout->messages = std::move(messages);
  }
  return layout;
}

absl::StatusOr<std::optional<std::vector<StateDigest>>> RequestParts::TakeDigests(
    const v1::StateDigests& message) {
  if (message.transfer() != transfer_) {
    digests_ = {};
    digest_bytes_ = 0;
    transfer_ = message.transfer();
  }
  for (const v1::StateDigest& item : message.items()) {
    digest_bytes_ += sizeof(StateDigest) + item.name().size() + item.sha256().size();
  }
  if (digest_bytes_ > kMaxDigestBytes) {
    return MakeError(absl::StatusCode::kInvalidArgument, reason::kMalformed,
                     absl::StrCat("StateDigests of more than ", kMaxDigestBytes,
                                  " bytes: give the state fewer items, or shorter names"));
  }
  if (absl::Status status = DecodeStateDigests(message, &digests_); !status.ok()) return status;
  if (message.more()) return std::nullopt;
  digest_bytes_ = 0;
  return std::exchange(digests_, {});
}

}  // namespace gradsync::daemon
