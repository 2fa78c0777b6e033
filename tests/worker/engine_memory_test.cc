#include "daemon/worker/engine_memory.h"

#include <gtest/gtest.h>

#include <cstdint>

#include "daemon/config/options.h"
#include "daemon/engine/engine_settings.h"
#include "daemon/engine/lane_memory.h"

namespace gradsync::daemon {
namespace {

TEST(EngineBytes, CountsTheSharedMemoryAndTheProcess) {
  EngineSettings settings;
  settings.lanes = 3;
  const std::uint64_t shared = EngineMemory::Bytes(3, LaneBytes(settings.chunk_bytes, 5));
  const std::uint64_t process = EngineBytes(settings, 5) - shared;
  EXPECT_GE(process, std::uint64_t{1} << 20);
  settings.lanes = 4;
  EXPECT_EQ(EngineBytes(settings, 5),
            EngineMemory::Bytes(4, LaneBytes(settings.chunk_bytes, 5)) + process);
}

// --help says how many.
TEST(EngineBytes, TheDefaultQuotaIsEnoughForAsManyJobsAsAUserMayHave) {
  const Options options;
  const std::uint64_t engines =
      options.quota_engine_bytes_per_user / EngineBytes(EngineSettings(), 2);
  EXPECT_EQ(engines, 146u);
  EXPECT_GE(engines, 2 * options.quota_jobs_per_user) << "an engine may start as another ends";
}

}  // namespace
}  // namespace gradsync::daemon
