// A program that runs beside a test, and never outlives it.

#ifndef TESTS_FAULT_CHILD_PROCESS_H_
#define TESTS_FAULT_CHILD_PROCESS_H_

#include <sys/types.h>

#include <memory>
#include <optional>
#include <string>
#include <vector>

namespace gradsync::fault {

// An open descriptor; closed with the object.
class Descriptor {
 public:
  explicit Descriptor(int fd = -1) : fd_(fd) {}
  Descriptor(Descriptor&& other) noexcept : fd_(other.fd_) { other.fd_ = -1; }
  Descriptor& operator=(Descriptor&& other) noexcept;
  ~Descriptor();
  int get() const { return fd_; }
  void Close() { *this = Descriptor(); }

 private:
  int fd_;
};

struct ChildOptions {
  std::vector<std::string> arguments;    // the program first
  std::vector<std::string> environment;  // "NAME=VALUE", besides this process's own
  int input = -1;                        // becomes standard input; -1: /dev/null
  int output = -1;                       // becomes standard output; -1: inherited
  int error = -1;                        // becomes standard error; -1: inherited
  std::vector<int> passed;               // become descriptors 3, 4, ...
  bool listen_pid = false;               // sets LISTEN_PID to the child's pid
};

// Killed, also if it is stopped, and waited for at the object's end.
class ChildProcess {
 public:
  explicit ChildProcess(const ChildOptions& options);
  ChildProcess(const ChildProcess&) = delete;
  ChildProcess& operator=(const ChildProcess&) = delete;
  ~ChildProcess();

  pid_t pid() const { return pid_; }
  bool running() const { return running_; }
  void Signal(int number) const;
  // waitpid's status, or nothing if it has not ended within `patience_ms`.
  std::optional<int> Wait(int patience_ms);
  // SIGKILL, then waits. Returns the time just before the signal.
  std::uint64_t Kill();

 private:
  pid_t pid_ = -1;
  Descriptor pidfd_;
  bool running_ = false;
};

// Reads lines with a deadline.
class LineReader {
 public:
  explicit LineReader(Descriptor fd) : fd_(std::move(fd)) {}
  // Without its newline; nothing at the end of the file or when the time is over.
  std::optional<std::string> Next(int patience_ms);

 private:
  Descriptor fd_;
  std::string buffered_;
};

// True if `fd` is readable within `patience_ms`.
bool AwaitReadable(int fd, int patience_ms);

}  // namespace gradsync::fault

#endif  // TESTS_FAULT_CHILD_PROCESS_H_
