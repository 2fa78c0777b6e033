// Checks whether all ranks have the same state of the model.

#ifndef CLIENT_SRC_SYNC_CHECK_H_
#define CLIENT_SRC_SYNC_CHECK_H_

#include <cstdint>
#include <string>
#include <vector>

#include "absl/status/status.h"
#include "absl/strings/string_view.h"
#include "absl/time/time.h"
#include "absl/types/span.h"
#include "client/include/gradsync/client.h"

namespace gradsync::client {

class Connection;

// Session::CheckInSync. Hashes the items on the caller's thread. Three operations of the job's
// channel follow: they bring the length of the lowest rank's list, that list, and one number from
// each rank.
//
// An object is one check; thread-compatible. `connection` and the items' memory outlive it.
class SyncCheck {
 public:
  explicit SyncCheck(Connection* connection) : connection_(*connection) {}

  // Statuses: those of Session::CheckInSync.
  absl::Status Run(absl::Span<const StateItem> items, absl::Duration timeout);

  // The names of items and their digests, as one rank sends them to the others.
  static std::string ListOf(absl::Span<const StateItem> items,
                            const std::vector<std::string>& digests);
  // The number of one rank: kSame, or kDiffers + the index of the first item in which its list
  // differs from the root's. 0: the rank takes no part.
  static constexpr std::int64_t kSame = 1;
  static constexpr std::int64_t kDiffers = 2;
  static std::int64_t Compare(absl::string_view root, absl::string_view mine);
  // RANKS_DIVERGED if some rank's number in `said` says that it differs, else OK. `said`: by rank.
  // `root`: the root's list.
  static absl::Status Verdict(const std::vector<std::int64_t>& said, absl::string_view root,
                              const std::string& job);

 private:
  // CANCELLED if the call was interrupted.
  absl::Status Hash(absl::Span<const StateItem> items, std::vector<std::string>* digests);

  Connection& connection_;
};

}  // namespace gradsync::client

#endif  // CLIENT_SRC_SYNC_CHECK_H_
