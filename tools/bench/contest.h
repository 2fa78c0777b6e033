// Implementations side by side: in each iteration everyone takes one turn, in rotating order, while
// the others sleep. On a shared machine whose memory is fast one second and slow the next, only
// turns of the same iteration can be compared.

#ifndef TOOLS_BENCH_CONTEST_H_
#define TOOLS_BENCH_CONTEST_H_

#include <cstdint>
#include <functional>
#include <memory>
#include <string>
#include <string_view>
#include <vector>

#include "absl/status/status.h"
#include "absl/status/statusor.h"
#include "tools/bench/child_process.h"
#include "tools/bench/contender.h"
#include "tools/bench/implementation.h"
#include "tools/bench/shared_region.h"
#include "tools/bench/temporary_directory.h"
#include "tools/virtual_network/virtual_network.h"

namespace gradsync::bench {

struct ContestOptions {
  std::vector<Implementation> implementations;
  std::uint32_t ranks = 2;  // of each node
  // Of the nodes; null: this machine is the only one. Outlives the contest.
  const VirtualNetwork* network = nullptr;
  DataType dtype = DataType::kFloat32;
  bool busy = false;          // a computing thread beside each rank during its turn
  std::uint32_t threads = 1;  // of the roofline and of each gradsyncd's reducer
  std::string daemon;         // gradsyncd's path
  // As of Options.
  std::uint32_t gpus = 0;
  std::string cuda_library;
  std::string nccl_library;
};

// The turns of one implementation, one per iteration after the warm-up.
struct Score {
  Implementation implementation = Implementation::kRoofline;
  std::vector<Turn> turns;
  std::uint64_t wrong = 0;  // elements, warm-up included
};

// Owns every process and file of a bench; its destructor leaves nothing behind. Main thread only.
class Contest {
 public:
  // Starts the daemon and every rank.
  static absl::StatusOr<std::unique_ptr<Contest>> Start(const ContestOptions& options);

  // One size. Every element is checked in the first and in the last iteration, a sample in between.
  // `progress` is called after each iteration with the number done, warm-up included. Scores are in
  // the order of ContestOptions::implementations. Statuses are those of RankTeam::Do().
  absl::StatusOr<std::vector<Score>> Run(std::uint64_t bytes, std::uint64_t warmup,
                                         std::uint64_t iterations,
                                         const std::function<void(std::uint64_t)>& progress);

 private:
  Contest() = default;

  absl::Status StartContender(const ContestOptions& options, Implementation implementation);
  absl::Status StartDaemons(const ContestOptions& options);
  absl::Status Iterate(std::uint64_t iteration, bool warm, bool check_all,
                       std::vector<Score>* scores);

  // An error of gradsync's ranks may have its reason in a daemon.
  absl::Status WithDaemonLogs(const absl::Status& status, Implementation implementation) const;

  // In order of construction: ranks end before the daemon, and the daemon before its files go.
  TemporaryDirectory directory_;
  SharedRegion control_;
  std::vector<ChildProcess> daemons_;  // by node
  std::vector<std::unique_ptr<Contender>> contenders_;
};

}  // namespace gradsync::bench

#endif  // TOOLS_BENCH_CONTEST_H_
