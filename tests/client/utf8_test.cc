#include "client/src/utf8.h"

#include "gtest/gtest.h"

namespace gradsync::client {
namespace {

TEST(Utf8Test, KeepsValidText) {
  for (const std::string text :
       {"", "loss is nan", "größe", "損失", "\xf0\x9f\x94\xa5", "\xf4\x8f\xbf\xbf"}) {
    EXPECT_EQ(ValidUtf8(text), text);
  }
}

TEST(Utf8Test, ReplacesEveryOtherByte) {
  EXPECT_EQ(ValidUtf8("a\xff z"), "a? z");
  EXPECT_EQ(ValidUtf8("\xc3"), "?");                 // cut off
  EXPECT_EQ(ValidUtf8("\xe6\x90"), "??");            // cut off
  EXPECT_EQ(ValidUtf8("\xc0\xaf"), "??");            // overlong
  EXPECT_EQ(ValidUtf8("\xe0\x80\xaf"), "???");       // overlong
  EXPECT_EQ(ValidUtf8("\xed\xa0\x80"), "???");       // surrogate
  EXPECT_EQ(ValidUtf8("\xf4\x90\x80\x80"), "????");  // beyond U+10FFFF
  EXPECT_EQ(ValidUtf8("\x80tail"), "?tail");         // continuation alone
}

}  // namespace
}  // namespace gradsync::client
