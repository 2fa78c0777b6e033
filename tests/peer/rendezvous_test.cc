#include "daemon/peer/rendezvous.h"

#include <string>
#include <thread>
#include <vector>

#include "gtest/gtest.h"

namespace gradsync::daemon {
namespace {

TEST(RendezvousTest, GetWaitsForSet) {
  Rendezvous store;
  std::string found;
  std::thread getter([&] { found = store.Get("key", absl::Minutes(1)).value_or("none"); });
  ASSERT_TRUE(store.Set("key", "value").ok());
  getter.join();
  EXPECT_EQ(found, "value");
  EXPECT_FALSE(store.Set("key", "again").ok());
}

TEST(RendezvousTest, AgentAsksAndGetsTheAnswer) {
  std::vector<std::string> said;
  Rendezvous* agent = nullptr;
  Rendezvous store(
      [&](const std::string& key, const std::string& value) { said.push_back(key + "=" + value); },
      [&](const std::string& key) {
        said.push_back(key + "?");
        EXPECT_TRUE(agent->Put(key, "there").ok());
      });
  agent = &store;
  ASSERT_TRUE(store.Set("mine", "1").ok());
  EXPECT_EQ(store.Get("theirs", absl::Minutes(1)).value_or("none"), "there");
  EXPECT_EQ(store.Get("theirs", absl::Minutes(1)).value_or("none"), "there");
  EXPECT_EQ(said, (std::vector<std::string>{"mine=1", "theirs?"}));
}

TEST(RendezvousTest, CancelEndsGet) {
  Rendezvous own;
  Rendezvous agents([](const std::string&, const std::string&) {}, [](const std::string&) {});
  for (Rendezvous* store : {&own, &agents}) {
    absl::Status end;
    std::thread getter([&] { end = store->Get("key", absl::Minutes(1)).status(); });
    store->Cancel(absl::UnavailableError("a node is lost"));
    getter.join();
    EXPECT_EQ(end.message(), "a node is lost");
  }
}

TEST(RendezvousTest, GetTimesOut) {
  Rendezvous store;
  EXPECT_EQ(store.Get("key", absl::Milliseconds(1)).status().code(),
            absl::StatusCode::kDeadlineExceeded);
}

// An engine process has Get() called with short timeouts, so the same key is asked for often.
TEST(RendezvousTest, AsksForEachKeyOnce) {
  int asked = 0;
  Rendezvous store([](const std::string&, const std::string&) {},
                   [&](const std::string&) { ++asked; });
  for (int i = 0; i < 5; ++i) EXPECT_FALSE(store.Get("key", absl::Milliseconds(1)).ok());
  EXPECT_EQ(asked, 1);
  ASSERT_TRUE(store.Put("key", "late").ok());
  EXPECT_EQ(store.Get("key", absl::ZeroDuration()).value_or("none"), "late");
}

TEST(RendezvousTest, CancelDropsPendingCallbacksOfWhen) {
  Rendezvous store;
  ASSERT_TRUE(store.When("key", [](const std::string&) { FAIL(); }).ok());
  store.Cancel(absl::UnavailableError("a node is lost"));
  EXPECT_TRUE(store.Put("key", "late").ok());
  // No error: the node that asks may not know of the cancellation yet.
  EXPECT_TRUE(store.When("other", [](const std::string&) { FAIL(); }).ok());
}

TEST(RendezvousTest, LimitsKeysAndValues) {
  Rendezvous store;
  EXPECT_FALSE(store.Put("", "x").ok());
  EXPECT_FALSE(store.Put(std::string(129, 'k'), "x").ok());
  EXPECT_FALSE(store.Put("k", std::string(Rendezvous::kMaxValueBytes + 1, 'v')).ok());
  EXPECT_FALSE(store.When(std::string(129, 'k'), [](const std::string&) {}).ok());
  for (std::size_t i = 0; i < Rendezvous::kMaxKeys; ++i) {
    ASSERT_TRUE(store.Put("key" + std::to_string(i), "x").ok());
  }
  EXPECT_FALSE(store.Put("one more", "x").ok());
}

TEST(RendezvousTest, LimitsKeysThatAreAwaited) {
  Rendezvous store;
  int answered = 0;
  const auto answer = [&](const std::string&) { ++answered; };
  for (std::size_t i = 0; i < Rendezvous::kMaxKeys; ++i) {
    ASSERT_TRUE(store.When("key", answer).ok());
  }
  EXPECT_FALSE(store.When("another", answer).ok());
  EXPECT_TRUE(store.Put("key", "x").ok());
  EXPECT_EQ(answered, static_cast<int>(Rendezvous::kMaxKeys));
  EXPECT_TRUE(store.When("another", answer).ok());
}

}  // namespace
}  // namespace gradsync::daemon
