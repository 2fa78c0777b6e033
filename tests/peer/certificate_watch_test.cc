#include "daemon/peer/certificate_watch.h"

#include <fstream>
#include <string>
#include <vector>

#include "absl/time/time.h"
#include "daemon/base/logging.h"
#include "gmock/gmock.h"
#include "gtest/gtest.h"
#include "tests/kit/temporary_directory.h"

namespace gradsync::daemon {
namespace {

using ::testing::AllOf;
using ::testing::ElementsAre;
using ::testing::HasSubstr;
using ::testing::IsEmpty;

class CertificateWatchTest : public testing::Test {
 protected:
  static constexpr absl::Duration kDay = absl::Hours(24);

  CertificateWatchTest() {
    LogOptions log;
    log.file = directory_.File("log");
    EXPECT_TRUE(InitLogging(log).ok());
  }
  ~CertificateWatchTest() override { EXPECT_TRUE(InitLogging({}).ok()); }

  // The lines since the last call.
  std::vector<std::string> NewLines() {
    std::vector<std::string> lines;
    std::ifstream file(directory_.File("log"));
    std::string line;
    for (int i = 0; std::getline(file, line); ++i) {
      if (i >= read_) lines.push_back(line);
    }
    read_ += static_cast<int>(lines.size());
    return lines;
  }

  const TemporaryDirectory directory_;
  const absl::Time end_ = absl::FromUnixSeconds(1'800'000'000);  // 2027-01-15T08:00:00Z
  CertificateWatch watch_{
      {{"/etc/gradsync/peer.crt", end_}, {"/etc/gradsync/ca.crt", end_ + kDay}}};
  int read_ = 0;
};

TEST_F(CertificateWatchTest, SaysNothingTwoWeeksBefore) {
  watch_.Look(0, end_ - 15 * kDay);
  EXPECT_THAT(NewLines(), IsEmpty());
}

TEST_F(CertificateWatchTest, NamesFileDateAndRemedy) {
  watch_.Look(0, end_ - CertificateWatch::kSoon);
  EXPECT_THAT(NewLines(), ElementsAre(AllOf(HasSubstr("WARNING certificate expires soon "),
                                            HasSubstr(" path=/etc/gradsync/peer.crt "),
                                            HasSubstr(" expires=2027-01-15T08:00:00Z "),
                                            HasSubstr("deploy/peer-keys"), HasSubstr("restart"))));
}

TEST_F(CertificateWatchTest, SaysThatACertificateHasExpired) {
  watch_.Look(0, end_);
  EXPECT_THAT(NewLines(),
              ElementsAre(AllOf(HasSubstr("certificate has expired"), HasSubstr("peer.crt")),
                          AllOf(HasSubstr("certificate expires soon"), HasSubstr("ca.crt"))));
}

TEST_F(CertificateWatchTest, WarnsOfEachFileOnceADay) {
  watch_.Look(1, end_ - kDay);
  EXPECT_EQ(NewLines().size(), 2u);
  watch_.Look(CertificateWatch::kPeriodNs, end_);
  EXPECT_THAT(NewLines(), IsEmpty());
  watch_.Look(CertificateWatch::kPeriodNs + 1, end_);
  EXPECT_EQ(NewLines().size(), 2u);
}

}  // namespace
}  // namespace gradsync::daemon
