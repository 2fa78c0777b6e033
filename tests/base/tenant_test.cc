#include "daemon/base/tenant.h"

#include <gtest/gtest.h>

#include <set>
#include <string>
#include <vector>

#include "absl/hash/hash_testing.h"

namespace gradsync::daemon {
namespace {

constexpr char kId[] = "6f1e0c4a-93d2-4a57-8f0e-1b2c3d4e5f60";

TEST(PodIdTest, ReadsEveryFormOfAnId) {
  for (const char* text :
       {kId, "6f1e0c4a_93d2_4a57_8f0e_1b2c3d4e5f60", "6f1e0c4a93d24a578f0e1b2c3d4e5f60"}) {
    const auto pod = PodId::Parse(text);
    ASSERT_TRUE(pod.has_value()) << text;
    EXPECT_EQ(pod->Text(), kId) << text;
  }
}

TEST(PodIdTest, ReadsNothingElse) {
  for (const std::string& text : {
           std::string(),
           std::string("6f1e0c4a"),
           std::string(kId) + "0",
           std::string(kId).substr(1),
           std::string("6F1E0C4A-93D2-4A57-8F0E-1B2C3D4E5F60"),  // upper case
           std::string("6f1e0c4a-93d2_4a57-8f0e-1b2c3d4e5f60"),  // two separators
           std::string("6f1e0c4a.93d2.4a57.8f0e.1b2c3d4e5f60"),  // a third one
           std::string("6f1e0c4-a93d2-4a57-8f0e-1b2c3d4e5f60"),  // at another place
           std::string("6f1e0c4a-93d2-4a57-8f0e-1b2c3d4e5f6g"),  // no digit
           std::string("00000000-0000-0000-0000-000000000000"),  // means no pod
           std::string("00000000000000000000000000000000"),
           std::string("6f1e0c4a-93d2-4a57-8f0e-1b2c3d4e5f6\0", 36),
       }) {
    EXPECT_FALSE(PodId::Parse(text).has_value()) << text;
  }
}

TEST(TenantTest, DiffersByUserAndByPod) {
  const PodId pod = *PodId::Parse(kId);
  const PodId other = *PodId::Parse("6f1e0c4a93d24a578f0e1b2c3d4e5f61");
  const std::vector<Tenant> all = {Tenant(0), Tenant(1000), Tenant(1000, pod), Tenant(1000, other),
                                   Tenant(1001, pod)};
  const std::set<Tenant> ordered(all.begin(), all.end());
  EXPECT_EQ(ordered.size(), all.size());
  EXPECT_EQ(Tenant(1000, pod), Tenant(1000, *PodId::Parse(kId)));
  EXPECT_TRUE(absl::VerifyTypeImplementsAbslHashCorrectly(all));
}

TEST(TenantTest, TextFitsAfterTheWordUser) {
  EXPECT_EQ(Tenant(1000).Text(), "1000");
  EXPECT_EQ(Tenant(1000, *PodId::Parse(kId)).Text(), std::string("1000 in pod ") + kId);
}

}  // namespace
}  // namespace gradsync::daemon
