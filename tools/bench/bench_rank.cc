// A rank's process: it does what gradsync-bench asks for, and sleeps in between.
//
//   bench-rank SOCKET [RANK]   connects to the bench; without RANK: as mpirun's environment says
//   bench-rank                 prints what it was built with, as JSON
//
// Both sides send lines of JSON. The rank introduces itself, the bench answers with the options of
// the contestant, and then with commands: {"call": NAME, ...}, where NAME is one of
//
//   set_up     makes a buffer of `nbytes`
//   turns      `count` times: rewrites it, reduces it and checks it. Its contents depend on
//              the iteration, from `begin` on. Answers with the times and wrong elements of each.
//   tear_down  frees it
//
// The rank answers each with {"answer": ...} or {"error": TEXT}. It ends when the bench closes the
// connection.

#include <errno.h>
#include <signal.h>
#include <sys/prctl.h>
#include <sys/socket.h>
#include <sys/un.h>
#include <unistd.h>

#include <cstdio>
#include <cstdlib>
#include <cstring>
#include <memory>
#include <optional>
#include <string>
#include <utility>

#include "absl/status/status.h"
#include "absl/status/statusor.h"
#include "absl/strings/numbers.h"
#include "absl/strings/str_cat.h"
#include "nlohmann/json.hpp"
#include "tools/bench/barrier.h"
#include "tools/bench/busy_thread.h"
#include "tools/bench/clocks.h"
#include "tools/bench/contestant.h"
#include "tools/bench/pattern.h"
#include "tools/bench/shared_region.h"

namespace gradsync::bench {
namespace {

// Lines to and from the bench.
class Channel {
 public:
  explicit Channel(int socket) : socket_(socket) {}

  bool Send(const nlohmann::json& message) {
    const std::string line = message.dump() + "\n";
    return send(socket_, line.data(), line.size(), MSG_NOSIGNAL) ==
           static_cast<ssize_t>(line.size());
  }

  // Nothing once the bench has closed the connection.
  std::optional<nlohmann::json> Receive() {
    std::size_t end = 0;
    while ((end = received_.find('\n')) == std::string::npos) {
      char bytes[4096];
      const ssize_t count = recv(socket_, bytes, sizeof(bytes), 0);
      if (count < 0 && errno == EINTR) continue;
      if (count <= 0) return std::nullopt;
      received_.append(bytes, static_cast<std::size_t>(count));
    }
    nlohmann::json message = nlohmann::json::parse(received_.substr(0, end), nullptr, false);
    received_.erase(0, end + 1);
    return message;
  }

 private:
  const int socket_;
  std::string received_;
};

DataType ParseType(const std::string& name) {
  for (const DataType type : {DataType::kFloat64, DataType::kFloat16, DataType::kBfloat16}) {
    if (name == DataTypeName(type)) return type;
  }
  return DataType::kFloat32;
}

ContestantOptions OptionsFrom(const nlohmann::json& config) {
  ContestantOptions options;
  options.rank = config["rank"];
  options.ranks = config["ranks"];
  options.dtype = ParseType(config["dtype"]);
  options.directory = config["directory"];
  options.address = config["address"];
  options.socket = config["socket"];
  options.coordinator = config["coordinator"];
  options.memory = config["memory"];
  options.threads = config["threads"];
  options.gpus = config["gpus"];
  options.cuda_library = config["cuda_library"];
  options.nccl_library = config["nccl_library"];
  return options;
}

class Rank {
 public:
  Rank(const ContestantOptions& options, std::unique_ptr<Contestant> contestant, bool busy)
      : rank_(options.rank),
        ranks_(options.ranks),
        item_size_(ItemSize(options.dtype)),
        barrier_(*options.barrier),
        pattern_(options.dtype, options.ranks),
        contestant_(std::move(contestant)) {
    if (busy) busy_ = std::make_unique<BusyThread>();
  }

  absl::Status Connect() { return contestant_->Connect(); }

  absl::StatusOr<nlohmann::json> Do(const nlohmann::json& command) {
    const std::string call = command["call"];
    if (call == "turns") return Turns(command["begin"], command["count"], command["check_all"]);
    absl::Status status;
    if (call == "set_up") {
      const std::size_t bytes = command["nbytes"];
      count_ = bytes / item_size_;
      status = contestant_->SetUp(bytes);
    } else {
      status = contestant_->TearDown();
    }
    if (!status.ok()) return status;
    return nlohmann::json();
  }

 private:
  // No rank asks the bench in between: the bench's process would push the ranks' and the daemon's
  // code out of the caches, and MarkReady would take twice as long as it does in a trainer.
  absl::StatusOr<nlohmann::json> Turns(std::uint64_t begin, std::uint64_t count, bool check_all) {
    if (busy_ != nullptr) busy_->Start();
    nlohmann::json turns = nlohmann::json::array();
    for (std::uint64_t iteration = begin; iteration < begin + count; ++iteration) {
      absl::StatusOr<nlohmann::json> turn = Reduce(iteration, check_all);
      if (!turn.ok()) return turn.status();
      turns.push_back(*std::move(turn));
    }
    if (busy_ != nullptr) busy_->Stop();
    return turns;
  }

  absl::StatusOr<nlohmann::json> Reduce(std::uint64_t iteration, bool check_all) {
    pattern_.Fill(rank_, iteration, contestant_->buffer(), count_);
    absl::Status status = contestant_->Upload();
    Turn turn;
    const std::int64_t cpu_ns = CpuNs();
    barrier_.Wait(ranks_);
    const std::int64_t call_ns = MonotonicNs();
    status.Update(contestant_->AllReduce(&turn));
    const std::int64_t return_ns = MonotonicNs();
    // A rank that is done early must not compete with another that is being timed.
    barrier_.Wait(ranks_);
    status.Update(contestant_->EndStep(&turn));
    const std::int64_t used_ns = turn.cpu_ns.value_or(CpuNs() - cpu_ns);
    std::uint64_t wrong = 0;
    if (contestant_->averages()) {
      status.Update(contestant_->Download());
      wrong = pattern_.CountWrong(iteration, contestant_->buffer(), count_, check_all);
    }
    if (!status.ok()) return status;
    return nlohmann::json({{"call_ns", call_ns},
                           {"return_ns", return_ns},
                           {"marked_ns", turn.marked_ns},
                           {"ready_ns", turn.ready_ns},
                           {"start_ns", turn.start_ns},
                           {"finish_ns", turn.finish_ns},
                           {"own_ns", turn.own_ns},
                           {"enqueued_ns", turn.enqueued_ns},
                           {"host_synchronizations", turn.host_synchronizations},
                           {"cpu_ns", used_ns},
                           {"wrong", wrong}});
  }

  std::int64_t CpuNs() { return ProcessCpuNs() - (busy_ == nullptr ? 0 : busy_->CpuNs()); }

  const std::uint32_t rank_;
  const std::uint32_t ranks_;
  const std::size_t item_size_;
  Barrier& barrier_;
  const Pattern pattern_;
  std::unique_ptr<Contestant> contestant_;
  std::unique_ptr<BusyThread> busy_;
  std::size_t count_ = 0;
};

absl::StatusOr<int> Connect(const std::string& path) {
  sockaddr_un address = {};
  address.sun_family = AF_UNIX;
  if (path.size() >= sizeof(address.sun_path)) {
    return absl::InvalidArgumentError(absl::StrCat(path, " is too long; set TMPDIR"));
  }
  std::memcpy(address.sun_path, path.c_str(), path.size() + 1);
  const int socket_fd = socket(AF_UNIX, SOCK_STREAM | SOCK_CLOEXEC, 0);
  if (socket_fd < 0 ||
      connect(socket_fd, reinterpret_cast<sockaddr*>(&address), sizeof(address)) != 0) {
    return absl::ErrnoToStatus(errno, path);
  }
  return socket_fd;
}

absl::Status Serve(const std::string& path, std::uint32_t number) {
  absl::StatusOr<int> socket = Connect(path);
  if (!socket.ok()) return socket.status();
  Channel channel(*socket);
  channel.Send({{"rank", number}, {"pid", getpid()}});
  const std::optional<nlohmann::json> config = channel.Receive();
  if (!config.has_value()) return absl::OkStatus();
  ContestantOptions options = OptionsFrom(*config);
  absl::StatusOr<SharedRegion> shared = SharedRegion::Open((*config)["barrier"], sizeof(Barrier));
  if (!shared.ok()) return shared.status();
  options.barrier = reinterpret_cast<Barrier*>(shared->data());
  absl::StatusOr<std::unique_ptr<Contestant>> contestant =
      MakeContestant((*config)["impl"], options);
  absl::StatusOr<nlohmann::json> answer = nlohmann::json();
  std::unique_ptr<Rank> rank;
  absl::Status status = contestant.status();
  if (status.ok()) {
    rank = std::make_unique<Rank>(options, *std::move(contestant), (*config)["busy"]);
    status = rank->Connect();
  }
  if (!status.ok()) answer = status;
  for (;;) {
    const bool sent =
        channel.Send(answer.ok() ? nlohmann::json({{"answer", *answer}})
                                 : nlohmann::json({{"error", answer.status().ToString()}}));
    const std::optional<nlohmann::json> command = sent ? channel.Receive() : std::nullopt;
    if (!command.has_value() || rank == nullptr) return absl::OkStatus();
    answer = rank->Do(*command);
  }
}

int Run(int argc, char** argv) {
  if (argc < 2) {
    const bool openmpi = MakeOpenMpiContestant({}) != nullptr;
    std::printf("%s\n", nlohmann::json({{"openmpi", openmpi}}).dump().c_str());
    return 0;
  }
  // A bench that is killed takes its ranks along. The parent is the bench or its mpirun.
  prctl(PR_SET_PDEATHSIG, SIGKILL);
  const char* const number = argc > 2 ? argv[2] : std::getenv("OMPI_COMM_WORLD_RANK");
  std::uint32_t rank = 0;
  if (number == nullptr || !absl::SimpleAtoi(number, &rank)) {
    std::fprintf(stderr, "bench-rank: no rank is given, and mpirun has not started this\n");
    return 2;
  }
  const absl::Status status = Serve(argv[1], rank);
  if (status.ok()) return 0;
  std::fprintf(stderr, "bench-rank: %s\n", status.ToString().c_str());
  return 1;
}

}  // namespace
}  // namespace gradsync::bench

int main(int argc, char** argv) { return gradsync::bench::Run(argc, argv); }
