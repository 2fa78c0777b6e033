#include "daemon/peer/lazy_message.h"

#include <grpcpp/support/byte_buffer.h>
#include <grpcpp/support/slice.h>

#include <cstddef>
#include <cstdint>
#include <string>

#include "gradsync/v1/peer.pb.h"
#include "gtest/gtest.h"

namespace gradsync::daemon {
namespace {

using Lazy = LazyMessage<v1::AttachRequest>;

// As gRPC gives it the bytes of a message.
grpc::Status Receive(const std::string& bytes, Lazy* message) {
  const grpc::Slice slice(bytes);
  grpc::ByteBuffer buffer(&slice, 1);
  return grpc::SerializationTraits<Lazy>::Deserialize(&buffer, message);
}

std::string MessageOf(std::size_t value_bytes) {
  v1::AttachRequest message;
  message.mutable_rendezvous_set()->set_value(std::string(value_bytes, 'x'));
  return message.SerializeAsString();
}

TEST(LazyMessageTest, APingIsParsedWhenItComes) {
  v1::AttachRequest pong;
  pong.mutable_pong()->set_number(~std::uint64_t{0});
  Lazy message;
  EXPECT_EQ(message.Get(), nullptr) << "nothing has come";
  ASSERT_TRUE(Receive(pong.SerializeAsString(), &message).ok());
  ASSERT_NE(message.IfParsed(), nullptr);
  EXPECT_EQ(message.Get()->pong().number(), ~std::uint64_t{0});
  message = Lazy();
  EXPECT_EQ(message.Get(), nullptr);
}

TEST(LazyMessageTest, AShortMessageIsParsedWhenItIsAskedFor) {
  Lazy message;
  ASSERT_TRUE(Receive(MessageOf(100), &message).ok());
  EXPECT_EQ(message.IfParsed(), nullptr);
  EXPECT_TRUE(message.IsShort());
  ASSERT_NE(message.IfShort(), nullptr);
  EXPECT_EQ(message.IfShort()->rendezvous_set().value().size(), 100u);
  EXPECT_NE(message.IfParsed(), nullptr);
}

// 2 bytes for each object.
TEST(LazyMessageTest, AMessageThatWouldTakeMuchMemoryIsNotParsed) {
  v1::AttachRequest message;
  auto* const parameters =
      message.mutable_rank_request()->mutable_request()->mutable_register_layout();
  for (std::size_t i = 0; i < Lazy::kMostParsedBytes / 64; ++i) parameters->add_parameters();
  const std::string bytes = message.SerializeAsString();
  EXPECT_LT(bytes.size(), 3u << 20);
  Lazy lazy;
  ASSERT_TRUE(Receive(bytes, &lazy).ok());
  EXPECT_EQ(lazy.Get(), nullptr);
}

TEST(LazyMessageTest, ALongMessageIsParsedWhenItIsUsed) {
  Lazy message;
  ASSERT_TRUE(Receive(MessageOf(2 * Lazy::kShortBytes), &message).ok());
  EXPECT_FALSE(message.IsShort());
  EXPECT_EQ(message.IfShort(), nullptr);
  EXPECT_EQ(message.IfParsed(), nullptr);
  ASSERT_NE(message.Get(), nullptr);
  EXPECT_EQ(message.Get()->rendezvous_set().value().size(), 2 * Lazy::kShortBytes);
  EXPECT_NE(message.IfParsed(), nullptr);
}

TEST(LazyMessageTest, BytesThatAreNoMessageAreKnownWhenTheyAreParsed) {
  Lazy message;
  EXPECT_FALSE(Receive(std::string(10, '\xFF'), &message).ok());
  ASSERT_TRUE(Receive(std::string(100, '\xFF'), &message).ok());
  EXPECT_EQ(message.IfShort(), nullptr);
  ASSERT_TRUE(Receive(std::string(2 * Lazy::kShortBytes, '\xFF'), &message).ok());
  EXPECT_EQ(message.Get(), nullptr);
  EXPECT_EQ(message.Get(), nullptr);
}

}  // namespace
}  // namespace gradsync::daemon
