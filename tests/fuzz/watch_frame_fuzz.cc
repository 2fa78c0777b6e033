// Bytes of another node's watch: a frame that is accepted is encoded to the bytes that came.

#include "daemon/engine/watch_frame.h"

#include <cstdint>
#include <string>

#include "tests/fuzz/check.h"

using gradsync::daemon::DecodeWatchFrame;
using gradsync::daemon::EncodeWatchFrame;
using gradsync::daemon::WatchFrame;

extern "C" int LLVMFuzzerTestOneInput(const std::uint8_t* data, std::size_t size) {
  if (size == 0) return 0;
  const std::size_t lanes = data[0] % 8;
  absl::string_view rest(reinterpret_cast<const char*>(data) + 1, size - 1);
  while (true) {
    WatchFrame frame;
    const absl::string_view before = rest;
    const auto taken = DecodeWatchFrame(&rest, lanes, &frame);
    if (!taken.ok() || !*taken) {
      FUZZ_CHECK(taken.ok() || before.size() >= 4);
      return 0;
    }
    const std::size_t used = before.size() - rest.size();
    FUZZ_CHECK(used > 0 && used <= gradsync::daemon::kMaxWatchFrameBytes + 8);
    if (frame.kind == WatchFrame::Kind::kFailed) {
      FUZZ_CHECK(!frame.failure.ok());
    } else {
      FUZZ_CHECK(frame.begun.size() == lanes);
      FUZZ_CHECK(EncodeWatchFrame(frame) == before.substr(0, used));
    }
  }
}
