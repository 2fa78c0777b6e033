// Child processes of a launcher, and everything a launcher waits for: their output, their ends,
// signals, other descriptors.

#ifndef CLIENT_EXAMPLES_CHILD_GROUP_H_
#define CLIENT_EXAMPLES_CHILD_GROUP_H_

#include <signal.h>
#include <sys/types.h>

#include <cstddef>
#include <deque>
#include <memory>
#include <string>
#include <vector>

#include "absl/status/status.h"
#include "absl/status/statusor.h"
#include "absl/time/time.h"

namespace gradsync::examples {

// The children end with the group: its destructor stops and reaps them, and if this process is
// killed, the kernel signals them. Each is in a process group of its own, so a terminal's Ctrl-C
// reaches the launcher alone, which ends them in order.
//
// While it lives, SIGCHLD, SIGINT, SIGTERM and SIGHUP are blocked in the thread that made it, and
// SIGPIPE is ignored. One per process; make it before other threads, so that they inherit the mask.
// Not thread-safe; used by the thread that made it (the kernel ties a child's death signal to the
// thread that forked).
class ChildGroup {
 public:
  using Id = std::size_t;

  struct Command {
    std::vector<std::string> arguments;    // the first is the program's path
    std::vector<std::string> environment;  // NAME=value, over this process's own
    int signal_if_orphaned = SIGKILL;
  };

  enum class EventKind {
    kOutput,    // a line of a child's standard output
    kError,     // a line of its standard error
    kExit,      // the child has ended and all its lines have been told
    kSignal,    // SIGINT, SIGTERM or SIGHUP came
    kReadable,  // a watched descriptor has something to read, or its end
    kDeadline,
  };

  struct Event {
    EventKind kind;
    Id child = 0;         // kOutput, kError, kExit
    std::string line;     // kOutput, kError; without its newline
    int wait_status = 0;  // kExit: as of waitpid(2)
    int number = 0;       // kSignal: the signal; kReadable: the descriptor
  };

  static absl::StatusOr<std::unique_ptr<ChildGroup>> Create();
  ~ChildGroup();  // Stop()
  ChildGroup(const ChildGroup&) = delete;
  ChildGroup& operator=(const ChildGroup&) = delete;

  // UNAVAILABLE: the program cannot be run, and why.
  absl::StatusOr<Id> Start(const Command& command);
  pid_t pid(Id child) const { return children_[child].pid; }
  bool running(Id child) const { return children_[child].running; }

  // Waits for whatever comes next. kDeadline once `deadline` has passed and nothing else is there.
  absl::StatusOr<Event> Next(absl::Time deadline);
  // Also reports kReadable, each time Next() finds `descriptor` readable, until Unwatch().
  void Watch(int descriptor);
  void Unwatch(int descriptor);

  // Closes the child's standard input.
  void CloseInput(Id child);
  void Kill(Id child, int signal);
  // SIGTERM to every child, SIGKILL to those that still run after `grace`; returns when all are
  // reaped. Output is discarded.
  void Stop(absl::Duration grace = absl::Seconds(5));

 private:
  struct Stream {
    int descriptor = -1;
    std::string unfinished;  // a line that has no newline yet
  };
  struct Child {
    pid_t pid = 0;
    bool running = false;
    int input = -1;
    Stream output;
    Stream error;
  };

  explicit ChildGroup(int signals, const sigset_t& former_mask);

  void Read(Id id, EventKind kind);
  void Reap();
  void ReadSignals();

  const int signals_;  // a signalfd
  const sigset_t former_mask_;
  std::vector<Child> children_;
  std::vector<int> watched_;
  std::deque<Event> events_;
};

// "exited with code 1", "was killed by signal 9 (Killed)".
std::string DescribeExit(int wait_status);

}  // namespace gradsync::examples

#endif  // CLIENT_EXAMPLES_CHILD_GROUP_H_
