// A trainer that reads commands from standard input, one per line. It answers each with one line of
// NAME=VALUE separated by tabs: code, reason, message, start_ns, end_ns (CLOCK_MONOTONIC around the
// call) and the fields of the command.
//
//   join socket=S rank=N world=N job=J [token=T] [policy=hold|continue] [state=trainer]
//        [hold_timeout_ms=N] [divisor=world] [step_timeout_ms=N] [connect_timeout_ms=N]
//        [coordinator=HOST:PORT]        field "replacement"
//   exact_step PER_NODE[,...] [wire=bfloat16]  a step of float32 values whose sums round; every bit
//                                          of the result is compared. PER_NODE: ranks on each node,
//                                          in order. wire: the type between nodes, else float32
//   register [layout=L] [buckets=N] [count=N] [dtype=D] [op=sum|min|max] [timeout_ms=N]
//            [parameters=a:2x3,b:4]
//   replace ...                            as register, but replaces the layout of that name
//   release [layout=L]
//   next [layout=L]                        field "step"
//   mark STEP BUCKET
//   end STEP
//   abandon STEP WHY
//   wait STEP [timeout_ms=N] [ranks=0,2]
//   wait_bucket STEP BUCKET [timeout_ms=N]
//   step [layout=L] [ranks=0,2] [times=N]  runs whole steps, from next_step() on
//   give_up_step                           abandons the step and waits for its verdict
//   barrier [timeout_ms=N]
//   broadcast BYTES ROOT
//   allreduce COUNT [offset=N]
//   collective DESCRIPTION
//   query_collectives
//   leave | leave_stay | drop
//   fork | raw_fork                        makes a child that holds every descriptor until the test
//                                          ends; raw: without pthread_atfork's handlers
//   fork_calls                             makes a child that tries every call and exits; the
//                                          fields show the results
//   async COMMAND | result                 runs COMMAND on a thread | waits for its result
//   become UID                             changes user and group
//   raw_open | raw_register                as join and register, without the library or a mapping
//   claim NONCE_HEX socket=S               asks the side socket S
//   jobs socket=S                          field "jobs": the jobs that GetStatus shows, each as
//                                          JOB/UID/SESSIONS
//
// `mark` writes the bucket first. `wait` compares every element with the reduction of what the
// ranks wrote, and returns the code WRONG if one differs.

#include <fcntl.h>
#include <grp.h>
#include <grpcpp/grpcpp.h>
#include <sys/prctl.h>
#include <sys/syscall.h>
#include <sys/wait.h>
#include <unistd.h>

#include <algorithm>
#include <array>
#include <chrono>
#include <cmath>
#include <csignal>
#include <cstddef>
#include <cstring>
#include <iostream>
#include <map>
#include <memory>
#include <numeric>
#include <set>
#include <sstream>
#include <string>
#include <thread>
#include <vector>

#include "absl/strings/escaping.h"
#include "absl/strings/numbers.h"
#include "absl/strings/str_cat.h"
#include "absl/strings/str_join.h"
#include "absl/strings/str_replace.h"
#include "absl/strings/str_split.h"
#include "gradsync/client.h"
#include "gradsync/v1/introspection.grpc.pb.h"
#include "tests/fault/raw_session.h"
#include "tests/kit/deadline.h"
#include "tests/reduce/half_reference.h"

namespace gradsync::fault {
namespace {

constexpr int kLifeline = 3;  // a descriptor that reaches its end when the test ends

using Answer = std::vector<std::pair<std::string, std::string>>;

struct Command {
  std::string name;
  std::vector<std::string> words;              // without "="
  std::map<std::string, std::string> options;  // NAME=VALUE
  std::string rest;                            // the text after the name

  std::string Option(const std::string& name_of, const std::string& otherwise) const {
    const auto found = options.find(name_of);
    return found == options.end() ? otherwise : found->second;
  }
  std::uint64_t Number(const std::string& name_of, std::uint64_t otherwise) const {
    std::uint64_t value = otherwise;
    const auto found = options.find(name_of);
    if (found != options.end() && !absl::SimpleAtoi(found->second, &value)) std::abort();
    return value;
  }
  std::uint64_t Word(std::size_t index) const {
    std::uint64_t value = 0;
    if (index >= words.size() || !absl::SimpleAtoi(words[index], &value)) std::abort();
    return value;
  }
  absl::Duration Timeout() const {
    return options.count("timeout_ms") > 0
               ? absl::Milliseconds(static_cast<std::int64_t>(Number("timeout_ms", 0)))
               : absl::Milliseconds(kPatienceMs);
  }
};

Command Parse(const std::string& line) {
  Command command;
  std::istringstream words(line);
  words >> command.name;
  std::getline(words >> std::ws, command.rest);
  std::istringstream rest(command.rest);
  for (std::string word; rest >> word;) {
    const std::size_t equals = word.find('=');
    if (equals == std::string::npos) {
      command.words.push_back(word);
    } else {
      command.options[word.substr(0, equals)] = word.substr(equals + 1);
    }
  }
  return command;
}

void Print(const Answer& answer) {
  std::string line;
  for (const auto& [name, value] : answer) {
    absl::StrAppend(&line, line.empty() ? "" : "\t", name, "=",
                    absl::StrReplaceAll(value, {{"\t", " "}, {"\n", " "}}));
  }
  std::cout << line << std::endl;
}

void AddStatus(const absl::Status& status, Answer* answer) {
  answer->emplace_back("code", absl::StatusCodeToString(status.code()));
  answer->emplace_back("reason", ErrorReason(status));
  answer->emplace_back("message", std::string(status.message()));
  for (const FieldName name : {field::kJob, field::kRank, field::kOtherRank, field::kChannel,
                               field::kStep, field::kBucket, field::kNode}) {
    const std::string value = ErrorField(status, name);
    if (!value.empty()) answer->emplace_back(std::string(name.text()), value);
  }
}

// ---- What the ranks write and what they expect. The values are exact in every dtype.

// Written() repeats itself after this many elements.
constexpr std::uint64_t kPeriod = 8;

double Written(std::uint32_t rank, std::uint64_t step, std::size_t bucket, std::uint64_t i) {
  return (rank + 1.0) * static_cast<double>((step + bucket + i) % kPeriod + 1);
}

void Store(DataType dtype, void* data, std::uint64_t i, double value) {
  switch (dtype) {
    case DataType::kFloat32:
      static_cast<float*>(data)[i] = static_cast<float>(value);
      break;
    case DataType::kFloat64:
      static_cast<double*>(data)[i] = value;
      break;
    case DataType::kFloat16:
      static_cast<std::uint16_t*>(data)[i] = daemon::NearestFloat16(value);
      break;
    case DataType::kBfloat16:
      static_cast<std::uint16_t*>(data)[i] = daemon::NearestBfloat16(value);
      break;
    case DataType::kInt8:
    case DataType::kUint8:
      static_cast<std::int8_t*>(data)[i] = static_cast<std::int8_t>(value);
      break;
    case DataType::kInt16:
      static_cast<std::int16_t*>(data)[i] = static_cast<std::int16_t>(value);
      break;
    case DataType::kInt32:
      static_cast<std::int32_t*>(data)[i] = static_cast<std::int32_t>(value);
      break;
    case DataType::kInt64:
      static_cast<std::int64_t*>(data)[i] = static_cast<std::int64_t>(value);
      break;
    default:
      std::abort();
  }
}

double Load(DataType dtype, const void* data, std::uint64_t i) {
  switch (dtype) {
    case DataType::kFloat32:
      return static_cast<const float*>(data)[i];
    case DataType::kFloat64:
      return static_cast<const double*>(data)[i];
    case DataType::kFloat16:
      return daemon::Float16Value(static_cast<const std::uint16_t*>(data)[i]);
    case DataType::kBfloat16:
      return daemon::Bfloat16Value(static_cast<const std::uint16_t*>(data)[i]);
    case DataType::kInt8:
    case DataType::kUint8:
      return static_cast<const std::int8_t*>(data)[i];
    case DataType::kInt16:
      return static_cast<const std::int16_t*>(data)[i];
    case DataType::kInt32:
      return static_cast<const std::int32_t*>(data)[i];
    case DataType::kInt64:
      return static_cast<double>(static_cast<const std::int64_t*>(data)[i]);
    default:
      break;
  }
  std::abort();
}

// Writes `rank`'s elements of `bucket`. There can be millions: only the first ones are computed.
void Write(const BucketView& view, std::uint32_t rank, std::uint64_t step, std::size_t bucket) {
  std::uint64_t written = std::min(view.count, kPeriod);
  for (std::uint64_t i = 0; i < written; ++i) {
    Store(view.dtype, view.data, i, Written(rank, step, bucket, i));
  }
  auto* const bytes = static_cast<std::byte*>(view.data);
  const std::size_t item = ItemSize(view.dtype);
  while (written < view.count) {
    const std::uint64_t more = std::min(written, view.count - written);
    std::memcpy(bytes + written * item, bytes, more * item);
    written += more;
  }
}

std::uint32_t BitsOf(float value) {
  std::uint32_t bits;
  std::memcpy(&bits, &value, sizeof(bits));
  return bits;
}

float RoundedToBfloat16(float value) {
  return static_cast<float>(daemon::Bfloat16Value(daemon::NearestBfloat16(value)));
}

double Tolerance(DataType dtype) {
  return dtype == DataType::kFloat32 || dtype == DataType::kFloat64 ? 1e-6 : 0.01;
}

ReduceOp OpNamed(const std::string& name) {
  for (const ReduceOp op : {ReduceOp::kSum, ReduceOp::kAverage, ReduceOp::kMin, ReduceOp::kMax}) {
    if (name == ReduceOpName(op)) return op;
  }
  std::abort();
}

// What `op` makes of value(rank) over `ranks`, which are not empty; `divisor` is for averages. It
// allocates nothing: the caller has millions of elements, and sanitizers slow an allocation down.
template <typename Value>
double Reduced(ReduceOp op, const std::vector<std::uint32_t>& ranks, double divisor,
               const Value& value) {
  double result = value(ranks.front());
  for (std::size_t i = 1; i < ranks.size(); ++i) {
    const double next = value(ranks[i]);
    if (op == ReduceOp::kMin) {
      result = std::min(result, next);
    } else if (op == ReduceOp::kMax) {
      result = std::max(result, next);
    } else {
      result += next;
    }
  }
  return op == ReduceOp::kAverage ? result / divisor : result;
}

DataType TypeNamed(const std::string& name) {
  for (int i = 1; i <= 9; ++i) {
    const auto type = static_cast<DataType>(i);
    if (name == DataTypeName(type)) return type;
  }
  std::abort();
}

std::vector<std::uint64_t> ShapeOf(const std::string& text) {
  std::vector<std::uint64_t> shape;
  for (const auto& extent : absl::StrSplit(text, 'x')) {
    shape.emplace_back();
    if (!absl::SimpleAtoi(extent, &shape.back())) std::abort();
  }
  return shape;
}

// ---- The trainer

struct LayoutUse {
  std::unique_ptr<Layout> layout;
  ReduceOp op = ReduceOp::kAverage;
  // Step and bucket of every mark. From the mark on the bucket belongs to the daemon.
  std::set<std::pair<std::uint64_t, std::size_t>> marked;
};

class Rank {
 public:
  Answer Run(const Command& command);

 private:
  absl::Status Call(const Command& command, Answer* answer);
  absl::Status Join(const Command& command, Answer* answer);
  absl::Status Register(const Command& command, Answer* answer);
  absl::Status OnLayout(const Command& command, Answer* answer);
  absl::Status Steps(LayoutUse* use, const Command& command, Answer* answer);
  absl::Status ExactStep(LayoutUse* use, const Command& command);
  absl::Status AllReduce(const Command& command);
  absl::Status Broadcast(const Command& command);
  absl::Status Check(const LayoutUse& use, std::uint64_t step, std::size_t bucket,
                     const Command& command) const;
  absl::Status CheckAll(const LayoutUse& use, std::uint64_t step, const Command& command) const;
  static absl::Status CheckStats(const LayoutUse& use, const StepResult& result);
  absl::Status ForkCalls(Answer* answer);
  absl::Status Raw(const Command& command, Answer* answer);

  std::vector<std::uint32_t> RanksOf(const Command& command) const {
    std::vector<std::uint32_t> ranks(options_.world_size);
    std::iota(ranks.begin(), ranks.end(), 0);
    if (command.options.count("ranks") == 0) return ranks;
    ranks.clear();
    for (const std::uint64_t rank :
         ShapeOf(absl::StrReplaceAll(command.options.at("ranks"), {{",", "x"}}))) {
      ranks.push_back(static_cast<std::uint32_t>(rank));
    }
    return ranks;
  }

  SessionOptions options_;
  std::unique_ptr<Session> session_;
  std::map<std::string, LayoutUse> layouts_;
  std::unique_ptr<RawSession> raw_;
};

Answer Rank::Run(const Command& command) {
  Answer answer;
  const std::uint64_t start_ns = NowNs();
  const absl::Status status = Call(command, &answer);
  const std::uint64_t end_ns = NowNs();
  if (status.code() == absl::StatusCode::kDataLoss) {
    answer.emplace_back("code", "WRONG");
    answer.emplace_back("message", std::string(status.message()));
  } else {
    AddStatus(status, &answer);
  }
  answer.emplace_back("start_ns", absl::StrCat(start_ns));
  answer.emplace_back("end_ns", absl::StrCat(end_ns));
  return answer;
}

absl::Status Rank::Check(const LayoutUse& use, std::uint64_t step, std::size_t bucket,
                         const Command& command) const {
  const auto ranks = RanksOf(command);
  const double divisor =
      options_.divisor == Divisor::kWorld ? options_.world_size : static_cast<double>(ranks.size());
  std::array<double, kPeriod> reduced;
  for (std::uint64_t i = 0; i < kPeriod; ++i) {
    reduced[i] = Reduced(use.op, ranks, divisor,
                         [&](std::uint32_t rank) { return Written(rank, step, bucket, i); });
  }
  const BucketView view = use.layout->bucket(bucket);
  const double tolerance = Tolerance(view.dtype);
  for (std::uint64_t i = 0; i < view.count; ++i) {
    const double expected = reduced[i % kPeriod];
    const double found = Load(view.dtype, view.data, i);
    if (std::abs(found - expected) > tolerance * expected) {
      return absl::DataLossError(absl::StrCat("step ", step, ", bucket ", bucket, ", element ", i,
                                              ": ", found, " instead of ", expected));
    }
  }
  return absl::OkStatus();
}

absl::Status Rank::CheckAll(const LayoutUse& use, std::uint64_t step,
                            const Command& command) const {
  for (std::size_t bucket = 0; bucket < use.layout->bucket_count(); ++bucket) {
    if (auto status = Check(use, step, bucket, command); !status.ok()) return status;
  }
  return absl::OkStatus();
}

// Checks the gradient statistics in the step's result against the contents of the buckets.
absl::Status Rank::CheckStats(const LayoutUse& use, const StepResult& result) {
  if (result.stats.size() != use.layout->bucket_count()) {
    return absl::DataLossError(absl::StrCat("statistics of ", result.stats.size(), " buckets"));
  }
  for (std::size_t bucket = 0; bucket < result.stats.size(); ++bucket) {
    const BucketView view = use.layout->bucket(bucket);
    if (IsOrderFree(use.op, view.dtype)) {  // nothing is measured
      if (std::isnan(result.stats[bucket].sum_of_squares)) continue;
      return absl::DataLossError(absl::StrCat("statistics of ", DataTypeName(view.dtype)));
    }
    double sum = 0;
    for (std::uint64_t i = 0; i < view.count; ++i) {
      const double value = Load(view.dtype, view.data, i);
      sum += value * value;
    }
    const GradientStats& stats = result.stats[bucket];
    if (std::abs(stats.sum_of_squares - sum) > 1e-5 * sum || stats.non_finite != 0) {
      return absl::DataLossError(absl::StrCat(
          "step ", result.step, ", bucket ", bucket, ": sum of squares ", stats.sum_of_squares,
          " instead of ", sum, ", ", stats.non_finite, " elements that are not finite"));
    }
  }
  return absl::OkStatus();
}

absl::Status Rank::Join(const Command& command, Answer* answer) {
  options_ = SessionOptions();
  options_.socket = command.Option("socket", "");
  options_.job_id = command.Option("job", "job");
  options_.token = command.Option("token", "");
  options_.coordinator = command.Option("coordinator", "");
  options_.rank = static_cast<std::uint32_t>(command.Number("rank", 0));
  options_.world_size = static_cast<std::uint32_t>(command.Number("world", 1));
  const std::string policy = command.Option("policy", "abort");
  if (policy == "hold") options_.on_rank_loss = LossPolicy::kHold;
  if (policy == "continue") options_.on_rank_loss = LossPolicy::kContinue;
  if (command.Option("state", "") == "trainer") options_.state_source = StateSource::kTrainer;
  options_.hold_timeout =
      absl::Milliseconds(static_cast<std::int64_t>(command.Number("hold_timeout_ms", 0)));
  if (command.Option("divisor", "") == "world") options_.divisor = Divisor::kWorld;
  options_.step_timeout =
      absl::Milliseconds(static_cast<std::int64_t>(command.Number("step_timeout_ms", 0)));
  options_.connect_timeout = absl::Milliseconds(
      static_cast<std::int64_t>(command.Number("connect_timeout_ms", kPatienceMs)));
  layouts_.clear();
  session_.reset();
  auto session = Session::Join(options_);
  if (!session.ok()) return session.status();
  session_ = *std::move(session);
  answer->emplace_back("generation", absl::StrCat(session_->generation()));
  answer->emplace_back("incarnation", absl::StrCat(session_->incarnation()));
  answer->emplace_back("replacement", session_->is_replacement() ? "yes" : "no");
  return absl::OkStatus();
}

absl::Status Rank::Register(const Command& command, Answer* answer) {
  LayoutSpec spec;
  spec.name = command.Option("layout", "default");
  spec.op = OpNamed(command.Option("op", "average"));
  spec.timeout = command.Timeout();
  const DataType dtype = TypeNamed(command.Option("dtype", "float32"));
  if (command.options.count("parameters") > 0) {
    for (const auto& part : absl::StrSplit(command.options.at("parameters"), ',')) {
      const std::vector<std::string> pieces = absl::StrSplit(part, ':');
      spec.parameters.push_back({pieces.at(0), ShapeOf(pieces.at(1)), dtype});
    }
  } else {
    spec.explicit_buckets.assign(command.Number("buckets", 2),
                                 {dtype, command.Number("count", 1000)});
  }
  auto layout = command.name == "replace"
                    ? session_->ReplaceLayout(*layouts_.at(spec.name).layout, spec)
                    : session_->RegisterLayout(spec);
  if (!layout.ok()) return layout.status();
  answer->emplace_back("buckets", absl::StrCat((*layout)->bucket_count()));
  layouts_[spec.name] = LayoutUse{*std::move(layout), spec.op, {}};
  return absl::OkStatus();
}

absl::Status Rank::OnLayout(const Command& command, Answer* answer) {
  LayoutUse& use = layouts_.at(command.Option("layout", "default"));
  Layout& layout = *use.layout;
  if (command.name == "next") {
    answer->emplace_back("step", absl::StrCat(layout.next_step()));
    return absl::OkStatus();
  }
  if (command.name == "release") return layout.Release();
  if (command.name == "step") return Steps(&use, command, answer);
  if (command.name == "exact_step") return ExactStep(&use, command);
  if (command.name == "give_up_step") {
    const std::uint64_t given_up = layout.next_step();
    if (auto status = layout.AbandonStep(given_up, "given up"); !status.ok()) return status;
    return layout.WaitStep(given_up, command.Timeout()).status();
  }
  const std::uint64_t step = command.Word(0);
  if (command.name == "mark") {
    const std::size_t bucket = command.Word(1);
    if (bucket < layout.bucket_count() && step == layout.next_step() &&
        use.marked.emplace(step, bucket).second) {
      Write(layout.bucket(bucket), options_.rank, step, bucket);
    }
    return layout.MarkReady(step, bucket);
  }
  if (command.name == "end") return layout.EndStep(step);
  if (command.name == "abandon") {
    return layout.AbandonStep(step, command.rest.substr(command.rest.find(' ') + 1));
  }
  if (command.name == "wait_bucket") {
    auto status = layout.WaitBucket(step, command.Word(1), command.Timeout());
    return status.ok() ? Check(use, step, command.Word(1), command) : status;
  }
  const auto result = layout.WaitStep(step, command.Timeout());
  if (!result.ok()) return result.status();
  answer->emplace_back("live_ranks", absl::StrCat(result->live_ranks));
  answer->emplace_back("divisor", absl::StrCat(result->divisor));
  return CheckAll(use, step, command);
}

absl::Status Rank::Steps(LayoutUse* use, const Command& command, Answer* answer) {
  Layout& layout = *use->layout;
  for (std::uint64_t times = command.Number("times", 1); times > 0; --times) {
    const std::uint64_t step = layout.next_step();
    for (std::size_t bucket = 0; bucket < layout.bucket_count(); ++bucket) {
      Write(layout.bucket(bucket), options_.rank, step, bucket);
      if (auto status = layout.MarkReady(step, bucket); !status.ok()) return status;
    }
    if (auto status = layout.EndStep(step); !status.ok()) return status;
    const auto result = layout.WaitStep(step, command.Timeout());
    if (!result.ok()) return result.status();
    if (auto status = CheckAll(*use, step, command); !status.ok()) return status;
    if (auto status = CheckStats(*use, *result); !status.ok()) return status;
    if (times > 1) continue;
    answer->emplace_back("step", absl::StrCat(step));
    answer->emplace_back("live_ranks", absl::StrCat(result->live_ranks));
    answer->emplace_back("divisor", absl::StrCat(result->divisor));
  }
  return absl::OkStatus();
}

absl::Status Rank::ExactStep(LayoutUse* use, const Command& command) {
  Layout& layout = *use->layout;
  const std::uint64_t step = layout.next_step();
  std::vector<std::uint64_t> ranks_of_node =
      ShapeOf(absl::StrReplaceAll(command.words.at(0), {{",", "x"}}));
  if (ranks_of_node.size() == 1) {
    ranks_of_node.resize(options_.world_size / ranks_of_node[0], ranks_of_node[0]);
  }
  const bool narrow = command.Option("wire", "") == "bfloat16";
  const auto written = [step](std::uint32_t rank, std::size_t bucket, std::uint64_t i) {
    return static_cast<float>(Written(rank, step, bucket, i) / 3.0 + static_cast<double>(i) * 1e-7);
  };
  for (std::size_t bucket = 0; bucket < layout.bucket_count(); ++bucket) {
    const BucketView view = layout.bucket(bucket);
    for (std::uint64_t i = 0; i < view.count; ++i) {
      static_cast<float*>(view.data)[i] = written(options_.rank, bucket, i);
    }
    if (auto status = layout.MarkReady(step, bucket); !status.ok()) return status;
  }
  if (auto status = layout.EndStep(step); !status.ok()) return status;
  if (auto done = layout.WaitStep(step, command.Timeout()); !done.ok()) return done.status();
  for (std::size_t bucket = 0; bucket < layout.bucket_count(); ++bucket) {
    const BucketView view = layout.bucket(bucket);
    for (std::uint64_t i = 0; i < view.count; ++i) {
      float sum = 0;
      std::uint32_t rank = 0;
      for (const std::uint64_t ranks : ranks_of_node) {
        const std::uint32_t first = rank;
        float of_node = written(rank++, bucket, i);
        while (rank < first + ranks) of_node = of_node + written(rank++, bucket, i);
        if (narrow) of_node = RoundedToBfloat16(of_node);
        sum = first == 0 ? of_node : sum + of_node;
      }
      if (narrow) sum = RoundedToBfloat16(sum);
      const float expected = sum * static_cast<float>(1.0 / options_.world_size);
      if (BitsOf(expected) != BitsOf(static_cast<float*>(view.data)[i])) {
        return absl::DataLossError(absl::StrCat("bucket ", bucket, ", element ", i, ": ",
                                                static_cast<float*>(view.data)[i], " instead of ",
                                                expected));
      }
    }
  }
  return absl::OkStatus();
}

absl::Status Rank::AllReduce(const Command& command) {
  const std::uint64_t count = command.Word(0);
  const DataType dtype = TypeNamed(command.Option("dtype", "float32"));
  const ReduceOp op = OpNamed(command.Option("op", "average"));
  const auto offset = static_cast<double>(command.Number("offset", 0));
  std::vector<char> data(count * ItemSize(dtype));
  for (std::uint64_t i = 0; i < count; ++i) {
    Store(dtype, data.data(), i, offset + Written(options_.rank, 0, 0, i));
  }
  if (auto status = session_->AllReduce(data.data(), count, dtype, op, command.Timeout());
      !status.ok()) {
    return status;
  }
  const auto ranks = RanksOf(command);
  for (std::uint64_t i = 0; i < count; ++i) {
    const double expected =
        Reduced(op, ranks, static_cast<double>(ranks.size()),
                [&](std::uint32_t rank) { return offset + Written(rank, 0, 0, i); });
    const double found = Load(dtype, data.data(), i);
    if (std::abs(found - expected) > Tolerance(dtype) * expected) {
      return absl::DataLossError(
          absl::StrCat("element ", i, ": ", found, " instead of ", expected));
    }
  }
  return absl::OkStatus();
}

absl::Status Rank::Broadcast(const Command& command) {
  const std::uint64_t bytes = command.Word(0);
  const auto root = static_cast<std::uint32_t>(command.Word(1));
  const auto of_root = [root](std::uint64_t i) {
    return static_cast<char>(i * 131 + (i >> 12) + root);
  };
  std::vector<char> data(bytes, '\x55');
  if (root == options_.rank) {
    for (std::uint64_t i = 0; i < bytes; ++i) data[i] = of_root(i);
  }
  if (auto status = session_->Broadcast(data.data(), bytes, root, command.Timeout());
      !status.ok()) {
    return status;
  }
  for (std::uint64_t i = 0; i < bytes; ++i) {
    if (data[i] != of_root(i)) return absl::DataLossError(absl::StrCat("byte ", i));
  }
  return absl::OkStatus();
}

absl::Status Rank::ForkCalls(Answer* answer) {
  int ends[2];
  if (pipe(ends) != 0) return absl::ErrnoToStatus(errno, "pipe");
  Layout& layout = *layouts_.at("default").layout;
  const pid_t child = fork();
  if (child == 0) {
    const std::uint64_t step = layout.next_step();
    float value = 0;
    const std::vector<absl::Status> statuses = {
        layout.MarkReady(step, 0),
        layout.EndStep(step),
        layout.AbandonStep(step, "child"),
        layout.WaitBucket(step, 0, absl::Seconds(1)),
        layout.WaitStep(step, absl::Seconds(1)).status(),
        session_->Barrier(absl::Seconds(1)),
        session_->Broadcast(&value, sizeof(value), 0, absl::Seconds(1)),
        session_->AllReduce(&value, 1, DataType::kFloat32, ReduceOp::kSum, absl::Seconds(1)),
        session_->RegisterLayout(LayoutSpec()).status(),
        session_->Leave(),
        session_->LeaveAndStay(absl::Seconds(1)).status(),
        Session::Join(options_).status()};
    std::vector<std::string> seen;
    for (const absl::Status& status : statuses) {
      seen.push_back(
          absl::StrCat(absl::StatusCodeToString(status.code()), "/", ErrorReason(status)));
    }
    const std::string text = absl::StrJoin(seen, " ");
    if (write(ends[1], text.data(), text.size()) < 0) _exit(1);
    layouts_.clear();
    session_.reset();
    _exit(0);
  }
  close(ends[1]);
  std::string text;
  char bytes[1024];
  for (ssize_t size = 0; (size = read(ends[0], bytes, sizeof(bytes))) > 0;) {
    text.append(bytes, static_cast<std::size_t>(size));
  }
  close(ends[0]);
  int status = 0;
  waitpid(child, &status, 0);
  answer->emplace_back("calls", text);
  answer->emplace_back("exit", absl::StrCat(WIFEXITED(status) ? WEXITSTATUS(status) : -1));
  return absl::OkStatus();
}

absl::Status Rank::Raw(const Command& command, Answer* answer) {
  if (command.name == "raw_open") {
    raw_ = std::make_unique<RawSession>(command.Option("socket", ""));
    const auto opened = raw_->Open(static_cast<std::uint32_t>(command.Number("rank", 0)),
                                   static_cast<std::uint32_t>(command.Number("world", 1)),
                                   command.Option("job", "job"));
    if (opened.has_value()) return absl::OkStatus();
    const RawStatus end = raw_->End();
    return absl::Status(static_cast<absl::StatusCode>(end.code), end.message);
  }
  if (command.name == "raw_register") {
    const auto assigned = raw_->Register(
        RawSession::LayoutRequest(command.Number("buckets", 2), command.Number("count", 1000)));
    return assigned.has_value() ? absl::OkStatus() : absl::UnknownError("not assigned");
  }
  if (command.name == "claim") {
    const FdAnswer claimed = AskSideSocket(
        command.Option("socket", ""), FdRequestBytes(absl::HexStringToBytes(command.words.at(0))));
    answer->emplace_back("descriptors", absl::StrCat(claimed.descriptors.size()));
    if (!claimed.answered) return absl::UnknownError("no answer");
    return absl::Status(static_cast<absl::StatusCode>(claimed.status), claimed.message);
  }
  // jobs
  const auto stub = v1::Introspection::NewStub(grpc::CreateChannel(
      "unix:" + command.Option("socket", ""), grpc::InsecureChannelCredentials()));
  grpc::ClientContext context;
  context.set_deadline(std::chrono::system_clock::now() + std::chrono::milliseconds(kPatienceMs));
  v1::GetStatusResponse response;
  const grpc::Status status = stub->GetStatus(&context, {}, &response);
  std::vector<std::string> jobs;
  for (const auto& job : response.jobs()) {
    jobs.push_back(absl::StrCat(job.job_id(), "/", job.uid(), "/", job.sessions_size()));
  }
  answer->emplace_back("jobs", absl::StrJoin(jobs, " "));
  return absl::Status(static_cast<absl::StatusCode>(status.error_code()), status.error_message());
}

absl::Status Rank::Call(const Command& command, Answer* answer) {
  const std::string& name = command.name;
  if (name == "join") return Join(command, answer);
  if (name == "become") {
    const auto id = static_cast<uid_t>(command.Word(0));
    if (setgroups(0, nullptr) != 0 || setresgid(id, id, id) != 0 || setresuid(id, id, id) != 0) {
      return absl::ErrnoToStatus(errno, "setresuid");
    }
    prctl(PR_SET_DUMPABLE, 1);  // LeakSanitizer must attach to this process
    return absl::OkStatus();
  }
  if (name == "raw_open" || name == "raw_register" || name == "claim" || name == "jobs") {
    return Raw(command, answer);
  }
  if (name == "fork" || name == "raw_fork") {
    const pid_t child =
        name == "fork" ? fork() : static_cast<pid_t>(syscall(SYS_clone, SIGCHLD, 0, 0, 0, 0));
    if (child == 0) {
      // Like a data loader's worker, it outlives its parent and keeps all inherited descriptors.
      char byte = 0;
      while (read(kLifeline, &byte, 1) < 0) {
      }
      _exit(0);
    }
    answer->emplace_back("pid", absl::StrCat(child));
    return child > 0 ? absl::OkStatus() : absl::ErrnoToStatus(errno, "fork");
  }
  if (name == "drop") {
    session_.reset();
    return absl::OkStatus();
  }
  if (session_ == nullptr && layouts_.empty()) return absl::FailedPreconditionError("not joined");
  if (name == "fork_calls") return ForkCalls(answer);
  if (name == "register" || name == "replace") return Register(command, answer);
  if (name == "barrier") return session_->Barrier(command.Timeout());
  if (name == "broadcast") return Broadcast(command);
  if (name == "allreduce") return AllReduce(command);
  if (name == "collective") return session_->BeginCollective(command.rest);
  if (name == "query_collectives") return session_->QueryCollectives(absl::Seconds(5));
  if (name == "leave") return session_->Leave();
  if (name == "finish") return session_->Finish();
  if (name == "leave_stay") {
    const auto last = session_->LeaveAndStay(command.Timeout());
    if (!last.ok()) return last.status();
    answer->emplace_back("last_to_leave", absl::StrCat(*last));
    return absl::OkStatus();
  }
  return OnLayout(command, answer);
}

}  // namespace

int Main() {
  signal(SIGPIPE, SIG_IGN);
  Rank rank;
  std::thread thread;
  Answer result;
  for (std::string line; std::getline(std::cin, line);) {
    const Command command = Parse(line);
    if (command.name == "async") {
      thread =
          std::thread([&rank, &result, call = Parse(command.rest)] { result = rank.Run(call); });
      Print({{"code", "OK"}});
    } else if (command.name == "result") {
      thread.join();
      Print(result);
    } else {
      Print(rank.Run(command));
    }
  }
  if (thread.joinable()) thread.join();
  return 0;
}

}  // namespace gradsync::fault

int main() { return gradsync::fault::Main(); }
