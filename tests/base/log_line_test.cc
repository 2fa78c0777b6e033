#include "daemon/base/log_line.h"

#include <limits>
#include <nlohmann/json.hpp>
#include <string>
#include <vector>

#include "daemon/base/tenant.h"
#include "gmock/gmock.h"
#include "gtest/gtest.h"

namespace gradsync::daemon {
namespace {

using ::testing::HasSubstr;
using ::testing::Not;

// 2026-03-01T12:00:00.123456Z
constexpr std::int64_t kNow = 1'772'366'400'123'456'789;
constexpr char kNowText[] = "2026-03-01T12:00:00.123456Z ";

std::string Text(LogLevel level, std::string_view message, const std::vector<LogField>& fields) {
  return FormatLogLine(LogFormat::kText, kNow, level, message, fields);
}

// Returns the fields of a text line.
std::string TextFields(const std::vector<LogField>& fields) {
  const std::string prefix = std::string(kNowText) + "INFO m ";
  const std::string line = Text(LogLevel::kInfo, "m", fields);
  EXPECT_EQ(line.substr(0, prefix.size()), prefix);
  return line.substr(prefix.size());
}

nlohmann::json Json(std::string_view message, const std::vector<LogField>& fields) {
  const std::string line =
      FormatLogLine(LogFormat::kJson, kNow, LogLevel::kWarning, message, fields);
  EXPECT_THAT(line, Not(HasSubstr("\n")));
  return nlohmann::json::parse(line, nullptr, /*allow_exceptions=*/false);
}

TEST(LogLineTest, TextHasFieldsAfterTheMessage) {
  const std::string job = "resnet";
  EXPECT_EQ(Text(LogLevel::kWarning, "rank lost",
                 {{"job", job}, {"rank", 1}, {"step", std::uint64_t{7}}}),
            "2026-03-01T12:00:00.123456Z WARNING rank lost job=resnet rank=1 step=7");
  EXPECT_EQ(Text(LogLevel::kInfo, "serving", {}), "2026-03-01T12:00:00.123456Z INFO serving");
  EXPECT_EQ(Text(LogLevel::kDebug, "x", {}), "2026-03-01T12:00:00.123456Z DEBUG x");
  EXPECT_EQ(Text(LogLevel::kError, "x", {}), "2026-03-01T12:00:00.123456Z ERROR x");
}

TEST(LogLineTest, JsonHasFieldsInOrder) {
  const std::string line = FormatLogLine(LogFormat::kJson, kNow, LogLevel::kInfo, "rank lost",
                                         {{"job", "a b"}, {"rank", 1}, {"clean", false}});
  EXPECT_EQ(line,
            "{\"time\":\"2026-03-01T12:00:00.123456Z\",\"level\":\"info\",\"message\":\"rank "
            "lost\",\"job\":\"a b\",\"rank\":1,\"clean\":false}");
}

TEST(LogLineTest, WritesNumbersInBothFormats) {
  const std::vector<LogField> fields = {
      {"least", std::numeric_limits<std::int64_t>::min()},
      {"most", std::numeric_limits<std::uint64_t>::max()},
      {"small", static_cast<std::uint8_t>(200)},
      {"half", 0.5},
      {"yes", true},
  };
  EXPECT_EQ(TextFields(fields),
            "least=-9223372036854775808 most=18446744073709551615 small=200 half=0.5 yes=true");
  const nlohmann::json json = Json("m", fields);
  EXPECT_EQ(json["least"], std::numeric_limits<std::int64_t>::min());
  EXPECT_EQ(json["most"], std::numeric_limits<std::uint64_t>::max());
  EXPECT_EQ(json["small"], 200);
  EXPECT_EQ(json["half"], 0.5);
  EXPECT_EQ(json["yes"], true);
}

TEST(LogLineTest, UserIsANumberAndAPod) {
  constexpr char kPod[] = "6f1e0c4a-93d2-4a57-8f0e-1b2c3d4e5f60";
  const Tenant user(1000), in_pod(1000, *PodId::Parse(kPod));
  EXPECT_EQ(TextFields({{"uid", user}, {"pid", 7}}), "uid=1000 pid=7");
  EXPECT_EQ(TextFields({{"uid", in_pod}, {"pid", 7}}),
            std::string("uid=1000 pod=") + kPod + " pid=7");
  EXPECT_FALSE(Json("m", {{"uid", user}}).contains("pod"));
  const nlohmann::json json = Json("m", {{"uid", in_pod}});
  EXPECT_EQ(json["uid"], 1000);
  EXPECT_EQ(json["pod"], kPod);
}

TEST(LogLineTest, NanAndInfinityAreStringsInJson) {
  const std::vector<LogField> fields = {{"x", std::numeric_limits<double>::quiet_NaN()},
                                        {"y", std::numeric_limits<double>::infinity()}};
  EXPECT_EQ(TextFields(fields), "x=nan y=inf");
  EXPECT_EQ(Json("m", fields)["x"], "nan");
  EXPECT_EQ(Json("m", fields)["y"], "inf");
}

TEST(LogLineTest, TextQuotesAmbiguousValues) {
  EXPECT_EQ(TextFields({{"k", "a b"}}), R"(k="a b")");
  EXPECT_EQ(TextFields({{"k", ""}}), R"(k="")");
  EXPECT_EQ(TextFields({{"k", "a=b"}}), R"(k="a=b")");
  EXPECT_EQ(TextFields({{"k", "a\"b"}}), R"(k="a\"b")");
  EXPECT_EQ(TextFields({{"k", "a\\b"}}), R"(k="a\\b")");
  EXPECT_EQ(TextFields({{"k", "/run/x.sock:12"}}), "k=/run/x.sock:12");
}

TEST(LogLineTest, ValuesCannotForgeALine) {
  const std::string forged = "x\n2026-03-01T12:00:00.123456Z ERROR disk full";
  EXPECT_EQ(TextFields({{"job", forged}}),
            R"(job="x\n2026-03-01T12:00:00.123456Z ERROR disk full")");
  EXPECT_EQ(Json("m", {{"job", forged}})["job"], forged);
  EXPECT_EQ(Text(LogLevel::kInfo, "a\nb", {}), std::string(kNowText) + R"(INFO a\nb)");
}

TEST(LogLineTest, EveryControlCharacterIsEscaped) {
  for (int c = 0; c < 0x20; ++c) {
    const std::string value = std::string("a") + static_cast<char>(c) + "b";
    for (char written : TextFields({{"k", value}})) {
      EXPECT_GE(static_cast<unsigned char>(written), 0x20) << c;
    }
    EXPECT_EQ(Json("m", {{"k", value}})["k"], value) << c;
  }
}

TEST(LogLineTest, TerminalControlsAreEscaped) {
  // A terminal would obey DEL and the 8-bit CSI (U+009B).
  EXPECT_EQ(TextFields({{"k",
                         "a\x7f\xc2\x9b"
                         "2Jb"}}),
            R"(k="a\u007f\u009b2Jb")");
}

TEST(LogLineTest, InvalidUtf8BecomesTheReplacementCharacter) {
  const std::string replacement = "\xEF\xBF\xBD";
  const std::vector<std::string> invalid = {
      "\xFF", "\xC3", "\xC0\x80", "\xED\xA0\x80", "\xF5\x80\x80\x80", "\x80",
  };
  for (const std::string& bytes : invalid) {
    const nlohmann::json json = Json("m" + bytes, {{"k", "a" + bytes + "b"}});
    ASSERT_FALSE(json.is_discarded());
    const std::string value = json["k"];
    EXPECT_THAT(value, HasSubstr(replacement));
    EXPECT_EQ(value.front(), 'a');
    EXPECT_EQ(value.back(), 'b');
    EXPECT_THAT(TextFields({{"k", "a" + bytes + "b"}}), HasSubstr(replacement));
  }
  EXPECT_EQ(Json("m", {{"k", "gr\xC3\xB6\xC3\x9F"}})["k"], "gr\xC3\xB6\xC3\x9F");
}

TEST(LogLineTest, LongValuesAreCutAtACharacter) {
  const std::string fits(kMaxLogValueBytes, 'x');
  EXPECT_EQ(Json("m", {{"k", fits}})["k"], fits);
  EXPECT_EQ(Json("m", {{"k", fits + "x"}})["k"], fits + "...");
  const std::string umlauts = std::string(kMaxLogValueBytes - 1, 'x') + "\xC3\xB6";
  EXPECT_EQ(Json("m", {{"k", umlauts}})["k"], std::string(kMaxLogValueBytes - 1, 'x') + "...");
  EXPECT_EQ(Json(fits + "x", {})["message"], fits + "...");
}

TEST(LogLineTest, TokensAndNoncesAreRedacted) {
  const std::vector<LogField> fields = {
      {"token", "hunter2"}, {"job_token", "hunter2"}, {"staging_nonce", "hunter2"}};
  EXPECT_EQ(TextFields(fields), "token=[redacted] job_token=[redacted] staging_nonce=[redacted]");
  EXPECT_THAT(Json("m", fields).dump(), Not(HasSubstr("hunter2")));
}

}  // namespace
}  // namespace gradsync::daemon
