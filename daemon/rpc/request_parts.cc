#include "daemon/rpc/request_parts.h"

#include <utility>

#include "absl/strings/str_cat.h"
#include "absl/types/span.h"
#include "daemon/base/error.h"

namespace gradsync::daemon {

absl::Status RequestParts::ChargeLayout() {
  const std::uint64_t bytes = item_bytes_ + message_bytes_;
  if (layout_charge_ != nullptr) return layout_charge_->Resize(bytes);
  auto charge = account_.Reserve(bytes);
  if (!charge.ok()) return charge.status();
  layout_charge_ = std::make_shared<ArenaQuota::Reservation>(*std::move(charge));
  return absl::OkStatus();
}

void RequestParts::AddLayoutPart(const v1::SessionRequest& request, const DecodeLimits& limits,
                                 bool forward) {
  if (!wrong_.ok()) return;
  const std::size_t parameters = items_.parameters.size();
  const std::size_t buckets = items_.buckets.size();
  wrong_ = DecodeLayoutItems(request.layout_part(), limits, &items_);
  if (wrong_.ok() && forward) {
    messages_.push_back(std::make_shared<const v1::SessionRequest>(request));
    message_bytes_ += request.SpaceUsedLong();
  }
  if (wrong_.ok()) {
    // Adds the new items alone: there may be as many parts as parameters.
    item_bytes_ += BytesOf(absl::MakeConstSpan(items_.parameters).subspan(parameters)) +
                   (items_.buckets.size() - buckets) * sizeof(items_.buckets.front());
    wrong_ = ChargeLayout();
  }
  if (wrong_.ok()) return;
  items_ = LayoutItems{};
  messages_ = {};
  item_bytes_ = message_bytes_ = 0;
  layout_charge_ = nullptr;
}

absl::StatusOr<LayoutRequest> RequestParts::TakeLayout(const v1::SessionRequest& request,
                                                       const DecodeLimits& limits, bool forward,
                                                       std::uint64_t now_ns) {
  LayoutItems items = std::exchange(items_, {});
  const absl::Status wrong = std::exchange(wrong_, absl::OkStatus());
  auto messages = std::exchange(messages_, {});
  auto charge = std::exchange(layout_charge_, nullptr);
  std::uint64_t bytes = std::exchange(message_bytes_, 0);
  item_bytes_ = 0;
  if (!wrong.ok()) return wrong;
  auto layout = DecodeLayout(request.register_layout(), std::move(items), limits, now_ns);
  if (!layout.ok()) return layout;
  if (forward) {
    messages.push_back(std::make_shared<const v1::SessionRequest>(request));
    layout->messages = std::move(messages);
    bytes += request.SpaceUsedLong();
  }
  bytes += BytesOf(layout->spec);
  if (charge == nullptr) {
    auto reserved = account_.Reserve(bytes);
    if (!reserved.ok()) return reserved.status();
    charge = std::make_shared<ArenaQuota::Reservation>(*std::move(reserved));
  } else if (absl::Status resized = charge->Resize(bytes); !resized.ok()) {
    return resized;
  }
  layout->charge = std::move(charge);
  return layout;
}

absl::StatusOr<std::optional<ChargedDigests>> RequestParts::TakeDigests(
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
  if (digests_.charge.bytes() == 0) {
    auto charge = account_.Reserve(digest_bytes_);
    if (!charge.ok()) return charge.status();
    digests_.charge = *std::move(charge);
  } else if (absl::Status resized = digests_.charge.Resize(digest_bytes_); !resized.ok()) {
    return resized;
  }
  if (absl::Status status = DecodeStateDigests(message, &digests_.items); !status.ok()) {
    return status;
  }
  if (message.more()) return std::nullopt;
  digest_bytes_ = 0;
  return std::exchange(digests_, {});
}

}  // namespace gradsync::daemon
