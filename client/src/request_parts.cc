#include "client/src/request_parts.h"

#include <cstddef>
#include <utility>

#include "gradsync/limits.h"
#include "proto/gradsync/v1/gradsync.pb.h"

namespace gradsync::client {
namespace {

// What a part has beside its items, and an item beside its fields.
constexpr std::size_t kEnvelopeBytes = 64;
constexpr std::size_t kItemEnvelopeBytes = 8;

// Adds items to messages, as many to each as fit.
class Parts {
 public:
  // `add` adds an item to a message, and returns it.
  template <class Item, class Add>
  void Move(google::protobuf::RepeatedPtrField<Item>* items, const Add& add) {
    for (Item& item : *items) {
      const std::size_t bytes = item.ByteSizeLong() + kItemEnvelopeBytes;
      if (messages_.empty() || bytes > left_) {
        messages_.emplace_back();
        left_ = kMaxRequestBytes - kEnvelopeBytes;
      }
      left_ -= bytes < left_ ? bytes : left_;
      *add(&messages_.back()) = std::move(item);
    }
    items->Clear();
  }

  std::vector<v1::SessionRequest> Take() { return std::move(messages_); }

 private:
  std::vector<v1::SessionRequest> messages_;
  std::size_t left_ = 0;
};

}  // namespace

std::vector<v1::SessionRequest> LayoutMessages(v1::SessionRequest request) {
  Parts parts;
  if (request.ByteSizeLong() > kMaxRequestBytes) {
    v1::RegisterLayout* const layout = request.mutable_register_layout();
    parts.Move(layout->mutable_parameters(), [](v1::SessionRequest* part) {
      return part->mutable_layout_part()->add_parameters();
    });
    parts.Move(layout->mutable_explicit_buckets(), [](v1::SessionRequest* part) {
      return part->mutable_layout_part()->add_explicit_buckets();
    });
  }
  std::vector<v1::SessionRequest> messages = parts.Take();
  messages.push_back(std::move(request));
  return messages;
}

std::vector<v1::SessionRequest> DigestMessages(v1::SessionRequest request) {
  std::vector<v1::SessionRequest> messages;
  if (request.ByteSizeLong() <= kMaxRequestBytes) {
    messages.push_back(std::move(request));
    return messages;
  }
  Parts parts;
  parts.Move(request.mutable_state_digests()->mutable_items(),
             [](v1::SessionRequest* part) { return part->mutable_state_digests()->add_items(); });
  messages = parts.Take();
  for (v1::SessionRequest& message : messages) {
    message.mutable_state_digests()->set_transfer(request.state_digests().transfer());
    message.mutable_state_digests()->set_more(&message != &messages.back());
  }
  return messages;
}

}  // namespace gradsync::client
