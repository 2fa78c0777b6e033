// Which layouts a job has, and what late ranks learn of agreements that have failed.

#include "daemon/job/layout_set.h"

#include <gtest/gtest.h>

#include <memory>
#include <string>
#include <utility>

#include "tests/job/job_fixture.h"

namespace gradsync::daemon {
namespace {

// The layouts of three ranks, without the rest of a job.
class LayoutSetTest : public JobFixture {
 protected:
  static constexpr std::size_t kMaxBuckets = 3;

  LayoutSetTest() {
    for (std::uint32_t rank = 0; rank < members_.world_size(); ++rank) {
      sinks_.push_back(std::make_shared<RecordingSink>());
      members_.Join(rank, Incarnation(rank), sinks_.back(), "");
    }
  }

  absl::StatusOr<LayoutChannel*> Ask(std::uint32_t rank, LayoutSpec spec,
                                     std::uint64_t deadline_ns = kForever) {
    return layouts_.Register(rank, Request(std::move(spec), deadline_ns), &actions_);
  }

  const JobTerms terms_;
  Membership members_{3};
  LayoutSet layouts_{terms_, &members_, kMaxBuckets, {}, {}, {}};
  DeferredActions actions_;
};

TEST_F(LayoutSetTest, LateRankGetsTheFailureOnceThenMayAgreeAgain) {
  ASSERT_TRUE(Ask(0, Spec(2)).ok());
  ASSERT_FALSE(Ask(1, Spec(3)).ok());
  // The ranks that know of the failure begin again. The late rank first gets the failure.
  LayoutChannel* const next = Ask(0, Spec(2)).value();
  EXPECT_EQ(ReasonOf(Ask(2, Spec(2)).status()), "LAYOUT_MISMATCH");
  EXPECT_EQ(Ask(2, Spec(2)).value(), next);
  EXPECT_EQ(Ask(1, Spec(2)).value(), next);
  for (std::uint32_t rank = 0; rank < 3; ++rank) {
    EXPECT_FALSE(next->ready());
    EXPECT_TRUE(layouts_.ArenaMapped(rank, next->channel(), {}, &actions_).ok());
  }
  EXPECT_TRUE(next->ready());
  EXPECT_EQ(layouts_.Snapshot().size(), 1u);
}

TEST_F(LayoutSetTest, ManyFailuresLeaveNoLayoutBehind) {
  for (int i = 0; i < 1000; ++i) {
    ASSERT_TRUE(Ask(0, Spec(1, "model" + std::to_string(i)), /*deadline_ns=*/1).ok());
    layouts_.Tick(/*now_ns=*/1, &actions_);
  }
  EXPECT_TRUE(layouts_.Snapshot().empty());
  // The oldest failures are forgotten.
  EXPECT_EQ(ReasonOf(Ask(1, Spec(1, "model999")).status()), "LAYOUT_TIMEOUT");
  EXPECT_TRUE(Ask(1, Spec(1, "model0")).ok());
}

TEST_F(LayoutSetTest, LayoutWithTooManyBucketsIsRefusedAndForgotten) {
  EXPECT_EQ(ReasonOf(Ask(0, Spec(kMaxBuckets + 1)).status()), "QUOTA");
  EXPECT_EQ(Ask(0, Spec(kMaxBuckets)).value()->channel(), 1u);
}

TEST_F(LayoutSetTest, OnlyARankThatBeginsAnAgreementNeedsAPlan) {
  EXPECT_TRUE(layouts_.NeedsPlan(0, Request(Spec(2), kForever)));
  ASSERT_TRUE(Ask(0, Spec(2)).ok());
  EXPECT_FALSE(layouts_.NeedsPlan(1, Request(Spec(2), kForever)));
  EXPECT_TRUE(layouts_.NeedsPlan(1, Request(Spec(2, "other"), kForever)));
  members_.Exit(1, /*now_ns=*/1);
  EXPECT_FALSE(layouts_.NeedsPlan(1, Request(Spec(2, "other"), kForever))) << "it has left";
}

// A plan of many parameters takes long to make, and others wait for the job's lock.
TEST_F(LayoutSetTest, APlanThatTheRequestBringsIsNotMadeAgain) {
  LayoutRequest request = Request(Spec(2), kForever);
  request.plan = PlanLayout(Spec(3), kMaxBuckets);
  const auto layout = layouts_.Register(0, std::move(request), &actions_);
  ASSERT_TRUE(layout.ok()) << layout.status();
  EXPECT_EQ((*layout)->plan().buckets.size(), 3u);
  EXPECT_EQ((*layout)->spec().parameters.size(), 2u);
  LayoutRequest refused = Request(Spec(2, "other"), kForever);
  refused.plan = PlanLayout(Spec(kMaxBuckets + 1), kMaxBuckets);
  EXPECT_EQ(ReasonOf(layouts_.Register(0, std::move(refused), &actions_).status()), "QUOTA");
}

// ---- Huge jobs

using HugeLayoutSetTest = JobFixture;

// DropReleased() comes after every message of the job. If each looked at all ranks, that would be
// more than 1e11 looks.
TEST_F(HugeLayoutSetTest, MessagesWhileRanksReleaseALayoutAreShort) {
  constexpr std::uint32_t kRanks = 65'536;
  constexpr int kMessages = 20;  // while one rank releases the layout
  const JobTerms terms;
  Membership members(kRanks);
  LayoutSet layouts(terms, &members, /*max_buckets_per_layout=*/1, {}, {}, {});
  const auto sink = std::make_shared<RecordingSink>();
  std::uint32_t channel = 0;
  DeferredActions actions;
  for (std::uint32_t rank = 0; rank < kRanks; ++rank) {
    members.Join(rank, Incarnation(rank), sink, "");
    const auto layout = layouts.Register(rank, Request(Spec(1)), &actions);
    ASSERT_TRUE(layout.ok()) << layout.status();
    channel = (*layout)->channel();
  }
  for (std::uint32_t rank = 0; rank < kRanks; ++rank) {
    ASSERT_TRUE(layouts.ArenaMapped(rank, channel, {}, &actions).ok());
  }
  for (std::uint32_t rank = 0; rank < kRanks; ++rank) {
    ASSERT_NE(layouts.Find(channel), nullptr);
    const absl::Status released = layouts.ReleaseLayout(rank, channel, /*now_ns=*/1, &actions);
    ASSERT_TRUE(released.ok()) << released;
    for (int i = 0; i < kMessages; ++i) layouts.DropReleased(&actions);
  }
  EXPECT_EQ(layouts.Find(channel), nullptr);
}

// ---- What a layout costs its user

class ChargedLayoutSetTest : public LayoutSetTest {
 protected:
  static constexpr Tenant kUser{1000};

  ChargedLayoutSetTest() {
    for (std::uint32_t rank = 0; rank < members_.world_size(); ++rank) {
      charged_members_.Join(rank, Incarnation(rank), sinks_[rank], "");
    }
  }
  absl::StatusOr<LayoutChannel*> Ask(std::uint32_t rank, const std::string& name,
                                     std::size_t name_bytes) {
    LayoutSpec spec;
    spec.name = name;
    spec.parameters = {{std::string(name_bytes, 'n'), {4}, DataType::kFloat32}};
    return charged_.Register(rank, Request(std::move(spec), kForever), &actions_);
  }

  ArenaQuota quota_{200'000, "quota_control_bytes_per_user", "memory"};
  const JobTerms charged_terms_{"job", kUser, 0, {}, {&quota_, kUser}};
  Membership charged_members_{3};
  LayoutSet charged_{charged_terms_, &charged_members_, kMaxBuckets, {}, {}, {}};
};

TEST_F(ChargedLayoutSetTest, NamesCount) {
  ASSERT_TRUE(Ask(0, "short", 10).ok());
  const std::uint64_t before = quota_.bytes_of(kUser);
  EXPECT_GT(before, 0u);
  ASSERT_TRUE(Ask(1, "short", 10).ok());
  EXPECT_EQ(quota_.bytes_of(kUser), before) << "the ranks share a layout";
  ASSERT_TRUE(Ask(0, "long", 10'000).ok());
  EXPECT_GT(quota_.bytes_of(kUser), 2 * before + 9'000);
}

TEST_F(ChargedLayoutSetTest, RefusalNamesTheOptionAndLeavesNothingBehind) {
  const auto refused = Ask(0, "huge", 200'000);
  EXPECT_EQ(refused.status().code(), absl::StatusCode::kResourceExhausted);
  EXPECT_EQ(ReasonOf(refused.status()), "QUOTA");
  EXPECT_NE(refused.status().message().find("quota_control_bytes_per_user"), std::string::npos);
  EXPECT_NE(refused.status().message().find("user 1000"), std::string::npos);
  EXPECT_EQ(quota_.bytes_of(kUser), 0u);
  EXPECT_TRUE(Ask(0, "small", 10).ok());
}

TEST_F(ChargedLayoutSetTest, RetiredLayoutCostsLittle) {
  ASSERT_TRUE(Ask(0, "model", 100'000).ok());
  charged_.Retire(&actions_);
  EXPECT_EQ(charged_.Find(1), nullptr);
  actions_ = {};  // an executor frees the layout
  EXPECT_LT(quota_.bytes_of(kUser), 5'000u);
  EXPECT_GT(quota_.bytes_of(kUser), 0u);
  ASSERT_EQ(charged_.Snapshot().size(), 1u);
  EXPECT_EQ(charged_.Snapshot()[0].name, "model");
  const auto timeline = charged_.Timeline("model", 1);
  ASSERT_TRUE(timeline.has_value()) << "the layout is known";
  EXPECT_TRUE(timeline->empty()) << "it had no step";
}

}  // namespace
}  // namespace gradsync::daemon
