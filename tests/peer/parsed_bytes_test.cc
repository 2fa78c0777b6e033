#include "daemon/peer/parsed_bytes.h"

#include <google/protobuf/io/zero_copy_stream_impl_lite.h>

#include <cstddef>
#include <cstdint>
#include <random>
#include <string>

#include "daemon/peer/lazy_message.h"
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

// What the parser takes, also if it fails in the end.
std::size_t Takes(const std::string& bytes) {
  v1::AttachResponse message;
  static_cast<void>(message.ParseFromString(bytes));
  return message.SpaceUsedLong();
}

std::string Repeated(const std::string& piece, int times) {
  std::string all;
  for (int i = 0; i < times; ++i) all += piece;
  return all;
}

// The parser keeps a field whose wire type is another one.
TEST(ParsedBytesTest, FieldsOfAnotherWireTypeCount) {
  const std::string welcome_is_a_number = Repeated(std::string("\x08\x00", 2), 10'000);
  const std::string ping_number_is_a_text =
      "\x3a\xa0\x9c\x01" + Repeated(std::string("\x0a\x00", 2), 10'000);  // of 20,000 bytes
  for (const std::string& bytes : {welcome_is_a_number, ping_number_is_a_text}) {
    EXPECT_GT(Takes(bytes), 160'000u);
    EXPECT_FALSE(Parses(Takes(bytes) - 1, bytes));
    EXPECT_TRUE(Parses(8 * Takes(bytes), bytes));
  }
}

// The parser reads a part to its end, beyond that of the message around it. Here it would take a
// worker's text for the details of an error.
TEST(ParsedBytesTest, PartsEndWithinTheirMessage) {
  const std::string details = Repeated(std::string("\x1a\x00", 2), 1'000);
  const std::string text = "\x42\xd3\x0f\x1a\xd0\x0f" + details;
  // A RankResponse of 5 bytes, whose response has 16,000,000.
  const std::string bytes = "\x12\x05\x12\x80\xc8\xd0\x07" + text;
  EXPECT_TRUE(Parses(kMuch, text));
  EXPECT_FALSE(Parses(kMuch, bytes));
}

// Bytes of messages, with some changed: the sum is never less than what the parser takes.
TEST(ParsedBytesTest, IsNeverTooLittle) {
  std::mt19937 random(1);
  const auto below = [&random](std::size_t bound) { return random() % bound; };
  v1::AttachResponse assigned, connect, done, launch;
  for (int i = 0; i < 8; ++i) {
    auto* const layout = ResponseOf(&assigned)->mutable_layout_assigned();
    layout->add_placements()->set_bucket(i);
    layout->add_buckets();
    auto* const step = ResponseOf(&done)->mutable_step_done();
    step->add_sum_of_squares(i);
    step->add_non_finite(i);
    step->add_buckets()->add_ready_ns(i);
    launch.mutable_launch()->add_incarnations(i);
    connect.mutable_connect_engine()->add_node_names("alpha");
  }
  const std::string originals[] = {assigned.SerializeAsString(), connect.SerializeAsString(),
                                   done.SerializeAsString(), launch.SerializeAsString()};
  int parsed = 0;
  for (int i = 0; i < 200'000; ++i) {
    std::string bytes = originals[below(4)];
    if (below(2) == 0) bytes += originals[below(4)];
    for (std::size_t changes = below(4); changes > 0; --changes) {
      bytes[below(bytes.size())] =
          static_cast<char>(below(2) == 0 ? below(256) : below(16) * 8 + 2);
    }
    const std::size_t takes = Takes(bytes);
    ASSERT_FALSE(Parses(takes - 1, bytes)) << takes << " bytes of memory, input " << i;
    parsed += Parses(kMuch, bytes) ? 1 : 0;
  }
  EXPECT_GT(parsed, 20'000);
}

// The largest message that a coordinator sends: StepDone, with times and statistics of as many
// buckets and ranks as a layout may have.
TEST(ParsedBytesTest, TheLargestStepFits) {
  v1::AttachResponse message;
  v1::StepDone* const step = ResponseOf(&message)->mutable_step_done();
  for (int bucket = 0; bucket < 65'536; ++bucket) {
    v1::BucketTimes* const times = step->add_buckets();
    times->set_bucket(bucket);
    for (int rank = 0; rank < 2; ++rank) times->add_ready_ns(std::uint64_t{1} << 55);
    times->set_start_ns(std::uint64_t{1} << 55);
    times->set_finish_ns(std::uint64_t{1} << 55);
    step->add_sum_of_squares(1.0);
    step->add_non_finite(std::uint64_t{1} << 40);
  }
  step->set_used_map(std::string(500'000 / 8, 'u'));
  const std::string bytes = message.SerializeAsString();
  EXPECT_TRUE(Parses(LazyMessage<v1::AttachResponse>::kMostParsedBytes, bytes));
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
