#include "daemon/engine/peer_tls.h"

#include <gtest/gtest.h>

#include <string>

#include "absl/time/clock.h"
#include "absl/time/time.h"
#include "tests/engine/test_certificates.h"

namespace gradsync::daemon {
namespace {

TEST(FirstExpiryTest, IsTheEndOfTheCertificate) {
  // Certificates have whole seconds, of a clock that may be a tick behind absl::Now().
  const absl::Time before = absl::Now() - absl::Seconds(2);
  const TestCertificates certificates(absl::Hours(24));
  const absl::Time after = absl::Now();
  const absl::Time expiry = FirstExpiry(certificates.keys().certificate);
  EXPECT_GE(expiry, before + absl::Hours(24));
  EXPECT_LE(expiry, after + absl::Hours(24));
}

TEST(FirstExpiryTest, IsTheEarliestOfSeveralCertificates) {
  const std::string sooner = TestCertificates(absl::Hours(24)).keys().certificate;
  const std::string later = TestCertificates(absl::Hours(48)).keys().certificate;
  EXPECT_LT(FirstExpiry(sooner), FirstExpiry(later));
  EXPECT_EQ(FirstExpiry(sooner + later), FirstExpiry(sooner));
  EXPECT_EQ(FirstExpiry(later + sooner), FirstExpiry(sooner));
}

TEST(LastExpiryTest, IsTheLatestOfSeveralCertificates) {
  const std::string sooner = TestCertificates(absl::Hours(24)).keys().ca;
  const std::string later = TestCertificates(absl::Hours(48)).keys().ca;
  EXPECT_EQ(LastExpiry(sooner), FirstExpiry(sooner));
  EXPECT_EQ(LastExpiry(sooner + later), FirstExpiry(later));
  EXPECT_EQ(LastExpiry(later + sooner), FirstExpiry(later));
}

TEST(ExpiryTest, TextWithoutACertificateNeverExpires) {
  for (const std::string& text : {std::string(), TestCertificates().keys().key}) {
    EXPECT_EQ(FirstExpiry(text), absl::InfiniteFuture());
    EXPECT_EQ(LastExpiry(text), absl::InfiniteFuture());
  }
}

}  // namespace
}  // namespace gradsync::daemon
