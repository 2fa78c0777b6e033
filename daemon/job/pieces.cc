#include "daemon/job/pieces.h"

#include <algorithm>
#include <atomic>
#include <cstring>
#include <memory>
#include <utility>

namespace gradsync::daemon {

void Pieces::AddCopy(std::byte* to, const std::byte* from, std::uint64_t bytes) {
  for (std::uint64_t at = 0; at < bytes; at += kCopyBytes) {
    Add([to = to + at, from = from + at, size = std::min(kCopyBytes, bytes - at)] {
      std::memcpy(to, from, size);
    });
  }
}

void Pieces::Begin(DeferredActions* actions) {
  if (pieces_.empty()) Add([] {});
  struct Work {
    std::atomic<std::size_t> left;
    std::function<void()> done;
    std::vector<std::function<void()>> pieces;
  };
  const auto work = std::make_shared<Work>();
  work->left = pieces_.size();
  work->done = std::move(done_);
  work->pieces = std::move(pieces_);
  for (std::size_t i = 0; i < work->pieces.size(); ++i) {
    actions->work.push_back([work, i] {
      work->pieces[i]();
      // The last one sees what the others have written.
      if (work->left.fetch_sub(1, std::memory_order_acq_rel) == 1) work->done();
    });
  }
}

}  // namespace gradsync::daemon
