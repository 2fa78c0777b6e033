#include "client/examples/quickstart.h"

#include <sched.h>

#include <algorithm>
#include <cstdio>
#include <fstream>
#include <utility>
#include <vector>

#include "absl/status/status.h"
#include "absl/status/statusor.h"
#include "absl/strings/str_cat.h"
#include "absl/strings/str_format.h"
#include "client/examples/daemon_stats.h"
#include "client/examples/figures.h"
#include "client/examples/progress.h"
#include "client/examples/timeline.h"

namespace gradsync::examples {
namespace {

constexpr char kJob[] = "digits";
constexpr char kComparisonJob[] = "digits-overlap";
constexpr char kSharded[] = "sharded";
constexpr char kWhole[] = "whole";
// At most: enough for two medians.
constexpr std::uint64_t kComparisonSteps = 120;
constexpr absl::Duration kDaemonTimeout = absl::Seconds(10);

void Print(const std::string& text) {
  std::fputs(text.c_str(), stdout);
  std::fflush(stdout);
}

Traces TakeTraces(Job* job) {
  Traces traces;
  for (RankReport& rank : job->ranks) traces.push_back(std::move(rank.traces));
  return traces;
}

std::string Check(bool good, const std::string& wanted, const TextStyle& style) {
  const std::string mark = style.unicode ? (good ? "✓" : "✗") : (good ? "ok" : "WRONG");
  return absl::StrCat(good ? style.Green(mark) : style.Red(mark), "  ", style.Dim(wanted));
}

std::string Line(const std::string& name, const std::string& value, const std::string& note) {
  return absl::StrFormat("  %-34s %12s   %s\n", name, value, note);
}

std::string Bytes(std::uint64_t bytes) {
  return absl::StrFormat("%.1f MB", static_cast<double>(bytes) * 1e-6);
}

std::size_t AvailableCpus() {
  cpu_set_t cpus;
  CPU_ZERO(&cpus);
  return sched_getaffinity(0, sizeof(cpus), &cpus) == 0 ? CPU_COUNT(&cpus) : 1;
}

// One quick start. Not thread-safe.
class Run {
 public:
  Run(const QuickstartOptions& options, const TextStyle& style, Launcher* launcher)
      : options_(options), style_(style), launcher_(launcher) {}

  // OK if everything worked and was measured; whether it is right is in figures().
  absl::Status All() {
    figures_.nodes = options_.nodes;
    figures_.ranks = options_.nodes * options_.ranks;
    absl::Status status = Start();
    if (status.ok()) status = Train();
    if (status.ok()) status = CompareOverlap();
    if (status.ok()) status = CompareWithReferences();
    if (!status.ok()) return status;
    Print(Summary());
    Print(Timeline());
    Print(HowToAsk());
    if (status = WriteJson(); !status.ok()) return status;
    if (!options_.keep) return absl::OkStatus();
    Print("\n  Press Enter or Ctrl-C to end the daemon and the trainers.\n");
    return launcher_->AwaitEnter();
  }

  const Figures& figures() const { return figures_; }

 private:
  absl::Status Start() {
    const std::string trainers =
        absl::StrCat(options_.ranks, options_.ranks == 1 ? " trainer" : " trainers");
    const std::string who =
        one_node() ? absl::StrCat(trainers, ", one daemon")
                   : absl::StrCat(options_.nodes, " nodes, ", trainers, " and a daemon on each");
    Print(style_.Bold(absl::StrCat("gradsync quick start: ", who, ", handwritten digits")) +
          "\n\n");
    if (!one_node()) {
      Print(absl::StrFormat("  %-10s %s\n", "network", launcher_->network()->description()));
    }
    if (absl::Status status = launcher_->StartDaemons(); !status.ok()) return status;
    for (std::uint64_t node = 0; node < options_.nodes; ++node) {
      Print(absl::StrFormat("  %-10s pid %d   %s%s\n", "gradsyncd",
                            launcher_->pid(launcher_->daemon(node)), launcher_->socket(node),
                            OnNode(node)));
    }
    if (one_node()) return absl::OkStatus();
    absl::StatusOr<std::string> address = GetPeerAddress(launcher_->socket(0), kDaemonTimeout);
    if (!address.ok()) return address.status();
    coordinator_ = *std::move(address);
    return absl::OkStatus();
  }

  bool one_node() const { return options_.nodes == 1; }

  std::string OnNode(std::uint64_t node) const {
    if (one_node()) return "";
    return absl::StrCat("   on node ", node, ", ",
                        launcher_->network()->address(static_cast<int>(node)));
  }

  absl::StatusOr<Job> StartJob(const char* name, std::uint64_t steps,
                               const std::vector<std::string>& more_flags) {
    JobOptions job = {name, options_.ranks, coordinator_, {absl::StrCat("--steps=", steps)}};
    job.flags.insert(job.flags.end(), more_flags.begin(), more_flags.end());
    return launcher_->StartJob(job);
  }

  absl::Status Train() {
    absl::StatusOr<Job> job = StartJob(kJob, options_.steps, {});
    if (!job.ok()) return job.status();
    job_ = *std::move(job);
    for (std::size_t rank = 0; rank < job_.children.size(); ++rank) {
      Print(absl::StrFormat("  rank %-5d pid %d%s\n", rank, launcher_->pid(job_.children[rank]),
                            OnNode(rank / options_.ranks)));
    }
    Print("\n");
    Progress progress(options_.steps, style_);
    absl::Status status = launcher_->AwaitFinished(
        &job_, [&progress](const ProgressReport& report) { Print(progress.Update(report)); });
    if (!status.ok()) return status;

    figures_.test_accuracy = job_.ranks[0].finished->accuracy;
    for (std::size_t rank = 0; rank < job_.ranks.size(); ++rank) {
      if (!job_.ranks[rank].finished->parameters_equal) figures_.unequal_ranks.push_back(rank);
    }
    buckets_ = job_.ranks[0].joined.buckets;
    traces_ = TakeTraces(&job_);
    figures_.overlap_percent = 100 * MedianOverlap(traces_);
    if (status = AskDaemon(); !status.ok()) return status;
    return options_.keep ? absl::OkStatus() : launcher_->Release(&job_);
  }

  // While the job is there: the only one of this daemon, which coordinates it.
  absl::Status AskDaemon() {
    absl::StatusOr<v1::GetStatsResponse> stats =
        GetDaemonStats(launcher_->socket(0), kDaemonTimeout);
    if (!stats.ok()) return stats.status();
    if (stats->jobs_size() != 1 || stats->jobs(0).layouts_size() != 1) {
      return absl::InternalError("the daemon's statistics do not show the one job that ran");
    }
    const v1::LayoutStats& layout = stats->jobs(0).layouts(0);
    figures_.steps = layout.steps_complete();
    figures_.bytes_reduced = layout.bytes_reduced();
    figures_.reduce_gbps = layout.reduce_gbps();
    return absl::OkStatus();
  }

  // Steps with and without overlap in turn, in one run: a machine's speed changes from second to
  // second.
  absl::Status CompareOverlap() {
    Print(style_.Dim("  ... the same with overlap on and off in turn") + "\n");
    absl::StatusOr<Job> job = StartJob(kComparisonJob, std::min(kComparisonSteps, options_.steps),
                                       {"--overlap=alternate"});
    if (!job.ok()) return job.status();
    absl::Status status = launcher_->AwaitFinished(&*job, [](const ProgressReport&) {});
    if (!status.ok()) return status;
    const Traces traces = TakeTraces(&*job);
    figures_.step_ms = MedianStepMs(traces, true);
    figures_.step_ms_without_overlap = MedianStepMs(traces, false);
    return launcher_->Release(&*job);
  }

  absl::Status CompareWithReferences() {
    Print(style_.Dim("  ... the same in one process, without gradsync") + "\n");
    std::vector<std::vector<std::string>> flags;
    for (const char* reference : {kSharded, kWhole}) {
      flags.push_back({absl::StrCat("--reference=", reference),
                       absl::StrCat("--save=", launcher_->File(reference)),
                       absl::StrCat("--nodes=", figures_.nodes),
                       absl::StrCat("--ranks=", figures_.ranks),
                       absl::StrCat("--steps=", options_.steps)});
    }
    if (absl::Status status = launcher_->RunReferences(flags); !status.ok()) return status;
    absl::StatusOr<std::vector<float>> trained = launcher_->ReadParameters(kJob);
    if (!trained.ok()) return trained.status();
    for (auto [reference, difference] : {std::pair(kSharded, &figures_.max_difference_sharded),
                                         std::pair(kWhole, &figures_.max_difference_whole)}) {
      absl::StatusOr<std::vector<float>> parameters = launcher_->ReadParameters(reference);
      if (!parameters.ok()) return parameters.status();
      *difference = LargestDifference(*trained, *parameters);
    }
    return absl::OkStatus();
  }

  std::string Summary() const {
    const Figures& f = figures_;
    std::string text = absl::StrCat("\n", style_.Bold("What came out"), "\n\n");
    absl::StrAppend(
        &text,
        Line("test accuracy", absl::StrFormat("%.2f %%", f.test_accuracy),
             Check(f.test_accuracy >= kLeastAccuracy, "at least 96 %, on 360 held-out digits",
                   style_)),
        Line("against one process, same shards", absl::StrFormat("%g", f.max_difference_sharded),
             Check(f.max_difference_sharded == 0,
                   one_node() ? "largest difference: exactly 0"
                              : "largest difference: exactly 0, added per node, then over nodes",
                   style_)),
        Line("against one process, whole batches", absl::StrFormat("%.1e", f.max_difference_whole),
             Check(f.max_difference_whole <= kLargestWholeDifference,
                   "largest difference: at most 1e-05", style_)),
        Line("parameters on every rank", f.unequal_ranks.empty() ? "equal" : "DIFFER",
             Check(f.unequal_ranks.empty(), "bit by bit", style_)));
    absl::StrAppend(&text,
                    Line("steps", absl::StrCat(f.steps),
                         style_.Dim(absl::StrCat("in ", buckets_.size(), " buckets each"))),
                    Line("gradients averaged", Bytes(f.bytes_reduced), style_.Dim("per rank")),
                    Line("reduce bandwidth", absl::StrFormat("%.1f GB/s", f.reduce_gbps),
                         style_.Dim(one_node() ? "while the daemon reduces"
                                               : "while the daemons reduce, over the network")),
                    Line("overlap", absl::StrFormat("%.0f %%", f.overlap_percent),
                         style_.Dim("of the synchronization, hidden behind the backward pass")),
                    Line("step time", absl::StrFormat("%.2f ms", f.step_ms),
                         style_.Dim(absl::StrFormat("median; %.2f ms with overlap off",
                                                    f.step_ms_without_overlap))));
    if (const std::size_t cpus = AvailableCpus(); f.ranks >= cpus) {
      absl::StrAppend(&text, style_.Dim(absl::StrFormat(
                                 "\n  %d trainers keep this machine's %d CPUs busy: overlap gains "
                                 "time where the daemon has one to itself.\n",
                                 f.ranks, cpus)));
    }
    return text;
  }

  std::string Timeline() const {
    const std::vector<StepTrace> step = TypicalStep(traces_);
    if (step.empty()) return "";
    return absl::StrCat("\n",
                        style_.Bold(absl::StrCat("One step as it happened: step ", step[0].step)),
                        "\n\n", DrawTimeline(step, buckets_, figures_.nodes, style_));
  }

  std::string HowToAsk() const {
    const std::string socket = options_.keep ? launcher_->socket(0) : "SOCKET";
    const std::string& ctl = options_.gradsyncctl;
    std::string text = absl::StrCat(
        "\n",
        style_.Bold(one_node() ? "How to ask the daemon more" : "How to ask the daemons more"),
        "\n\n");
    if (options_.keep) {
      absl::StrAppend(&text,
                      one_node() ? "  It is still there."
                                 : "  They are still there; the job is with the daemon of node 0.",
                      " In another terminal:\n\n");
    } else {
      absl::StrAppend(&text, "  With --keep ", one_node() ? "the daemon and its" : "daemons and",
                      " trainers stay, and their SOCKET is named here. Then:\n\n");
    }
    for (const char* command : {"status", "stats", "health"}) {
      absl::StrAppend(&text, "    ", ctl, " ", command, " --socket ", socket, "\n");
    }
    for (const char* question :
         {"list", "gradsync.v1.Introspection/GetStatus", "gradsync.v1.Introspection/GetStats"}) {
      absl::StrAppend(&text, "    grpcurl -plaintext -unix ", socket, " ", question, "\n");
    }
    return text;
  }

  absl::Status WriteJson() const {
    if (options_.json.empty()) return absl::OkStatus();
    std::ofstream file(options_.json);
    file << figures_.Json();
    file.close();
    if (file) return absl::OkStatus();
    return absl::UnavailableError(absl::StrCat("cannot write ", options_.json));
  }

  const QuickstartOptions& options_;
  const TextStyle& style_;
  Launcher* const launcher_;
  std::string coordinator_;  // "" for one node
  Job job_;
  std::vector<BucketReport> buckets_;
  Traces traces_;
  Figures figures_;
};

}  // namespace

int RunQuickstart(const QuickstartOptions& options, const TextStyle& style) {
  absl::StatusOr<std::unique_ptr<Launcher>> launcher =
      Launcher::Create(options.programs, options.nodes);
  if (!launcher.ok()) {
    std::fprintf(stderr, "quickstart: %s\n", std::string(launcher.status().message()).c_str());
    return 1;
  }
  Run run(options, style, launcher->get());
  const absl::Status status = run.All();
  const int signal = (*launcher)->interrupted_by();
  launcher->reset();  // before the last words: nothing is left when they are read
  if (signal != 0) {
    std::fprintf(stderr, "\nquickstart: %s; everything is cleaned up\n",
                 std::string(status.message()).c_str());
    return 128 + signal;
  }
  if (!status.ok()) {
    std::fprintf(stderr, "\nquickstart: %s\n", std::string(status.message()).c_str());
    return 1;
  }
  const std::vector<std::string> failures = run.figures().Failures();
  for (const std::string& failure : failures) {
    std::fprintf(stderr, "\nquickstart: %s\n", failure.c_str());
  }
  return failures.empty() ? 0 : 1;
}

}  // namespace gradsync::examples
