// Limits the memory of the jobs that the nodes of one address join.

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

// A node says whose job it joins, and that user is charged. So a stranger could have as much as all
// users together. An address counts each job once, whatever nodes of it join the job.
// Thread-safe. Its results may outlive it.
class AddressJobs {
 public:
  // Three jobs of the most ranks, or some 350 of a few.
  static constexpr std::uint64_t kMostBytes = std::uint64_t{128} << 20;

  // Counts `bytes` for the job, until the result is destroyed. RESOURCE_EXHAUSTED QUOTA: the
  // address would have more than kMostBytes.
  absl::StatusOr<std::shared_ptr<void>> Add(const std::string& address, const JobKey& key,
                                            std::uint64_t bytes);
  // What an address has.
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
