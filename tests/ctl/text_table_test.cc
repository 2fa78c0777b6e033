#include "tools/gradsyncctl/text_table.h"

#include "gtest/gtest.h"

namespace gradsync {
namespace {

TEST(TextTableTest, AlignsColumnsWithoutTrailingSpaces) {
  TextTable table({{"NAME"}, {"COUNT", TextTable::Align::kRight}, {"WHY"}});
  EXPECT_TRUE(table.empty());
  table.AddRow({"a", "1", "-"});
  table.AddRow({"longer", "12345678", ""});
  table.AddNote("  a note that is longer than the table is wide");
  EXPECT_FALSE(table.empty());
  EXPECT_EQ(table.Render(),
            "NAME       COUNT  WHY\n"
            "a              1  -\n"
            "longer  12345678\n"
            "  a note that is longer than the table is wide\n");
}

TEST(TextTableTest, LettersOfSeveralBytesHaveWidthOne) {
  TextTable table({{"NAME"}, {"X"}});
  table.AddRow({"größer", "1"});
  table.AddRow({"kleine", "2"});
  EXPECT_EQ(table.Render(), "NAME    X\ngrößer  1\nkleine  2\n");
}

TEST(TextTableTest, ControlCharactersNeverReachTheTerminal) {
  EXPECT_EQ(Printable("a\x1B[2Jb\nc\x7F"), "a?[2Jb?c?");
  EXPECT_EQ(Printable("\xC2\x9B"
                      "31m"),
            "?31m");
  EXPECT_EQ(Printable("größer"), "größer");
  EXPECT_EQ(Printable("\xC2"), "\xC2");
  TextTable table({{"NAME"}});
  table.AddRow({"\x1B[31mred"});
  table.AddNote("bell\a");
  EXPECT_EQ(table.Render(), "NAME\n?[31mred\nbell?\n");
}

TEST(TextTableTest, MissingCellsAreEmpty) {
  TextTable table({{"A"}, {"B"}});
  table.AddRow({"1"});
  EXPECT_EQ(table.Render(), "A  B\n1\n");
}

}  // namespace
}  // namespace gradsync
