// Starts daemons and the trainers of a job, hears their reports, and says who failed. What
// digits_quickstart is made of.

#ifndef CLIENT_EXAMPLES_LAUNCHER_H_
#define CLIENT_EXAMPLES_LAUNCHER_H_

#include <cstdint>
#include <deque>
#include <functional>
#include <memory>
#include <optional>
#include <string>
#include <vector>

#include "absl/status/status.h"
#include "absl/status/statusor.h"
#include "absl/time/time.h"
#include "client/examples/child_group.h"
#include "client/examples/ready_socket.h"
#include "client/examples/report.h"
#include "client/examples/run_directory.h"
#include "tools/virtual_network/virtual_network.h"

namespace gradsync::examples {

struct Programs {
  std::string daemon;   // gradsyncd
  std::string trainer;  // digits_trainer
  std::string data;     // digits.csv.gz
};

// What one trainer has told so far.
struct RankReport {
  JoinedReport joined;
  std::vector<StepTrace> traces;
  std::optional<FinishedReport> finished;
};

struct JobOptions {
  std::string name;
  std::uint64_t ranks_per_node = 1;
  std::string coordinator;         // of several nodes: "host:port" of node 0's daemon
  std::vector<std::string> flags;  // of every trainer
};

// One job's trainers. They stay in their sessions once they have finished, until
// Launcher::Release().
struct Job {
  std::vector<ChildGroup::Id> children;  // by rank
  std::vector<RankReport> ranks;
};

// The destructor ends every process it started and removes their directory. Every method that waits
// returns CANCELLED if SIGINT, SIGTERM or SIGHUP came (interrupted_by() says which), and
// UNAVAILABLE if a process died, naming it and what it and the others said. Not thread-safe; make
// it before any thread (ChildGroup).
class Launcher {
 public:
  // Several nodes are on a virtual network.
  static absl::StatusOr<std::unique_ptr<Launcher>> Create(const Programs& programs,
                                                          std::uint64_t nodes);
  Launcher(const Launcher&) = delete;
  Launcher& operator=(const Launcher&) = delete;

  // Null for one node.
  const VirtualNetwork* network() const { return network_.get(); }

  // One on each node; returns when they say that they are ready.
  absl::Status StartDaemons();
  std::string socket(std::uint64_t node) const;
  pid_t pid(ChildGroup::Id child) const { return group_->pid(child); }
  ChildGroup::Id daemon(std::uint64_t node) const { return daemons_[node]; }

  // Starts the trainers, node after node; rank 0 saves its parameters in the directory's file of
  // the job's name.
  absl::StatusOr<Job> StartJob(const JobOptions& options);
  // Until every trainer has finished. `progress` hears rank 0.
  absl::Status AwaitFinished(Job* job, const std::function<void(const ProgressReport&)>& progress);
  // Lets the trainers leave; returns when they have exited.
  absl::Status Release(Job* job);

  // Runs trainers without gradsync, side by side, each with its own flags, to their end.
  absl::Status RunReferences(const std::vector<std::vector<std::string>>& flags);

  // The parameters in a file of the directory.
  absl::StatusOr<std::vector<float>> ReadParameters(const std::string& name) const;
  std::string File(const std::string& name) const { return directory_->File(name); }

  // Until a line or the end of standard input, or a signal; none of them is an error here.
  absl::Status AwaitEnter();

  // 0 or the signal's number.
  int interrupted_by() const { return interrupted_by_; }

 private:
  struct Child {
    std::string name;
    std::deque<std::string> said;  // the last lines of its log or error output
    bool ended = false;
    int wait_status = 0;
    bool may_end = false;
  };

  Launcher(const Programs& programs, std::uint64_t nodes, std::unique_ptr<VirtualNetwork> network,
           std::unique_ptr<ChildGroup> group, std::unique_ptr<RunDirectory> directory);

  absl::StatusOr<ChildGroup::Id> Start(const std::string& name, const ChildGroup::Command& command,
                                       bool may_end);
  absl::Status StartDaemon(std::uint64_t node);
  bool IsDaemon(ChildGroup::Id id) const;
  // `program` on the node.
  ChildGroup::Command CommandOn(std::uint64_t node, const std::string& program) const;
  // Handles what comes until `done`. `hear` gets every event.
  absl::Status PumpUntil(const std::function<bool()>& done, absl::Time deadline,
                         const std::function<absl::Status(const ChildGroup::Event&)>& hear);
  void Remember(const ChildGroup::Event& event);
  absl::Status Explain(ChildGroup::Id first);
  std::string Describe(ChildGroup::Id id) const;

  const Programs programs_;
  const std::uint64_t nodes_;
  // In this order: processes end before their network and their directory go.
  const std::unique_ptr<VirtualNetwork> network_;
  const std::unique_ptr<RunDirectory> directory_;
  std::unique_ptr<ReadySocket> ready_socket_;
  const std::unique_ptr<ChildGroup> group_;
  std::vector<Child> children_;          // by ChildGroup::Id
  std::vector<ChildGroup::Id> daemons_;  // by node, as far as they are started
  int interrupted_by_ = 0;
};

}  // namespace gradsync::examples

#endif  // CLIENT_EXAMPLES_LAUNCHER_H_
