#include "tests/kit/test_daemon.h"

#include <fcntl.h>
#include <grpcpp/grpcpp.h>
#include <signal.h>
#include <stdlib.h>
#include <sys/socket.h>
#include <sys/un.h>
#include <sys/wait.h>
#include <time.h>
#include <unistd.h>

#include <algorithm>
#include <chrono>
#include <cstdio>
#include <cstring>
#include <filesystem>
#include <fstream>
#include <sstream>
#include <stdexcept>
#include <utility>

#include "absl/strings/match.h"
#include "gradsync/v1/introspection.grpc.pb.h"
#include "gtest/gtest.h"
#include "tests/kit/deadline.h"

namespace gradsync {
namespace {

// A failed test shows this many bytes of the end of the log.
constexpr std::size_t kShownBytes = 8192;

// Names a folder in which the logs of all daemons stay, for a machine that is there only once.
constexpr char kLogsVariable[] = "GRADSYNC_TEST_DAEMON_LOGS";

// Makes `log` a link to a file in that folder, if there is one. It stays when `log` is removed.
void KeepLog(const std::string& log) {
  const char* const folder = std::getenv(kLogsVariable);
  if (folder == nullptr || std::filesystem::is_symlink(log)) return;
  // "/tmp/gradsync_test.XXXXXX/log": that folder's name is in use once.
  const std::string unique = std::filesystem::path(log).parent_path().extension().string();
  std::error_code ignored;
  std::filesystem::create_symlink(
      std::string(folder) + "/gradsyncd-" + std::to_string(getpid()) + unique + ".log", log,
      ignored);
}

// Between two questions of AwaitStatus(). Most conditions hold within milliseconds.
constexpr int kPollMs = 2;

std::unique_ptr<v1::Introspection::Stub> StubOf(const std::string& socket) {
  grpc::ChannelArguments arguments;
  arguments.SetInt(GRPC_ARG_USE_LOCAL_SUBCHANNEL_POOL, 1);
  return v1::Introspection::NewStub(
      grpc::CreateCustomChannel("unix:" + socket, grpc::InsecureChannelCredentials(), arguments));
}

void SetDeadline(grpc::ClientContext* context) {
  context->set_deadline(std::chrono::system_clock::now() + std::chrono::milliseconds(kPatienceMs));
  context->set_wait_for_ready(true);
}

}  // namespace

NotifySocket::NotifySocket(const std::string& path)
    : path_(path), fd_(socket(AF_UNIX, SOCK_DGRAM | SOCK_CLOEXEC, 0)) {
  sockaddr_un address{};
  address.sun_family = AF_UNIX;
  std::memcpy(address.sun_path, path.c_str(), path.size() + 1);
  if (bind(fd_.get(), reinterpret_cast<sockaddr*>(&address), sizeof(address)) != 0) {
    std::perror("NOTIFY_SOCKET");
    std::abort();
  }
}

bool NotifySocket::Receive(const std::string& line) {
  char message[4096];
  const ssize_t size = recv(fd_.get(), message, sizeof(message), 0);
  if (size <= 0) return false;
  std::istringstream lines(std::string(message, static_cast<std::size_t>(size)));
  for (std::string one; std::getline(lines, one);) {
    if (one == line) return true;
  }
  return false;
}

bool NotifySocket::Await(const std::string& line, int patience_ms) {
  const std::uint64_t deadline_ns =
      NowNs() + static_cast<std::uint64_t>(patience_ms) * 1'000'000ull;
  for (;;) {
    const int left_ms = MsUntil(deadline_ns);
    if (left_ms == 0 || !AwaitReadable(fd_.get(), left_ms)) return false;
    if (Receive(line)) return true;
  }
}

TestDaemon::TestDaemon(std::vector<std::string> flags, std::vector<std::string> environment,
                       std::vector<std::string> command_prefix)
    : flags_(std::move(flags)),
      environment_(std::move(environment)),
      command_prefix_(std::move(command_prefix)),
      notify_(directory_.File("notify")) {
  Start();
}

void TestDaemon::Start() {
  KeepLog(directory_.File("log"));
  const Descriptor log(
      open(directory_.File("log").c_str(), O_WRONLY | O_CREAT | O_APPEND | O_CLOEXEC, 0600));
  ChildOptions options;
  options.arguments = command_prefix_;
  options.arguments.insert(options.arguments.end(), {"daemon/gradsyncd", "--socket=" + socket_});
  // A worker that looks for GPUs costs as much as the daemon.
  if (std::none_of(flags_.begin(), flags_.end(), [](const std::string& flag) {
        return absl::StartsWith(flag, "--cuda_library=");
      })) {
    options.arguments.push_back("--cuda_library=none");
  }
  options.arguments.insert(options.arguments.end(), flags_.begin(), flags_.end());
  options.environment = environment_;
  options.environment.push_back("NOTIFY_SOCKET=" + notify_.path());
  options.error = log.get();
  process_ = std::make_unique<ChildProcess>(options);
  if (!AwaitReady()) throw std::runtime_error("gradsyncd does not serve:\n" + Log());
}

bool TestDaemon::AwaitReady() {
  const std::uint64_t deadline_ns = NowNs() + std::uint64_t{kPatienceMs} * 1'000'000;
  for (;;) {
    switch (AwaitEither(notify_.fd(), process_->pidfd(), MsUntil(deadline_ns))) {
      case Ready::kFirst:
        if (notify_.Receive("READY=1")) return true;
        break;
      case Ready::kSecond:
        process_->Wait(0);
        return false;
      case Ready::kNone:
        return false;
    }
  }
}

int TestDaemon::Stop() {
  process_->Signal(SIGTERM);
  const auto status = process_->Wait(kPatienceMs);
  if (!status.has_value()) return -1;
  return WIFEXITED(*status) ? WEXITSTATUS(*status) : 128 + WTERMSIG(*status);
}

TestDaemon::~TestDaemon() {
  if (process_->running()) {
    process_->Signal(SIGCONT);  // a test may have sent SIGSTOP
    EXPECT_EQ(Stop(), 0) << "gradsyncd did not exit with 0";
  }
  if (testing::Test::HasFailure()) {
    const std::string log = Log();
    std::fprintf(stderr, "gradsyncd said:\n%s\n",
                 log.substr(log.size() - std::min(log.size(), kShownBytes)).c_str());
  }
}

std::string TestDaemon::Log() const {
  std::ifstream file(directory_.File("log"));
  std::stringstream text;
  text << file.rdbuf();
  return text.str();
}

v1::GetStatusResponse TestDaemon::Status() const {
  grpc::ClientContext context;
  SetDeadline(&context);
  v1::GetStatusResponse response;
  const grpc::Status status = StubOf(socket_)->GetStatus(&context, {}, &response);
  EXPECT_TRUE(status.ok()) << status.error_message();
  return response;
}

v1::GetStatsResponse TestDaemon::Stats() const {
  grpc::ClientContext context;
  SetDeadline(&context);
  v1::GetStatsResponse response;
  const grpc::Status status = StubOf(socket_)->GetStats(&context, {}, &response);
  EXPECT_TRUE(status.ok()) << status.error_message();
  return response;
}

bool TestDaemon::AwaitStatus(
    const std::function<bool(const v1::GetStatusResponse&)>& condition) const {
  const auto stub = StubOf(socket_);
  const std::uint64_t deadline_ns = NowNs() + std::uint64_t{kPatienceMs} * 1'000'000;
  do {
    grpc::ClientContext context;
    SetDeadline(&context);
    v1::GetStatusResponse response;
    if (!stub->GetStatus(&context, {}, &response).ok()) return false;
    if (condition(response)) return true;
  } while (NowNs() < deadline_ns && !AwaitReadable(process_->pidfd(), kPollMs));
  return false;
}

int TestDaemon::CountDescriptors(const std::string& text) const {
  int count = 0;
  std::error_code error;
  for (const auto& entry :
       std::filesystem::directory_iterator("/proc/" + std::to_string(pid()) + "/fd", error)) {
    const auto target = std::filesystem::read_symlink(entry.path(), error);
    if (!error && target.string().find(text) != std::string::npos) ++count;
  }
  return count;
}

std::vector<pid_t> TestDaemon::Processes() const {
  std::vector<pid_t> found;
  std::error_code error;
  for (const auto& task :
       std::filesystem::directory_iterator("/proc/" + std::to_string(pid()) + "/task", error)) {
    std::ifstream children(task.path() / "children");
    for (pid_t child = 0; children >> child;) found.push_back(child);
  }
  return found;
}

std::uint64_t TestDaemon::CpuNs() const {
  clockid_t clock{};
  timespec used{};
  if (clock_getcpuclockid(pid(), &clock) != 0 || clock_gettime(clock, &used) != 0) return 0;
  return static_cast<std::uint64_t>(used.tv_sec) * 1'000'000'000ull +
         static_cast<std::uint64_t>(used.tv_nsec);
}

}  // namespace gradsync
