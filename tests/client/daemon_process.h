// A real gradsyncd, as a child process on a socket of its own.

#ifndef TESTS_CLIENT_DAEMON_PROCESS_H_
#define TESTS_CLIENT_DAEMON_PROCESS_H_

#include <sys/types.h>

#include <functional>
#include <memory>
#include <string>
#include <vector>

#include "client/include/gradsync/client.h"
#include "tests/client/temp_directory.h"

namespace gradsync {

// Killed with the object. Nobody waits until it listens: Join does that.
class DaemonProcess {
 public:
  explicit DaemonProcess(const std::vector<std::string>& flags = {});
  DaemonProcess(const DaemonProcess&) = delete;
  DaemonProcess& operator=(const DaemonProcess&) = delete;
  ~DaemonProcess();

  const std::string& socket() const { return socket_; }
  // After SIGKILL the process is waited for.
  void Signal(int signal);
  // Starts again on the same socket, after SIGKILL.
  void Restart();

  // Rank `rank` of a job in which nothing takes long.
  SessionOptions Options(std::uint32_t rank, std::uint32_t world_size) const;

 private:
  void Start();

  TempDirectory directory_;
  const std::string socket_ = directory_.File("gradsyncd.sock");
  const std::vector<std::string> flags_;
  pid_t pid_ = -1;
};

// One job of this process: a session, and a layout, for each rank.
struct JobOfThreads {
  std::vector<std::unique_ptr<Session>> sessions;
  std::vector<std::unique_ptr<Layout>> layouts;
};

// Runs `body` for every rank, each on a thread of its own, and waits for all.
void OnEveryRank(std::uint32_t world_size, const std::function<void(std::uint32_t rank)>& body);

// Joins every rank; registers `spec` on each unless it is null. Fails the test if that fails.
JobOfThreads JoinAll(const std::vector<SessionOptions>& options, const LayoutSpec* spec);
JobOfThreads JoinAll(const DaemonProcess& daemon, std::uint32_t world_size, const LayoutSpec* spec);

// `buckets` float32 buckets of `count` elements.
LayoutSpec FloatBuckets(std::size_t buckets, std::uint64_t count);

// Every element of a bucket.
void Fill(const BucketView& bucket, float value);
// The value that all elements have; NaN if they differ.
float ValueOf(const BucketView& bucket);

// Marks every bucket and ends the step.
absl::Status MarkAllAndEnd(Layout* layout, std::uint64_t step);

}  // namespace gradsync

#endif  // TESTS_CLIENT_DAEMON_PROCESS_H_
