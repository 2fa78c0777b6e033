#include "daemon/worker/store_desk.h"

#include <gtest/gtest.h>

#include <cstddef>
#include <string>

#include "absl/time/time.h"
#include "daemon/engine/rendezvous_store.h"
#include "daemon/worker/worker.pb.h"
#include "tests/engine/memory_store.h"

namespace gradsync::daemon {
namespace {

class StoreDeskTest : public testing::Test {
 protected:
  // Whether the desk has refused a key so far.
  bool RefusedAfter(const std::string& key) {
    worker::EngineEvent event;
    event.set_get(key);
    EXPECT_TRUE(desk_.Take(event).ok());
    return desk_.refused();
  }

  MemoryStore store_;
  StoreDesk desk_{&store_};
};

TEST_F(StoreDeskTest, RefusesAKeyThatIsAskedForTwice) {
  EXPECT_FALSE(RefusedAfter("key"));
  EXPECT_TRUE(RefusedAfter("key"));
}

TEST_F(StoreDeskTest, RefusesAKeyThatHasBeenAnswered) {
  ASSERT_TRUE(store_.Set("key", "value").ok());
  EXPECT_FALSE(RefusedAfter("key"));
  std::string given;
  ASSERT_TRUE(desk_
                  .Look(absl::ZeroDuration(),
                        [&](const std::string&, const std::string& value) { given = value; })
                  .ok());
  EXPECT_EQ(given, "value");
  EXPECT_TRUE(RefusedAfter("key"));
  EXPECT_FALSE(desk_.busy()) << "it would be answered again";
}

TEST_F(StoreDeskTest, RefusesMoreKeysThanAnEngineHasNodes) {
  for (std::size_t i = 0; i < RendezvousStore::kMaxKeys; ++i) {
    ASSERT_FALSE(RefusedAfter(std::to_string(i))) << i;
  }
  EXPECT_TRUE(RefusedAfter("one more"));
}

TEST_F(StoreDeskTest, RefusesALongKey) {
  EXPECT_FALSE(RefusedAfter(std::string(RendezvousStore::kMaxKeyBytes, 'k')));
  EXPECT_TRUE(RefusedAfter(std::string(RendezvousStore::kMaxKeyBytes + 1, 'k')));
}

}  // namespace
}  // namespace gradsync::daemon
