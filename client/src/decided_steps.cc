#include "client/src/decided_steps.h"

#include <algorithm>
#include <utility>

#include "client/src/error.h"
#include "proto/gradsync/v1/gradsync.pb.h"

namespace gradsync::client {
namespace {

// A map of any other size means that every parameter is used.
std::vector<bool> DecodeUsedMap(const std::string& map, std::size_t parameters) {
  if (map.size() != (parameters + 7) / 8) return {};
  std::vector<bool> used(parameters);
  for (std::size_t i = 0; i < parameters; ++i) {
    used[i] = ((static_cast<unsigned char>(map[i / 8]) >> (i % 8)) & 1) != 0;
  }
  return used;
}

}  // namespace

std::string EncodeUsedMap(const std::vector<bool>& used) {
  if (std::find(used.begin(), used.end(), false) == used.end()) return "";
  std::string map((used.size() + 7) / 8, '\0');
  for (std::size_t i = 0; i < used.size(); ++i) {
    if (used[i]) map[i / 8] = static_cast<char>(map[i / 8] | (1 << (i % 8)));
  }
  return map;
}

StepVerdict DecodeVerdict(const v1::StepDone& done, std::size_t parameters) {
  StepVerdict verdict;
  verdict.step = done.step();
  if (done.verdict() != v1::VERDICT_COMPLETE) verdict.status = StatusFromProto(done.status());
  StepResult& result = verdict.result;
  result.step = done.step();
  result.live_ranks = done.live_ranks();
  result.divisor = done.divisor();
  if (!done.used_map().empty()) result.used = DecodeUsedMap(done.used_map(), parameters);
  result.buckets.reserve(static_cast<std::size_t>(done.buckets_size()));
  for (const v1::BucketTimes& times : done.buckets()) {
    result.buckets.push_back(
        {{times.ready_ns().begin(), times.ready_ns().end()}, times.start_ns(), times.finish_ns()});
  }
  // A void step has neither.
  const int measured = std::min(done.sum_of_squares_size(), done.non_finite_size());
  for (int i = 0; i < measured; ++i) {
    result.stats.push_back({done.sum_of_squares(i), done.non_finite(i)});
  }
  return verdict;
}

std::shared_ptr<const StepVerdict> DecidedSteps::Find(std::uint64_t step) const {
  const auto& verdict = verdicts_[step % kKept];
  return verdict != nullptr && verdict->step == step ? verdict : nullptr;
}

void DecidedSteps::Add(std::shared_ptr<const StepVerdict> verdict) {
  last_ = verdict->step;
  if (verdict->status.ok()) {
    for (auto& kept : verdicts_) {
      if (kept != nullptr && kept->step + outstanding_ <= last_) kept = nullptr;
    }
  }
  verdicts_[last_ % kKept] = std::move(verdict);
}

void DecidedSteps::SkipTo(std::uint64_t step) {
  last_ = step;
  verdicts_.fill(nullptr);
}

}  // namespace gradsync::client
