// Limits the memory of the jobs that the nodes of one address, or of one IPv6 network, join.

#ifndef DAEMON_PEER_ADDRESS_JOBS_H_
#define DAEMON_PEER_ADDRESS_JOBS_H_

#include <cstddef>
#include <cstdint>
#include <map>
#include <memory>
#include <string>

#include "absl/status/status.h"
#include "absl/status/statusor.h"
#include "daemon/base/mutex.h"
#include "daemon/job/job_key.h"

namespace gradsync::daemon {

// A node itself says whose job it joins, and that user is charged. Without this limit, a stranger
// could use up the quotas of all users. An address and its network each count a job once, however
// many of their nodes join the job. So a network whose nodes share their jobs needs no more than
// one node does. One address leaves room for the others of its network. Thread-safe. Its results
// may outlive it.
class AddressJobs {
 public:
  // Enough for three jobs of the largest world size, or for some 400 jobs of a few ranks.
  static constexpr std::uint64_t kMostBytes = std::uint64_t{128} << 20;
  static constexpr std::uint64_t kMostBytesOfNetwork = 4 * kMostBytes;

  // Counts `bytes` for the job, until the result is destroyed. `network`: of the address, as
  // NetworkText() writes it (caller.h); an IPv4 address is its own. RESOURCE_EXHAUSTED QUOTA: the
  // address would have more than kMostBytes, or the network more than kMostBytesOfNetwork. Then
  // neither counts anything.
  absl::StatusOr<std::shared_ptr<void>> Add(const std::string& address, const std::string& network,
                                            const JobKey& key, std::uint64_t bytes);
  // The bytes that an address or a network has.
  std::uint64_t BytesOf(const std::string& address) const;

 private:
  struct Entry {
    std::uint64_t bytes = 0;  // the most that one of its holders has asked for
    std::size_t holders = 0;
  };
  struct Address {
    std::map<JobKey, Entry> jobs;
    std::uint64_t bytes = 0;  // of all of them
  };
  struct State {
    Mutex mutex;
    // Addresses and networks; only those that have a job.
    std::map<std::string, Address> addresses ABSL_GUARDED_BY(mutex);

    absl::Status CheckLocked(const std::string& address, const JobKey& key, std::uint64_t bytes,
                             std::uint64_t most) const ABSL_EXCLUSIVE_LOCKS_REQUIRED(mutex);
    void AddLocked(const std::string& address, const JobKey& key, std::uint64_t bytes)
        ABSL_EXCLUSIVE_LOCKS_REQUIRED(mutex);
    void RemoveLocked(const std::string& address, const JobKey& key)
        ABSL_EXCLUSIVE_LOCKS_REQUIRED(mutex);
  };
  const std::shared_ptr<State> state_ = std::make_shared<State>();
};

}  // namespace gradsync::daemon

#endif  // DAEMON_PEER_ADDRESS_JOBS_H_
