// Long requests are cut into messages that the daemon takes, and nothing is lost.

#include "client/src/request_parts.h"

#include <string>
#include <utility>
#include <vector>

#include "gradsync/limits.h"
#include "gtest/gtest.h"
#include "proto/gradsync/v1/gradsync.pb.h"

namespace gradsync::client {
namespace {

v1::SessionRequest LayoutOf(int parameters, std::size_t name_bytes) {
  v1::SessionRequest request;
  request.mutable_register_layout()->set_name("model");
  for (int i = 0; i < parameters; ++i) {
    v1::Parameter& parameter = *request.mutable_register_layout()->add_parameters();
    parameter.set_name(std::to_string(i) + std::string(name_bytes, 'n'));
    parameter.add_shape(3);
  }
  return request;
}

void ExpectFit(const std::vector<v1::SessionRequest>& messages) {
  for (const auto& message : messages) EXPECT_LE(message.ByteSizeLong(), kMaxRequestBytes);
}

TEST(LayoutMessagesTest, ShortLayoutIsOneMessage) {
  const auto messages = LayoutMessages(LayoutOf(3, 10));
  ASSERT_EQ(messages.size(), 1u);
  EXPECT_EQ(messages[0].SerializeAsString(), LayoutOf(3, 10).SerializeAsString());
}

TEST(LayoutMessagesTest, LongLayoutComesInOrder) {
  for (const std::size_t name_bytes : {0, 30, 507}) {
    constexpr int kParameters = 20'000;
    const auto messages = LayoutMessages(LayoutOf(kParameters, name_bytes));
    ExpectFit(messages);
    int next = 0;
    for (const auto& message : messages) {
      const bool last = &message == &messages.back();
      EXPECT_EQ(message.has_register_layout(), last);
      EXPECT_EQ(message.has_layout_part(), !last);
      for (const auto& parameter : message.layout_part().parameters()) {
        EXPECT_EQ(std::stoi(parameter.name()), next++);
        EXPECT_EQ(parameter.shape_size(), 1);
      }
    }
    EXPECT_EQ(next, kParameters);
    EXPECT_EQ(messages.back().register_layout().name(), "model");
    EXPECT_EQ(messages.back().register_layout().parameters_size(), 0);
  }
}

TEST(LayoutMessagesTest, BucketsComeInParts) {
  v1::SessionRequest request;
  for (int i = 0; i < 65536; ++i) {
    v1::ExplicitBucket& bucket = *request.mutable_register_layout()->add_explicit_buckets();
    bucket.set_dtype(v1::DATA_TYPE_FLOAT32);
    bucket.set_count(std::uint64_t{1} << 40);
  }
  const auto messages = LayoutMessages(std::move(request));
  ExpectFit(messages);
  int buckets = 0;
  for (const auto& message : messages) buckets += message.layout_part().explicit_buckets_size();
  EXPECT_EQ(buckets, 65536);
}

TEST(DigestMessagesTest, OnlyTheLastOneHasNoMore) {
  for (const int items : {0, 1, 5000}) {
    v1::SessionRequest request;
    request.mutable_state_digests()->set_transfer(7);
    for (int i = 0; i < items; ++i) {
      v1::StateDigest& item = *request.mutable_state_digests()->add_items();
      item.set_name("optimizer.state." + std::to_string(i));
      item.set_sha256(std::string(32, 'x'));
    }
    const auto messages = DigestMessages(std::move(request));
    ExpectFit(messages);
    int found = 0;
    for (const auto& message : messages) {
      EXPECT_EQ(message.state_digests().transfer(), 7u);
      EXPECT_EQ(message.state_digests().more(), &message != &messages.back());
      found += message.state_digests().items_size();
    }
    EXPECT_EQ(found, items);
    EXPECT_EQ(messages.size() > 1, items == 5000);
  }
}

}  // namespace
}  // namespace gradsync::client
