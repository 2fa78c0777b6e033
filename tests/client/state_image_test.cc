// The form in which a state travels.

#include "client/src/state_image.h"

#include <algorithm>
#include <cstring>
#include <limits>
#include <string>
#include <vector>

#include "gmock/gmock.h"
#include "gtest/gtest.h"
#include "tests/client/job_of_threads.h"

namespace gradsync::client {
namespace {

using testing::HasSubstr;

const std::string kLong(1000, 'x');

std::vector<StateItem> Items() {
  return {{"weight", kLong.data(), kLong.size()},
          {"empty", nullptr, 0},
          {"also empty", kLong.data(), 0},
          {"bias", "abc", 3}};
}

// The whole image, copied in pieces of `piece` bytes.
std::string ImageOf(const std::vector<StateItem>& items, std::size_t piece) {
  const StateImageSource source(items);
  std::string image(source.bytes(), '?');
  for (std::size_t at = 0; at < image.size(); at += piece) {
    source.Copy(at, std::min(piece, image.size() - at),
                reinterpret_cast<std::byte*>(image.data()) + at);
  }
  return image;
}

absl::StatusOr<StateImage> Parse(const std::string& image) {
  auto memory = NewImageMemory(std::max<std::size_t>(image.size(), 1));
  std::memcpy(memory.get(), image.data(), image.size());
  return ParseImage(3, std::move(memory), image.size());
}

std::string With(std::string image, std::size_t at, std::uint64_t number) {
  std::memcpy(image.data() + at, &number, sizeof(number));
  return image;
}

TEST(StateImageTest, ArrivesAsItWasSent) {
  for (const std::size_t piece : {1, 7, 64, 100, 5000}) {
    const auto image = Parse(ImageOf(Items(), piece));
    ASSERT_TRUE(image.ok()) << image.status();
    EXPECT_EQ(image->source, 3u);
    ASSERT_EQ(image->items.size(), 4u);
    for (std::size_t i = 0; i < 4; ++i) {
      const StateItem sent = Items()[i];
      EXPECT_EQ(image->items[i].name, sent.name);
      ASSERT_EQ(image->items[i].data.size(), sent.bytes);
      if (sent.bytes == 0) continue;
      EXPECT_EQ(std::memcmp(image->items[i].data.data(), sent.data, sent.bytes), 0);
      EXPECT_EQ(reinterpret_cast<std::uintptr_t>(image->items[i].data.data()) % 64, 0u);
    }
  }
}

TEST(StateImageTest, AStateMayBeEmpty) {
  const auto image = Parse(ImageOf({}, 10));
  ASSERT_TRUE(image.ok()) << image.status();
  EXPECT_TRUE(image->items.empty());
}

TEST(StateImageTest, AMalformedImageIsRefused) {
  const std::string good = ImageOf(Items(), 64);
  const std::uint64_t huge = std::numeric_limits<std::uint64_t>::max();
  for (const std::string& bad :
       {std::string(), std::string("GSSTATE1"), "X" + good.substr(1), good.substr(0, 64),
        good.substr(0, good.size() - 64), good + std::string(64, '\0'),
        // Number of items; the first name's length; the first value's length.
        With(good, 8, 3), With(good, 8, huge), With(good, 16, huge), With(good, 16, 0),
        With(good, 24, huge), With(good, 24, huge - 63), With(good, 24, good.size()),
        ImageOf({{"a", "x", 1}, {"a", "x", 1}}, 64), ImageOf({{"", "x", 1}}, 64),
        ImageOf({{std::string(1025, 'n'), "x", 1}}, 64)}) {
    ExpectError(Parse(bad).status(), absl::StatusCode::kFailedPrecondition, "STATE_REFUSED");
  }
}

TEST(StateImageTest, AMalformedItemIsNamed) {
  const auto error = [](const StateItem& item) {
    const absl::Status status = ValidateItems({{"first", "x", 1}, item});
    ExpectError(status, absl::StatusCode::kInvalidArgument, "MALFORMED");
    return std::string(status.message());
  };
  EXPECT_THAT(error({"", "x", 1}), HasSubstr("item 1 ('') needs a name"));
  EXPECT_THAT(error({"\xff", "x", 1}), HasSubstr("item 1 ('?') needs a name"));
  EXPECT_THAT(error({std::string(1025, 'n'), "x", 1}), HasSubstr("needs a name"));
  EXPECT_THAT(error({"first", "x", 1}), HasSubstr("'first') has the name of an earlier one"));
  EXPECT_THAT(error({"null", nullptr, 1}), HasSubstr("null pointer"));
  EXPECT_TRUE(ValidateItems(Items()).ok());
}

}  // namespace
}  // namespace gradsync::client
