// A real gradsyncd on sockets of its own, watched as a service manager would.

#ifndef TESTS_FAULT_TEST_DAEMON_H_
#define TESTS_FAULT_TEST_DAEMON_H_

#include <functional>
#include <memory>
#include <optional>
#include <string>
#include <vector>

#include "gradsync/v1/introspection.pb.h"
#include "tests/fault/child_process.h"

namespace gradsync::fault {

// A directory for sockets: below /tmp, since $TEST_TMPDIR is too long for a socket's path.
class SocketDirectory {
 public:
  SocketDirectory();
  SocketDirectory(const SocketDirectory&) = delete;
  SocketDirectory& operator=(const SocketDirectory&) = delete;
  ~SocketDirectory();
  std::string File(const std::string& name) const { return path_ + "/" + name; }
  const std::string& path() const { return path_; }

 private:
  std::string path_;
};

// Receives what a service tells its manager.
class NotifySocket {
 public:
  explicit NotifySocket(const std::string& path);
  const std::string& path() const { return path_; }
  // Waits for a message with the line `line`; drops those before it.
  bool Await(const std::string& line, int patience_ms);

 private:
  std::string path_;
  Descriptor fd_;
};

// The constructor returns when it serves. The destructor stops it with SIGTERM and fails the test
// unless it exits with 0: after whatever a test did, the daemon is whole (and, under a sanitizer,
// has neither erred nor leaked).
class TestDaemon {
 public:
  // `command_prefix`: see VirtualNetwork; where its trainers run too.
  explicit TestDaemon(std::vector<std::string> flags = {},
                      std::vector<std::string> environment = {},
                      std::vector<std::string> command_prefix = {});
  TestDaemon(const TestDaemon&) = delete;
  TestDaemon& operator=(const TestDaemon&) = delete;
  ~TestDaemon();

  const std::string& socket() const { return socket_; }
  const std::string& side_socket() const { return side_socket_; }
  const SocketDirectory& directory() const { return directory_; }
  const std::vector<std::string>& command_prefix() const { return command_prefix_; }
  pid_t pid() const { return process_->pid(); }
  ChildProcess& process() { return *process_; }
  NotifySocket& notify() { return notify_; }

  // Starts it (again) and waits until it serves.
  void Start();
  // Returns the time just before SIGKILL.
  std::uint64_t Kill() { return process_->Kill(); }
  // SIGTERM; the exit code, 128 and the signal that ended it, or -1 if it does not end.
  int Stop();

  std::string Log() const;
  // What it answers to this user.
  v1::GetStatusResponse Status() const;
  v1::GetStatsResponse Stats() const;
  // Asks until `condition` holds; false if it never does.
  bool AwaitStatus(const std::function<bool(const v1::GetStatusResponse&)>& condition) const;
  // Links of /proc/PID/fd that contain `text`.
  int CountDescriptors(const std::string& text) const;
  // CPU time used so far.
  std::uint64_t CpuNs() const;

 private:
  SocketDirectory directory_;
  const std::string socket_ = directory_.File("gradsyncd.sock");
  const std::string side_socket_ = directory_.File("gradsyncd-fd.sock");
  const std::vector<std::string> flags_;
  const std::vector<std::string> environment_;
  const std::vector<std::string> command_prefix_;
  NotifySocket notify_;
  std::unique_ptr<ChildProcess> process_;
};

}  // namespace gradsync::fault

#endif  // TESTS_FAULT_TEST_DAEMON_H_
