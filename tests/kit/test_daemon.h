// A real gradsyncd on its own sockets. It is started and watched as by a service manager.

#ifndef TESTS_KIT_TEST_DAEMON_H_
#define TESTS_KIT_TEST_DAEMON_H_

#include <functional>
#include <memory>
#include <optional>
#include <string>
#include <vector>

#include "gradsync/v1/introspection.pb.h"
#include "tests/kit/child_process.h"
#include "tests/kit/temporary_directory.h"

namespace gradsync {

// Receives the messages of a service to its manager (sd_notify). Not thread-safe.
class NotifySocket {
 public:
  explicit NotifySocket(const std::string& path);
  const std::string& path() const { return path_; }
  int fd() const { return fd_.get(); }
  // Reads one message. Returns true if it contains the line `line`.
  bool Receive(const std::string& line);
  // Reads messages until one contains the line. Returns false after `patience_ms`.
  bool Await(const std::string& line, int patience_ms);

 private:
  std::string path_;
  Descriptor fd_;
};

// A running daemon. The constructor and Start() return when the daemon serves. If the daemon ends
// before that, or does not serve within kPatienceMs, they throw std::runtime_error with the
// daemon's log: googletest then ends the test and it fails, so no later call waits for a daemon
// that is not there.
//
// The destructor stops the daemon with SIGTERM and fails the test unless the exit code is 0. So
// every test also checks that the daemon survives it (and, under a sanitizer, that it has no error
// and no leak). Not thread-safe.
class TestDaemon {
 public:
  // `command_prefix`: the words before each command that run the daemon and its trainers in a
  // network namespace (see VirtualNetwork).
  explicit TestDaemon(std::vector<std::string> flags = {},
                      std::vector<std::string> environment = {},
                      std::vector<std::string> command_prefix = {});
  TestDaemon(const TestDaemon&) = delete;
  TestDaemon& operator=(const TestDaemon&) = delete;
  ~TestDaemon();

  const std::string& socket() const { return socket_; }
  const std::string& side_socket() const { return side_socket_; }
  const TemporaryDirectory& directory() const { return directory_; }
  const std::vector<std::string>& command_prefix() const { return command_prefix_; }
  pid_t pid() const { return process_->pid(); }
  ChildProcess& process() { return *process_; }
  NotifySocket& notify() { return notify_; }

  // Starts the daemon again after Kill() or Stop() and waits until it serves.
  void Start();
  // Sends SIGKILL and waits. Returns the time just before the signal.
  std::uint64_t Kill() { return process_->Kill(); }
  // Sends SIGTERM and waits. Returns the exit code, or 128 + the number of the signal that ended
  // the daemon, or -1 if it does not end.
  int Stop();

  std::string Log() const;
  // The daemon's answers to this user.
  v1::GetStatusResponse Status() const;
  v1::GetStatsResponse Stats() const;
  // Polls the status until `condition` holds. Returns false after kPatienceMs or when the daemon
  // ends.
  bool AwaitStatus(const std::function<bool(const v1::GetStatusResponse&)>& condition) const;
  // Counts the links in /proc/PID/fd that contain `text`.
  int CountDescriptors(const std::string& text) const;
  // The processes that the daemon has started and that have not ended.
  std::vector<pid_t> Processes() const;
  // CPU time used so far.
  std::uint64_t CpuNs() const;

 private:
  // Returns false if the daemon ends or does not serve within kPatienceMs.
  bool AwaitReady();

  TemporaryDirectory directory_;
  const std::string socket_ = directory_.File("gradsyncd.sock");
  const std::string side_socket_ = directory_.File("gradsyncd-fd.sock");
  const std::vector<std::string> flags_;
  const std::vector<std::string> environment_;
  const std::vector<std::string> command_prefix_;
  NotifySocket notify_;
  std::unique_ptr<ChildProcess> process_;
};

}  // namespace gradsync

#endif  // TESTS_KIT_TEST_DAEMON_H_
