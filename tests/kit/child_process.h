// A program that runs beside a test and ends with it at the latest.

#ifndef TESTS_KIT_CHILD_PROCESS_H_
#define TESTS_KIT_CHILD_PROCESS_H_

#include <sys/types.h>

#include <memory>
#include <optional>
#include <string>
#include <vector>

namespace gradsync {

// Owns a file descriptor; -1 if none. The destructor closes it.
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
  std::vector<std::string> environment;  // "NAME=VALUE", added to this process's own; wins over it
  int input = -1;                        // becomes standard input; -1: /dev/null
  int output = -1;                       // becomes standard output; -1: inherited
  int error = -1;                        // becomes standard error; -1: inherited
  std::vector<int> passed;               // become descriptors 3, 4, ...
  bool listen_pid = false;               // sets LISTEN_PID to the child's pid
};

// A child process. The destructor kills it, even if it is stopped, and waits for it. Not
// thread-safe.
class ChildProcess {
 public:
  explicit ChildProcess(const ChildOptions& options);
  ChildProcess(const ChildProcess&) = delete;
  ChildProcess& operator=(const ChildProcess&) = delete;
  ~ChildProcess();

  pid_t pid() const { return pid_; }
  // Readable once the process has ended.
  int pidfd() const { return pidfd_.get(); }
  bool running() const { return running_; }
  void Signal(int number) const;
  // Waits for the end. Returns waitpid's status, or nothing after `patience_ms`.
  std::optional<int> Wait(int patience_ms);
  // Sends SIGKILL and waits. Returns the time just before the signal.
  std::uint64_t Kill();

 private:
  pid_t pid_ = -1;
  Descriptor pidfd_;
  bool running_ = false;
};

// Reads lines from a descriptor with a timeout. Not thread-safe.
class LineReader {
 public:
  explicit LineReader(Descriptor fd) : fd_(std::move(fd)) {}
  // Returns the next line without its newline, or nothing at the end of the file or after
  // `patience_ms`.
  std::optional<std::string> Next(int patience_ms);

 private:
  Descriptor fd_;
  std::string buffered_;
};

// Returns true if `fd` is readable within `patience_ms`. A negative value waits without end.
bool AwaitReadable(int fd, int patience_ms);
// Returns which descriptor is readable first: kFirst if both are, kNone after `patience_ms`.
enum class Ready { kFirst, kSecond, kNone };
Ready AwaitEither(int first, int second, int patience_ms);

}  // namespace gradsync

#endif  // TESTS_KIT_CHILD_PROCESS_H_
