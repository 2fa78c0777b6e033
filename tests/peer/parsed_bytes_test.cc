#include "daemon/peer/parsed_bytes.h"

#include <google/protobuf/io/zero_copy_stream_impl_lite.h>

#include <cstddef>
#include <cstdint>
#include <string>

#include "gradsync/v1/peer.pb.h"
#include "gtest/gtest.h"

namespace gradsync::daemon {
namespace {

constexpr std::size_t kMuch = std::size_t{1} << 30;

// `block`: the bytes come in pieces of so many.
bool Parses(std::size_t most, const std::string& bytes, int block = -1) {
  google::protobuf::io::ArrayInputStream stream(bytes.data(), static_cast<int>(bytes.size()),
                                                block);
  return ParsesWithin(most, v1::AttachResponse::descriptor(), &stream);
}

// The least `most` with which it parses.
std::size_t Weight(const v1::AttachResponse& message) {
  const std::string bytes = message.SerializeAsString();
  std::size_t least = 0, enough = kMuch;
  EXPECT_TRUE(Parses(enough, bytes));
  while (least + 1 < enough) {
    const std::size_t middle = (least + enough) / 2;
    (Parses(middle, bytes) ? enough : least) = middle;
  }
  return enough;
}

v1::SessionResponse* ResponseOf(v1::AttachResponse* message) {
  return message->mutable_rank_response()->mutable_response();
}

// Each kind of field, many times: more than the message takes, and at most four times as much.
TEST(ParsedBytesTest, CountsALittleMoreThanAMessageTakes) {
  v1::AttachResponse parts, texts, numbers, unknown;
  for (int i = 0; i < 10'000; ++i) {
    ResponseOf(&parts)->mutable_layout_assigned()->add_placements()->set_bucket(i);
    numbers.mutable_launch()->add_incarnations(i);
    texts.mutable_connect_engine()->add_node_names(std::string(i % 100, 'n'));
    unknown.GetReflection()->MutableUnknownFields(&unknown)->AddVarint(99, i);
  }
  for (const v1::AttachResponse& one : {parts, texts, numbers, unknown}) {
    v1::AttachResponse parsed;
    ASSERT_TRUE(parsed.ParseFromString(one.SerializeAsString()));
    const std::size_t takes = parsed.SpaceUsedLong();
    const std::size_t weight = Weight(one);
    EXPECT_GE(weight, takes) << one.GetTypeName();
    EXPECT_LE(weight, 4 * takes) << one.GetTypeName();
  }
}

TEST(ParsedBytesTest, LongTextTakesItsLength) {
  v1::AttachResponse message;
  message.mutable_worker_call()->set_call(std::string(std::size_t{1} << 20, 'x'));
  EXPECT_LT(Weight(message), (std::size_t{1} << 20) + 4096);
}

// Two bytes for each object.
TEST(ParsedBytesTest, EmptyPartsCount) {
  v1::AttachResponse message;
  for (int i = 0; i < 100'000; ++i) ResponseOf(&message)->mutable_session_opened()->add_layouts();
  const std::string bytes = message.SerializeAsString();
  EXPECT_LT(bytes.size(), 210'000u);
  EXPECT_FALSE(Parses(10 * bytes.size(), bytes));
}

// As the bytes of gRPC's slices do.
TEST(ParsedBytesTest, BytesMayComeInPieces) {
  v1::AttachResponse message;
  for (int i = 0; i < 1000; ++i) {
    ResponseOf(&message)->mutable_layout_assigned()->add_placements()->set_bucket(i);
  }
  const std::string bytes = message.SerializeAsString();
  for (const int block : {1, 7, 100}) EXPECT_TRUE(Parses(kMuch, bytes, block)) << block;
}

TEST(ParsedBytesTest, BytesThatAreNoMessageAreRefused) {
  v1::AttachResponse message;
  ResponseOf(&message)->mutable_session_opened()->add_layouts();
  const std::string whole = message.SerializeAsString();
  for (std::size_t size = 1; size < whole.size(); ++size) {
    EXPECT_FALSE(Parses(kMuch, whole.substr(0, size))) << size;
  }
  const std::string group("\x0b", 1), no_field("\x02\x00", 2), longer("\x12\x7f", 2);
  for (const std::string& bytes : {group, no_field, longer}) EXPECT_FALSE(Parses(kMuch, bytes));
}

}  // namespace
}  // namespace gradsync::daemon
