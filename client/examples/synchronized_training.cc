#include "client/examples/synchronized_training.h"

#include <algorithm>
#include <cstdint>
#include <cstring>
#include <deque>
#include <memory>
#include <string>
#include <utility>
#include <vector>

#include "absl/strings/str_cat.h"
#include "client/examples/batch_order.h"
#include "client/examples/sgd.h"
#include "client/examples/step_trace.h"

namespace gradsync::examples {
namespace {

// This model is small: no two layers fit, so that each has a bucket of its own. Real ones want the
// default.
constexpr std::uint64_t kBucketCapBytes = 4u << 10;
constexpr std::uint64_t kReports = 24;
constexpr std::uint64_t kLongestSilence = 50;  // steps
constexpr std::size_t kTracesKept = 1000;      // of a long run: the last ones

LayoutSpec SpecOf(const Mlp& model) {
  LayoutSpec spec;
  spec.name = "digits";
  spec.bucket_cap_bytes = kBucketCapBytes;
  spec.first_bucket_cap_bytes = kBucketCapBytes;
  for (const Mlp::Parameter& parameter : model.parameters()) {
    spec.parameters.push_back({parameter.name, parameter.shape, DataType::kFloat32});
  }
  return spec;
}

JoinedReport Describe(const Layout& layout, const Mlp& model) {
  JoinedReport report;
  report.buckets.resize(layout.bucket_count());
  for (std::size_t i = 0; i < layout.bucket_count(); ++i) {
    const BucketView bucket = layout.bucket(i);
    report.buckets[i].bytes = bucket.count * ItemSize(bucket.dtype);
  }
  for (std::size_t i = 0; i < model.parameters().size(); ++i) {
    report.buckets[layout.gradient(i).bucket].parameters.push_back(model.parameters()[i].name);
  }
  return report;
}

std::vector<BucketTrace> TracesOf(const std::vector<BucketTimes>& buckets) {
  std::vector<BucketTrace> traces;
  for (const BucketTimes& times : buckets) {
    traces.push_back({times.ready_ns, times.start_ns, times.finish_ns});
  }
  return traces;
}

absl::Status InStep(std::uint64_t step, const absl::Status& status) {
  absl::Status located(status.code(), absl::StrCat("step ", step, ": ", status.message()));
  status.ForEachPayload([&located](absl::string_view type, const absl::Cord& payload) {
    located.SetPayload(type, payload);
  });
  return located;
}

// One rank's training. Not thread-safe.
class Training {
 public:
  Training(const Digits& digits, const Recipe& recipe, Overlap overlap, Session* session,
           Mlp* model, const std::function<void(const Report&)>& report)
      : digits_(digits),
        recipe_(recipe),
        overlap_(overlap),
        session_(session),
        model_(model),
        report_(report),
        order_(digits.train, recipe.GlobalBatch(session->world_size()), recipe.seed),
        sgd_(model->parameters(), recipe.momentum) {}

  absl::Status Run() {
    if (absl::Status status = Join(); !status.ok()) return status;
    const std::uint64_t report_every =
        std::clamp<std::uint64_t>(recipe_.steps / kReports, 1, kLongestSilence);
    std::deque<StepTrace> traces;
    bool evaluated = false;
    for (std::uint64_t number = 1; number <= recipe_.steps; ++number) {
      float loss = 0;
      StepTrace trace;
      trace.after_evaluation = evaluated;
      if (absl::Status status = Step(number, &loss, &trace); !status.ok()) {
        return InStep(number, status);
      }
      traces.push_back(std::move(trace));
      if (traces.size() > kTracesKept) traces.pop_front();
      evaluated = number % report_every == 0;
      if (!evaluated) continue;
      if (absl::Status status = ReportProgress(number, loss); !status.ok()) {
        return InStep(number, status);
      }
    }
    if (absl::Status status = session_->Barrier(); !status.ok()) return status;
    for (const StepTrace& trace : traces) report_(trace);
    return Finish();
  }

 private:
  absl::Status Join() {
    // Everyone begins where rank 0 begins.
    absl::Status status =
        session_->Broadcast(model_->values().data(), model_->values().size() * sizeof(float), 0);
    if (!status.ok()) return status;
    absl::StatusOr<std::unique_ptr<Layout>> layout = session_->RegisterLayout(SpecOf(*model_));
    if (!layout.ok()) return layout.status();
    layout_ = *std::move(layout);

    gradients_in_bucket_.resize(layout_->bucket_count());
    for (std::size_t i = 0; i < layout_->parameter_count(); ++i) {
      const GradientView gradient = layout_->gradient(i);
      gradients_.push_back(static_cast<float*>(gradient.data));
      ++gradients_in_bucket_[gradient.bucket];
    }
    report_(Describe(*layout_, *model_));
    return absl::OkStatus();
  }

  absl::Status Step(std::uint64_t number, float* loss, StepTrace* trace) {
    const std::uint64_t step = layout_->next_step();
    trace->step = number;
    trace->overlapped = overlap_ == Overlap::kOn || (overlap_ == Overlap::kAlternate && number % 2);
    trace->marked_ns.resize(layout_->bucket_count());
    trace->begin_ns = MonotonicNs();
    const Samples shard = order_.Shard(number, session_->rank(), session_->world_size());
    *loss = model_->Forward(shard);
    trace->forward_end_ns = MonotonicNs();

    // The backward pass writes each gradient straight into its bucket. A bucket goes to the daemon
    // with its last one, while the layers before it are still to be computed.
    absl::Status marked;
    const auto mark_ready = [&](std::size_t bucket) {
      trace->marked_ns[bucket] = MonotonicNs();
      marked.Update(layout_->MarkReady(step, bucket));
    };
    std::vector<std::size_t> left = gradients_in_bucket_;
    model_->Backward(absl::MakeConstSpan(gradients_), [&](std::size_t parameter) {
      trace->layer_end_ns.push_back(MonotonicNs());
      const std::size_t bucket = layout_->gradient(parameter).bucket;
      if (--left[bucket] == 0 && trace->overlapped) mark_ready(bucket);
    });
    for (std::size_t i = 0; !trace->overlapped && i < left.size(); ++i) mark_ready(i);
    if (!marked.ok()) return marked;

    if (absl::Status status = layout_->EndStep(step); !status.ok()) return status;
    absl::StatusOr<StepResult> result = layout_->WaitStep(step);
    if (!result.ok()) return result.status();
    trace->done_ns = MonotonicNs();
    trace->buckets = TracesOf(result->buckets);

    // The buckets now hold the average over the ranks, the same bits on every one.
    sgd_.Step(model_->parameters(), {gradients_.data(), gradients_.size()},
              recipe_.LearningRate(number));
    trace->end_ns = MonotonicNs();
    return absl::OkStatus();
  }

  absl::Status ReportProgress(std::uint64_t number, float loss) {
    absl::Status status = session_->AllReduce(&loss, 1, DataType::kFloat32, ReduceOp::kAverage);
    if (status.ok() && session_->rank() == 0) report_(ProgressReport{number, loss, Accuracy()});
    return status;
  }

  absl::Status Finish() {
    const absl::Span<const float> mine = model_->values();
    std::vector<float> of_rank_0(mine.begin(), mine.end());
    const std::size_t bytes = mine.size() * sizeof(float);
    absl::Status status = session_->Broadcast(of_rank_0.data(), bytes, 0);
    if (!status.ok()) return status;
    FinishedReport finished;
    finished.parameters_equal = std::memcmp(of_rank_0.data(), mine.data(), bytes) == 0;
    if (session_->rank() == 0) finished.accuracy = Accuracy();
    report_(finished);
    return absl::OkStatus();
  }

  double Accuracy() {
    return 100.0 * static_cast<double>(model_->CountCorrect(digits_.test)) /
           static_cast<double>(digits_.test.size());
  }

  // Constant after construction.
  const Digits& digits_;
  const Recipe& recipe_;
  const Overlap overlap_;
  Session* const session_;
  Mlp* const model_;
  const std::function<void(const Report&)>& report_;

  BatchOrder order_;
  Sgd sgd_;
  std::unique_ptr<Layout> layout_;
  std::vector<float*> gradients_;  // views into the layout's arena
  std::vector<std::size_t> gradients_in_bucket_;
};

}  // namespace

absl::Status TrainSynchronized(const Digits& digits, const Recipe& recipe, Overlap overlap,
                               Session* session, Mlp* model,
                               const std::function<void(const Report&)>& report) {
  return Training(digits, recipe, overlap, session, model, report).Run();
}

}  // namespace gradsync::examples
