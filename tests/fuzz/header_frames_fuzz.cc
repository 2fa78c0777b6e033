// Frames of an HTTP/2 connection, from a trainer or from a coordinator: it does not matter in which
// pieces they come, and headers stay within their limits.

#include "daemon/base/header_frames.h"

#include <algorithm>
#include <cstddef>
#include <cstdint>
#include <string>

#include "tests/fuzz/check.h"

using gradsync::daemon::HeaderFrames;

extern "C" int LLVMFuzzerTestOneInput(const std::uint8_t* data, std::size_t size) {
  if (size == 0) return 0;
  const std::size_t piece = data[0] % 64 + 1;
  const std::uint32_t kind = data[0] / 64;
  const bool of_server = kind == 3;
  std::string bytes = of_server ? "" : "PRI * HTTP/2.0\r\n\r\nSM\r\n\r\n";
  bytes.append(reinterpret_cast<const char*>(data) + 1, size - 1);
  const HeaderFrames none = of_server ? HeaderFrames::OfServer(2) : HeaderFrames(kind);
  HeaderFrames at_once = none;
  const bool fine = at_once.Take(bytes.data(), bytes.size());
  HeaderFrames in_pieces = none;
  bool fine_in_pieces = true;
  for (std::size_t at = 0; fine_in_pieces && at < bytes.size(); at += piece) {
    fine_in_pieces = in_pieces.Take(bytes.data() + at, std::min(piece, bytes.size() - at));
    if (fine_in_pieces) FUZZ_CHECK(in_pieces.unfinished() <= HeaderFrames::kMostBytes);
  }
  FUZZ_CHECK(fine == fine_in_pieces);
  if (fine) FUZZ_CHECK(at_once.unfinished() == in_pieces.unfinished());
  return 0;
}
