// Starts a daemon and the trainers of a job, hears their reports, and says who failed. What
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
  static absl::StatusOr<std::unique_ptr<Launcher>> Create(const Programs& programs);
  Launcher(const Launcher&) = delete;
  Launcher& operator=(const Launcher&) = delete;

  // Returns when the daemon says that it is ready.
  absl::Status StartDaemon();
  std::string socket() const { return directory_->File("gradsyncd.sock"); }
  std::string directory() const { return directory_->path(); }
  pid_t pid(ChildGroup::Id child) const { return group_->pid(child); }
  ChildGroup::Id daemon() const { return daemon_; }

  // Starts `ranks` trainers of the job `name`, with further flags; rank 0 saves its parameters in
  // the directory's file `name`.
  absl::StatusOr<Job> StartJob(const std::string& name, std::uint64_t ranks,
                               const std::vector<std::string>& flags);
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

  Launcher(const Programs& programs, std::unique_ptr<ChildGroup> group,
           std::unique_ptr<RunDirectory> directory);

  absl::StatusOr<ChildGroup::Id> Start(const std::string& name, const ChildGroup::Command& command,
                                       bool may_end);
  // Handles what comes until `done`. `hear` gets every event.
  absl::Status PumpUntil(const std::function<bool()>& done, absl::Time deadline,
                         const std::function<absl::Status(const ChildGroup::Event&)>& hear);
  void Remember(const ChildGroup::Event& event);
  absl::Status Explain(ChildGroup::Id first);
  std::string Describe(ChildGroup::Id id) const;

  const Programs programs_;
  // In this order: processes end before their directory goes.
  const std::unique_ptr<RunDirectory> directory_;
  std::unique_ptr<ReadySocket> ready_socket_;
  const std::unique_ptr<ChildGroup> group_;
  std::vector<Child> children_;                              // by ChildGroup::Id
  ChildGroup::Id daemon_ = static_cast<ChildGroup::Id>(-1);  // not started
  int interrupted_by_ = 0;
};

}  // namespace gradsync::examples

#endif  // CLIENT_EXAMPLES_LAUNCHER_H_
