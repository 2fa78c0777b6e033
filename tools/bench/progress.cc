#include "tools/bench/progress.h"

#include <unistd.h>

#include <cinttypes>
#include <cstdio>
#include <utility>

namespace gradsync::bench {

Progress::Progress(std::string what, std::uint64_t total)
    : what_(std::move(what)), total_(total), terminal_(isatty(STDERR_FILENO) == 1) {
  if (!terminal_) std::fprintf(stderr, "%s: %" PRIu64 " iterations\n", what_.c_str(), total_);
}

Progress::~Progress() {
  if (terminal_) std::fprintf(stderr, "\r\033[K");
}

void Progress::Done(std::uint64_t iterations) {
  if (!terminal_) return;
  std::fprintf(stderr, "\r%s: %" PRIu64 " of %" PRIu64, what_.c_str(), iterations, total_);
}

}  // namespace gradsync::bench
