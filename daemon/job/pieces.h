// Work that a job gives to the executor in pieces. In one piece it would keep other users waiting.

#ifndef DAEMON_JOB_PIECES_H_
#define DAEMON_JOB_PIECES_H_

#include <cstddef>
#include <cstdint>
#include <functional>
#include <utility>
#include <vector>

#include "daemon/job/deferred_actions.h"

namespace gradsync::daemon {

// Collects pieces of work, of a millisecond or less each, and hands them to the executor. Other
// users have their turns between two pieces. When the last piece has run, calls `done` on that
// thread. Call order: (Add | AddCopy)* Begin. Thread-compatible.
class Pieces {
 public:
  // Bytes that one piece copies.
  static constexpr std::uint64_t kCopyBytes = std::uint64_t{4} << 20;

  // `done`, and what it holds, lives until every piece has run.
  explicit Pieces(std::function<void()> done) : done_(std::move(done)) {}

  void Add(std::function<void()> piece) { pieces_.push_back(std::move(piece)); }
  // The caller keeps the memory mapped until `done`; references that `done` holds do that.
  void AddCopy(std::byte* to, const std::byte* from, std::uint64_t bytes);
  // The last call. Without any piece the executor only calls `done`.
  void Begin(DeferredActions* actions);

 private:
  std::function<void()> done_;
  std::vector<std::function<void()>> pieces_;
};

}  // namespace gradsync::daemon

#endif  // DAEMON_JOB_PIECES_H_
