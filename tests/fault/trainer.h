// A rank of a job as a separate process that executes commands.

#ifndef TESTS_FAULT_TRAINER_H_
#define TESTS_FAULT_TRAINER_H_

#include <cstdint>
#include <map>
#include <memory>
#include <string>
#include <vector>

#include "tests/kit/child_process.h"
#include "tests/kit/test_daemon.h"

namespace gradsync::fault {

// The result of one command.
struct Reply {
  std::string code = "NONE";  // a name of absl::StatusCode or the trainer's own; NONE: no answer
  std::string reason;
  std::string message;
  std::map<std::string, std::string> fields;
  // Times around the call, taken inside the trainer. CLOCK_MONOTONIC nanoseconds.
  std::uint64_t start_ns = 0;
  std::uint64_t end_ns = 0;

  bool ok() const { return code == "OK"; }
  std::string Field(const std::string& name) const;
};
std::ostream& operator<<(std::ostream& out, const Reply& reply);

// A process that runs scripted_trainer.cc. Not thread-safe. The destructor ends the process.
class Trainer {
 public:
  // Starts the process but does not join. `options` is added to every join ("divisor=world").
  Trainer(const TestDaemon& daemon, std::uint32_t rank, std::uint32_t world_size,
          const std::string& job = "job", const std::string& options = "");
  // For a socket that is not a TestDaemon's.
  Trainer(const std::string& socket, std::uint32_t rank, std::uint32_t world_size,
          const std::string& job, const std::string& options,
          const std::vector<std::string>& command_prefix = {});

  // Runs one command (see scripted_trainer.cc) and waits for its result.
  Reply Do(const std::string& command);
  // The two halves of Do().
  void Send(const std::string& command);
  Reply Receive();
  // Runs the command on a thread of the trainer; Result() waits for it.
  void Begin(const std::string& command);
  Reply Result() { return Do("result"); }

  Reply Join() { return Do(join_); }
  const std::string& join() const { return join_; }

  pid_t pid() const { return process_->pid(); }
  bool running() const { return process_->running(); }
  void Signal(int number) const { process_->Signal(number); }
  // Returns the time just before SIGKILL.
  std::uint64_t Kill() { return process_->Kill(); }
  // Makes the process exit. Returns its exit code, or -1.
  int Quit();
  // Makes forked children exit.
  void ReleaseChildren() { lifeline_.Close(); }

 private:
  const std::string join_;
  Descriptor commands_;
  Descriptor lifeline_;
  std::unique_ptr<LineReader> answers_;
  std::unique_ptr<ChildProcess> process_;
};

using Trainers = std::vector<std::unique_ptr<Trainer>>;

// Joins all at once; every one must succeed.
void JoinAll(const Trainers& trainers);
// Returns ranks 0 to world_size - 1 of one job, joined.
Trainers JoinedTrainers(const TestDaemon& daemon, std::uint32_t world_size,
                        const std::string& job = "job", const std::string& options = "");
// Sends the command to all, then waits for all.
std::vector<Reply> DoAll(const Trainers& trainers, const std::string& command);
// DoAll, and every reply must be OK.
void ExpectAll(const Trainers& trainers, const std::string& command);

}  // namespace gradsync::fault

#endif  // TESTS_FAULT_TRAINER_H_
