#include "daemon/rpc/stream_count.h"

#include <chrono>
#include <memory>
#include <optional>
#include <thread>

#include "gtest/gtest.h"

namespace gradsync::daemon {
namespace {

std::chrono::steady_clock::time_point Soon() {
  return std::chrono::steady_clock::now() + std::chrono::seconds(60);
}

TEST(StreamCountTest, WaitsForTheLastStream) {
  StreamCount streams;
  EXPECT_TRUE(streams.WaitForNone(Soon())) << "there has been none";
  auto first = streams.Add();
  auto second = streams.Add();
  EXPECT_EQ(streams.Get(), 2u);
  first.reset();
  EXPECT_FALSE(streams.WaitForNone(std::chrono::steady_clock::now()));
  std::thread ends([&second] { second.reset(); });
  EXPECT_TRUE(streams.WaitForNone(Soon()));
  EXPECT_EQ(streams.Get(), 0u);
  ends.join();
}

TEST(StreamCountTest, StreamMayOutliveIt) {
  std::optional<StreamCount> streams(std::in_place);
  auto stream = streams->Add();
  streams.reset();
  stream.reset();
}

}  // namespace
}  // namespace gradsync::daemon
