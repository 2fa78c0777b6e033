// One rank of a real training: a small network learns handwritten digits, and gradsync averages the
// gradients while the backward pass still runs.
//
// Start here if you have a training loop of your own. Training::Join() shares the parameters and
// registers the layout. Training::Step() marks each bucket ready with its last gradient, ends the
// step, waits for it and updates the parameters. The rest of the file is flags and reports.

#include <unistd.h>

#include <algorithm>
#include <chrono>
#include <cstdint>
#include <cstdio>
#include <fstream>
#include <memory>
#include <string>
#include <utility>
#include <vector>

#include "absl/flags/flag.h"
#include "absl/flags/parse.h"
#include "absl/flags/usage.h"
#include "absl/status/status.h"
#include "absl/status/statusor.h"
#include "absl/strings/str_cat.h"
#include "absl/strings/str_format.h"
#include "absl/strings/str_join.h"
#include "client/examples/batch_order.h"
#include "client/examples/digits_data.h"
#include "client/examples/mlp.h"
#include "client/examples/recipe.h"
#include "client/examples/sgd.h"
#include "gradsync/client.h"

ABSL_FLAG(std::string, data, "client/examples/data/digits.csv.gz", "The handwritten digits.");
ABSL_FLAG(std::string, save, "", "Writes the final parameters to this file, as float32.");
ABSL_FLAG(std::uint64_t, steps, gradsync::examples::Recipe().steps, "How many steps to train.");
ABSL_FLAG(std::uint64_t, batch, gradsync::examples::Recipe().largest_batch,
          "Samples per step, over all ranks.");
ABSL_FLAG(std::string, overlap, "on",
          "When a bucket is marked ready: on: with its last gradient; off: after the backward "
          "pass; alternate: on in odd steps, off in even ones, which compares the two.");
ABSL_FLAG(bool, hold, false, "Keeps the session after the training until standard input ends.");

namespace gradsync::examples {
namespace {

// This model is small: no two layers fit, so that each has a bucket of its own. Real models want
// the default.
constexpr std::uint64_t kBucketCapBytes = 4u << 10;
constexpr std::uint64_t kReports = 24;
constexpr std::uint64_t kLongestSilence = 50;  // steps

// Adds the step to an error, and keeps the details that other programs read.
absl::Status InStep(std::uint64_t step, const absl::Status& status) {
  absl::Status located(status.code(), absl::StrCat("step ", step, ": ", status.message()));
  status.ForEachPayload([&located](absl::string_view type, const absl::Cord& payload) {
    located.SetPayload(type, payload);
  });
  return located;
}

// Reports are lines of JSON.
void Report(const std::string& fields) {
  std::printf("{%s}\n", fields.c_str());
  std::fflush(stdout);
}

// One rank's training. Not thread-safe.
class Training {
 public:
  // `digits`, `session` and `model` outlive this.
  Training(const Digits& digits, const Recipe& recipe, Session* session, Mlp* model)
      : digits_(digits),
        recipe_(recipe),
        session_(session),
        model_(model),
        order_(digits.train, recipe.GlobalBatch(session->world_size()), recipe.seed),
        sgd_(model->parameters(), recipe.momentum) {}

  // Every rank begins with the parameters of rank 0.
  absl::Status Join() {
    absl::Status status =
        session_->Broadcast(model_->values().data(), model_->values().size() * sizeof(float), 0);
    if (!status.ok()) return status;

    LayoutSpec spec;
    spec.name = "digits";
    spec.bucket_cap_bytes = kBucketCapBytes;
    spec.first_bucket_cap_bytes = kBucketCapBytes;
    for (const Mlp::Parameter& parameter : model_->parameters()) {
      spec.parameters.push_back({parameter.name, parameter.shape, DataType::kFloat32});
    }
    absl::StatusOr<std::unique_ptr<Layout>> layout = session_->RegisterLayout(spec);
    if (!layout.ok()) return layout.status();
    layout_ = *std::move(layout);

    gradients_in_bucket_.resize(layout_->bucket_count());
    for (std::size_t i = 0; i < layout_->parameter_count(); ++i) {
      const GradientView gradient = layout_->gradient(i);
      gradients_.push_back(static_cast<float*>(gradient.data));
      ++gradients_in_bucket_[gradient.bucket];
    }
    return absl::OkStatus();
  }

  // Trains one step; `number` counts from 1. Returns the loss of this rank's shard.
  absl::StatusOr<float> Step(std::uint64_t number, bool overlap) {
    const std::uint64_t step = layout_->next_step();
    const Samples shard = order_.Shard(number, session_->rank(), session_->world_size());
    const float loss = model_->Forward(shard);

    // The backward pass writes each gradient straight into its bucket. The bucket goes to the
    // daemon with its last gradient, while the layers before it are still to be computed.
    absl::Status marked;
    std::vector<std::size_t> missing = gradients_in_bucket_;
    model_->Backward(absl::MakeConstSpan(gradients_), [&](std::size_t parameter) {
      const std::size_t bucket = layout_->gradient(parameter).bucket;
      if (--missing[bucket] == 0 && overlap) marked.Update(layout_->MarkReady(step, bucket));
    });
    for (std::size_t i = 0; !overlap && i < missing.size(); ++i) {
      marked.Update(layout_->MarkReady(step, i));
    }
    if (!marked.ok()) return marked;

    if (absl::Status status = layout_->EndStep(step); !status.ok()) return status;
    if (auto result = layout_->WaitStep(step); !result.ok()) return result.status();
    // The buckets now hold the average over the ranks, the same bits on every one.
    sgd_.Step(model_->parameters(), {gradients_.data(), gradients_.size()},
              recipe_.LearningRate(number));
    return loss;
  }

  // Reports the loss over all ranks. Rank 0 evaluates; the others wait, so that the next step
  // begins on all ranks at once.
  absl::Status ReportProgress(std::uint64_t number, float loss) {
    absl::Status status = session_->AllReduce(&loss, 1, DataType::kFloat32, ReduceOp::kAverage);
    if (!status.ok()) return status;
    if (session_->rank() == 0) {
      Report(absl::StrFormat(R"("step": %d, "loss": %.6g, "accuracy": %.6g)", number, loss,
                             Accuracy()));
    }
    return session_->Barrier();
  }

  // The last report: what each step took, which layers each bucket holds, and the accuracy.
  void ReportResult(const std::vector<double>& step_ms) {
    std::vector<std::string> buckets(layout_->bucket_count());
    for (std::size_t i = 0; i < buckets.size(); ++i) {
      std::vector<std::string> names;
      for (std::size_t p = 0; p < layout_->parameter_count(); ++p) {
        if (layout_->gradient(p).bucket != i) continue;
        names.push_back(absl::StrCat("\"", model_->parameters()[p].name, "\""));
      }
      const BucketView bucket = layout_->bucket(i);
      buckets[i] =
          absl::StrFormat(R"({"bytes": %d, "parameters": [%s]})",
                          bucket.count * ItemSize(bucket.dtype), absl::StrJoin(names, ", "));
    }
    Report(absl::StrFormat(R"("accuracy": %.6g, "buckets": [%s], "step_ms": [%s])", Accuracy(),
                           absl::StrJoin(buckets, ", "), absl::StrJoin(step_ms, ", ")));
  }

 private:
  // Percent of the held-out samples.
  double Accuracy() {
    return 100.0 * static_cast<double>(model_->CountCorrect(digits_.test)) /
           static_cast<double>(digits_.test.size());
  }

  // Constant after construction.
  const Digits& digits_;
  const Recipe& recipe_;
  Session* const session_;
  Mlp* const model_;

  BatchOrder order_;
  Sgd sgd_;
  // Constant after Join().
  std::unique_ptr<Layout> layout_;
  std::vector<float*> gradients_;  // views into the layout's arena
  std::vector<std::size_t> gradients_in_bucket_;
};

// Returns the milliseconds of each step.
absl::StatusOr<std::vector<double>> Train(const Recipe& recipe, const std::string& overlap,
                                          Training* training) {
  using Clock = std::chrono::steady_clock;
  if (absl::Status status = training->Join(); !status.ok()) return status;
  const std::uint64_t report_every =
      std::clamp<std::uint64_t>(recipe.steps / kReports, 1, kLongestSilence);
  std::vector<double> step_ms;
  for (std::uint64_t number = 1; number <= recipe.steps; ++number) {
    const Clock::time_point begin = Clock::now();
    const bool early = overlap == "on" || (overlap == "alternate" && number % 2 == 1);
    const absl::StatusOr<float> loss = training->Step(number, early);
    if (!loss.ok()) return InStep(number, loss.status());
    step_ms.push_back(std::chrono::duration<double, std::milli>(Clock::now() - begin).count());
    if (number % report_every != 0) continue;
    if (absl::Status status = training->ReportProgress(number, *loss); !status.ok()) {
      return InStep(number, status);
    }
  }
  return step_ms;
}

absl::Status Save(const std::string& path, Mlp* model) {
  if (path.empty()) return absl::OkStatus();
  std::ofstream file(path, std::ios::binary);
  file.write(reinterpret_cast<const char*>(model->values().data()),
             static_cast<std::streamsize>(model->values().size() * sizeof(float)));
  file.close();
  return file ? absl::OkStatus() : absl::UnavailableError(absl::StrCat("cannot write ", path));
}

void WaitForEndOfInput() {
  char ignored[256];
  while (read(STDIN_FILENO, ignored, sizeof(ignored)) > 0) {
  }
}

absl::Status Run() {
  const std::string overlap = absl::GetFlag(FLAGS_overlap);
  if (overlap != "on" && overlap != "off" && overlap != "alternate") {
    return absl::InvalidArgumentError("--overlap takes on, off or alternate");
  }
  Recipe recipe;
  recipe.steps = absl::GetFlag(FLAGS_steps);
  recipe.largest_batch = absl::GetFlag(FLAGS_batch);
  const absl::StatusOr<Digits> digits = LoadDigits(absl::GetFlag(FLAGS_data));
  if (!digits.ok()) return digits.status();
  if (recipe.largest_batch > digits->train.size()) {
    return absl::InvalidArgumentError(
        absl::StrCat("--batch is more than the ", digits->train.size(), " samples"));
  }
  const absl::StatusOr<SessionOptions> options = SessionOptions::FromEnvironment();
  if (!options.ok()) return options.status();
  if (recipe.GlobalBatch(options->world_size) == 0) {
    return absl::InvalidArgumentError(absl::StrCat("WORLD_SIZE ", options->world_size,
                                                   " leaves a rank without a sample; at most ",
                                                   recipe.largest_batch));
  }

  absl::StatusOr<std::unique_ptr<Session>> session = Session::Join(*options);
  if (!session.ok()) return session.status();
  // Every rank draws weights of its own, and then gets those of rank 0.
  Mlp model(recipe.widths, recipe.seed + (*session)->rank());
  Training training(*digits, recipe, session->get(), &model);
  const absl::StatusOr<std::vector<double>> step_ms = Train(recipe, overlap, &training);
  if (!step_ms.ok()) return step_ms.status();
  absl::Status saved = Save(absl::GetFlag(FLAGS_save), &model);
  if (!saved.ok()) return saved;
  training.ReportResult(*step_ms);
  if (absl::GetFlag(FLAGS_hold)) WaitForEndOfInput();
  return (*session)->Leave();
}

}  // namespace
}  // namespace gradsync::examples

int main(int argc, char** argv) {
  absl::SetProgramUsageMessage(
      "trains a small network on handwritten digits, as one rank of a gradsync job.\n\n"
      "Rank, world size and job come from RANK, WORLD_SIZE, TORCHELASTIC_RUN_ID, MASTER_ADDR and "
      "MASTER_PORT, the daemon's socket from GRADSYNC_SOCKET.");
  absl::ParseCommandLine(argc, argv);
  const absl::Status status = gradsync::examples::Run();
  if (status.ok()) return 0;
  std::fprintf(stderr, "digits_trainer: %s\n",
               status.ToString(absl::StatusToStringMode::kWithNoExtraData).c_str());
  return 1;
}
