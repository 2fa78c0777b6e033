#include "client/examples/launcher.h"

#include <sys/wait.h>
#include <unistd.h>

#include <algorithm>
#include <cstring>
#include <fstream>
#include <iterator>
#include <utility>
#include <variant>

#include "absl/strings/str_cat.h"

namespace gradsync::examples {
namespace {

constexpr absl::Duration kDaemonStart = absl::Seconds(30);
// After one process died: the others' own words come within milliseconds.
constexpr absl::Duration kLastWords = absl::Seconds(3);
constexpr std::size_t kLinesKept = 12;

using Event = ChildGroup::Event;
using EventKind = ChildGroup::EventKind;

absl::Status Ignore(const Event&) { return absl::OkStatus(); }

}  // namespace

absl::StatusOr<std::unique_ptr<Launcher>> Launcher::Create(const Programs& programs,
                                                           std::uint64_t nodes) {
  std::unique_ptr<VirtualNetwork> network;
  if (nodes > 1) {
    VirtualNetworkOptions options;
    options.nodes = static_cast<int>(nodes);
    network = std::make_unique<VirtualNetwork>(options);
  }
  absl::StatusOr<std::unique_ptr<ChildGroup>> group = ChildGroup::Create();
  if (!group.ok()) return group.status();
  absl::StatusOr<std::unique_ptr<RunDirectory>> directory = RunDirectory::Create();
  if (!directory.ok()) return directory.status();
  return std::unique_ptr<Launcher>(
      new Launcher(programs, nodes, std::move(network), *std::move(group), *std::move(directory)));
}

Launcher::Launcher(const Programs& programs, std::uint64_t nodes,
                   std::unique_ptr<VirtualNetwork> network, std::unique_ptr<ChildGroup> group,
                   std::unique_ptr<RunDirectory> directory)
    : programs_(programs),
      nodes_(nodes),
      network_(std::move(network)),
      directory_(std::move(directory)),
      group_(std::move(group)) {}

std::string Launcher::socket(std::uint64_t node) const {
  return directory_->File(node == 0 ? "gradsyncd.sock" : absl::StrCat("gradsyncd-", node, ".sock"));
}

bool Launcher::IsDaemon(ChildGroup::Id id) const {
  return std::find(daemons_.begin(), daemons_.end(), id) != daemons_.end();
}

ChildGroup::Command Launcher::CommandOn(std::uint64_t node, const std::string& program) const {
  ChildGroup::Command command;
  if (network_ != nullptr) command.arguments = network_->CommandPrefix(static_cast<int>(node));
  command.arguments.push_back(program);
  return command;
}

absl::StatusOr<ChildGroup::Id> Launcher::Start(const std::string& name,
                                               const ChildGroup::Command& command, bool may_end) {
  absl::StatusOr<ChildGroup::Id> id = group_->Start(command);
  if (!id.ok()) {
    return absl::UnavailableError(absl::StrCat(name, ": ", id.status().message()));
  }
  children_.push_back({name, {}, false, 0, may_end});
  return id;
}

absl::Status Launcher::StartDaemons() {
  for (std::uint64_t node = 0; node < nodes_; ++node) {
    if (absl::Status status = StartDaemon(node); !status.ok()) return status;
  }
  return absl::OkStatus();
}

absl::Status Launcher::StartDaemon(std::uint64_t node) {
  const std::string notify = directory_->File(absl::StrCat("notify-", node, ".sock"));
  absl::StatusOr<std::unique_ptr<ReadySocket>> ready = ReadySocket::Create(notify);
  if (!ready.ok()) return ready.status();
  ready_socket_ = *std::move(ready);

  std::string name = "gradsyncd";
  ChildGroup::Command command = CommandOn(node, programs_.daemon);
  command.arguments.push_back("--socket=" + socket(node));
  if (network_ != nullptr) {
    absl::StrAppend(&name, " of node ", node);
    const std::string address = network_->address(static_cast<int>(node));
    command.arguments.push_back(absl::StrCat("--peer_listen=", address, ":0"));
    command.arguments.push_back(absl::StrCat("--node_name=node-", node));
  }
  command.environment = {"NOTIFY_SOCKET=" + notify};
  command.signal_if_orphaned = SIGTERM;  // it removes its sockets itself
  absl::StatusOr<ChildGroup::Id> id = Start(name, command, false);
  if (!id.ok()) return id.status();
  daemons_.push_back(*id);

  bool is_ready = false;
  group_->Watch(ready_socket_->descriptor());
  absl::Status status = PumpUntil([&] { return is_ready; }, absl::Now() + kDaemonStart,
                                  [&](const Event& event) {
                                    if (event.kind == EventKind::kReadable)
                                      is_ready |= ready_socket_->ReadReady();
                                    return absl::OkStatus();
                                  });
  group_->Unwatch(ready_socket_->descriptor());
  if (absl::IsDeadlineExceeded(status)) {
    return absl::UnavailableError(absl::StrCat(name, " did not become ready within ",
                                               absl::FormatDuration(kDaemonStart), ".",
                                               Describe(*id)));
  }
  return status;
}

absl::StatusOr<Job> Launcher::StartJob(const JobOptions& options) {
  Job job;
  const std::uint64_t ranks = options.ranks_per_node * nodes_;
  job.ranks.resize(ranks);
  for (std::uint64_t rank = 0; rank < ranks; ++rank) {
    const std::uint64_t node = rank / options.ranks_per_node;
    ChildGroup::Command command = CommandOn(node, programs_.trainer);
    command.arguments.insert(command.arguments.end(), {"--data=" + programs_.data, "--hold"});
    command.arguments.insert(command.arguments.end(), options.flags.begin(), options.flags.end());
    if (rank == 0) command.arguments.push_back("--save=" + directory_->File(options.name));
    // As torchrun would set them.
    command.environment = {
        absl::StrCat("RANK=", rank),
        absl::StrCat("WORLD_SIZE=", ranks),
        "TORCHELASTIC_RUN_ID=" + options.name,
        "MASTER_ADDR=" + (network_ == nullptr ? "localhost" : network_->address(0)),
        "MASTER_PORT=29500",
        "GRADSYNC_JOB_TOKEN=",
        "GRADSYNC_COORDINATOR=" + options.coordinator,
        "GRADSYNC_SOCKET=" + socket(node)};
    absl::StatusOr<ChildGroup::Id> id = Start(absl::StrCat("rank ", rank), command, false);
    if (!id.ok()) return id.status();
    job.children.push_back(*id);
  }
  return job;
}

absl::Status Launcher::AwaitFinished(Job* job,
                                     const std::function<void(const ProgressReport&)>& progress) {
  const auto hear = [&](const Event& event) {
    const auto child = std::find(job->children.begin(), job->children.end(), event.child);
    if (event.kind != EventKind::kOutput || child == job->children.end()) return absl::OkStatus();
    RankReport& rank = job->ranks[static_cast<std::size_t>(child - job->children.begin())];
    absl::StatusOr<Report> report = ParseReport(event.line);
    if (!report.ok()) {
      return absl::InternalError(absl::StrCat(children_[event.child].name, ": ",
                                              report.status().message(), ": ", event.line));
    }
    if (auto* joined = std::get_if<JoinedReport>(&*report)) rank.joined = *joined;
    if (auto* trace = std::get_if<StepTrace>(&*report)) rank.traces.push_back(*trace);
    if (auto* finished = std::get_if<FinishedReport>(&*report)) rank.finished = *finished;
    if (auto* step = std::get_if<ProgressReport>(&*report)) progress(*step);
    return absl::OkStatus();
  };
  const auto finished = [job] {
    return std::all_of(job->ranks.begin(), job->ranks.end(),
                       [](const RankReport& rank) { return rank.finished.has_value(); });
  };
  return PumpUntil(finished, absl::InfiniteFuture(), hear);
}

absl::Status Launcher::Release(Job* job) {
  for (ChildGroup::Id child : job->children) {
    children_[child].may_end = true;
    group_->CloseInput(child);
  }
  return PumpUntil(
      [&] {
        return std::all_of(job->children.begin(), job->children.end(),
                           [this](ChildGroup::Id child) { return children_[child].ended; });
      },
      absl::InfiniteFuture(), Ignore);
}

absl::Status Launcher::RunReferences(const std::vector<std::vector<std::string>>& flags) {
  const std::size_t first = children_.size();
  for (const std::vector<std::string>& more : flags) {
    ChildGroup::Command command;
    command.arguments = {programs_.trainer, "--data=" + programs_.data};
    command.arguments.insert(command.arguments.end(), more.begin(), more.end());
    absl::StatusOr<ChildGroup::Id> id = Start("the reference run", command, true);
    if (!id.ok()) return id.status();
  }
  return PumpUntil(
      [&] {
        return std::all_of(children_.begin() + static_cast<std::ptrdiff_t>(first), children_.end(),
                           [](const Child& child) { return child.ended; });
      },
      absl::InfiniteFuture(), Ignore);
}

absl::StatusOr<std::vector<float>> Launcher::ReadParameters(const std::string& name) const {
  std::ifstream file(directory_->File(name), std::ios::binary);
  const std::vector<char> bytes((std::istreambuf_iterator<char>(file)),
                                std::istreambuf_iterator<char>());
  if (bytes.empty() || bytes.size() % sizeof(float) != 0) {
    return absl::DataLossError(absl::StrCat("no parameters in ", directory_->File(name)));
  }
  std::vector<float> values(bytes.size() / sizeof(float));
  std::copy(bytes.begin(), bytes.end(), reinterpret_cast<char*>(values.data()));
  return values;
}

absl::Status Launcher::AwaitEnter() {
  bool entered = false;
  group_->Watch(STDIN_FILENO);
  const absl::Status status = PumpUntil([&] { return entered; }, absl::InfiniteFuture(),
                                        [&](const Event& event) {
                                          if (event.kind != EventKind::kReadable)
                                            return absl::OkStatus();
                                          char typed[256];
                                          const ssize_t count =
                                              read(STDIN_FILENO, typed, sizeof(typed));
                                          // Without a terminal an end of input asks for nothing:
                                          // only a signal ends the wait.
                                          entered = count > 0 || isatty(STDIN_FILENO) != 0;
                                          if (!entered) group_->Unwatch(STDIN_FILENO);
                                          return absl::OkStatus();
                                        });
  group_->Unwatch(STDIN_FILENO);
  if (!absl::IsCancelled(status)) return status;
  interrupted_by_ = 0;
  return absl::OkStatus();
}

absl::Status Launcher::PumpUntil(
    const std::function<bool()>& done, absl::Time deadline,
    const std::function<absl::Status(const ChildGroup::Event&)>& hear) {
  while (!done()) {
    absl::StatusOr<Event> event = group_->Next(deadline);
    if (!event.ok()) return event.status();
    Remember(*event);
    if (event->kind == EventKind::kDeadline) return absl::DeadlineExceededError("");
    if (event->kind == EventKind::kSignal) {
      interrupted_by_ = event->number;
      return absl::CancelledError(absl::StrCat("stopped by ", strsignal(event->number)));
    }
    if (event->kind == EventKind::kExit &&
        (!children_[event->child].may_end || event->wait_status != 0)) {
      return Explain(event->child);
    }
    if (absl::Status status = hear(*event); !status.ok()) return status;
  }
  return absl::OkStatus();
}

void Launcher::Remember(const ChildGroup::Event& event) {
  const bool is_log = event.kind == EventKind::kOutput && IsDaemon(event.child);
  if (event.kind == EventKind::kError || is_log) {
    std::deque<std::string>& said = children_[event.child].said;
    said.push_back(event.line);
    if (said.size() > kLinesKept) said.pop_front();
  } else if (event.kind == EventKind::kExit) {
    children_[event.child].ended = true;
    children_[event.child].wait_status = event.wait_status;
  }
}

// `first` has ended and should not have. Others may follow, for instance because their session was
// aborted; one that was killed explains those that exited by themselves.
absl::Status Launcher::Explain(ChildGroup::Id first) {
  const absl::Time deadline = absl::Now() + kLastWords;
  const auto trainers_ended = [this] {
    for (ChildGroup::Id id = 0; id < children_.size(); ++id) {
      if (!IsDaemon(id) && !children_[id].ended && !children_[id].may_end) return false;
    }
    return true;
  };
  while (!trainers_ended()) {
    absl::StatusOr<Event> event = group_->Next(deadline);
    if (!event.ok() || event->kind == EventKind::kDeadline || event->kind == EventKind::kSignal) {
      break;
    }
    Remember(*event);
  }
  ChildGroup::Id culprit = first;
  for (ChildGroup::Id id = 0; id < children_.size(); ++id) {
    if (children_[id].ended && WIFSIGNALED(children_[id].wait_status)) {
      culprit = id;
      break;
    }
  }
  std::string message = Describe(culprit);
  for (ChildGroup::Id id = 0; id < children_.size(); ++id) {
    const Child& child = children_[id];
    if (id != culprit && child.ended && child.wait_status != 0) {
      absl::StrAppend(&message, "\n", Describe(id));
    }
  }
  return absl::UnavailableError(message);
}

std::string Launcher::Describe(ChildGroup::Id id) const {
  const Child& child = children_[id];
  std::string text = absl::StrCat(child.name, " (pid ", group_->pid(id), ") ",
                                  child.ended ? DescribeExit(child.wait_status) : "is running");
  for (const std::string& line : child.said) absl::StrAppend(&text, "\n    ", line);
  return text;
}

}  // namespace gradsync::examples
