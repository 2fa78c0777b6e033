// Limits the memory of the jobs that the nodes of one IPv4 address, or of one IPv6 network, join.

#ifndef DAEMON_PEER_ADDRESS_JOBS_H_
#define DAEMON_PEER_ADDRESS_JOBS_H_

#include <cstddef>
#include <cstdint>
#include <map>
#include <memory>
#include <string>

#include "absl/status/statusor.h"
#include "daemon/base/mutex.h"
#include "daemon/job/job_key.h"

namespace gradsync::daemon {

// A node itself says whose job it joins, and that user is charged. Without this limit, a stranger
// could use up the quotas of all users. Each address counts a job once, however many of its nodes
// join the job. So a network with many nodes needs no more than one node does. Thread-safe. Its
// results may outlive it.
class AddressJobs {
 public:
  // Enough for three jobs of the largest world size, or for some 400 jobs of a few ranks.
  static constexpr std::uint64_t kMostBytes = std::uint64_t{128} << 20;

  // Counts `bytes` for the job, until the result is destroyed. `address`: as NetworkText() writes
  // it (caller.h). RESOURCE_EXHAUSTED QUOTA: the address would have more than kMostBytes.
  absl::StatusOr<std::shared_ptr<void>> Add(const std::string& address, const JobKey& key,
                                            std::uint64_t bytes);
  // The bytes that an address has.
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
    // Only addresses that have a job.
    std::map<std::string, Address> addresses ABSL_GUARDED_BY(mutex);
  };
  const std::shared_ptr<State> state_ = std::make_shared<State>();
};

}  // namespace gradsync::daemon

#endif  // DAEMON_PEER_ADDRESS_JOBS_H_
