#include "tests/job/job_fixture.h"

#include <numeric>
#include <utility>

#include "absl/strings/str_cat.h"

namespace gradsync::daemon {

std::string FieldOf(const absl::Status& status, absl::string_view key) {
  for (const auto& [name, value] : DetailsOf(status).fields) {
    if (name == key) return value;
  }
  return "(none)";
}

void JobFixture::Start(std::uint32_t ranks, bool divide_by_world, std::uint64_t step_timeout_ns,
                       std::uint32_t absent) {
  JobEnvironment environment;
  environment.clock = &clock_;
  environment.reducer = &reducer_;
  environment.executor = &executor_;
  environment.log_late = [this](uid_t, const std::string& job_id, const std::string& text) {
    logged_.push_back(absl::StrCat(job_id, ": ", text));
  };
  options_.divide_by_world = divide_by_world;
  options_.step_timeout_ns = step_timeout_ns;
  job_ = std::make_shared<Job>(JobIdentity{1000, "run-7", "", 1, {}}, ranks, options_, environment);
  for (std::uint32_t rank = 0; rank < ranks; ++rank) {
    sinks_.push_back(std::make_shared<RecordingSink>([this](const SessionMessage& message) {
      if (on_message_) on_message_(message);
    }));
    if (rank + absent >= ranks) continue;
    const absl::Status joined = job_->Join(rank, ranks, options_, Incarnation(rank), sinks_.back());
    ASSERT_TRUE(joined.ok()) << joined;
  }
}

absl::Status JobFixture::Rejoin(std::uint32_t rank) {
  ++rejoined_[rank];
  sinks_[rank] = std::make_shared<RecordingSink>();
  return job_->Join(rank, job_->world_size(), options_, Of(rank).incarnation, sinks_[rank]);
}

LayoutSpec JobFixture::Spec(std::size_t buckets, const std::string& name) {
  LayoutSpec spec;
  spec.name = name;
  spec.bucket_cap_bytes = spec.first_bucket_cap_bytes = 1;
  for (std::size_t i = 0; i < buckets; ++i) {
    spec.parameters.push_back({absl::StrCat("p", i), {2, 2}, DataType::kFloat32});
  }
  return spec;
}

LayoutRequest JobFixture::Request(LayoutSpec spec, std::uint64_t deadline_ns) {
  LayoutRequest request;
  request.request_id = 40;
  request.spec = std::move(spec);
  request.deadline_ns = deadline_ns;
  return request;
}

std::uint32_t JobFixture::Register(std::uint32_t rank, const LayoutSpec& spec,
                                   std::uint32_t replaces) {
  LayoutRequest request = Request(spec);
  request.replaces = replaces;
  const auto registration = job_->RegisterLayout(Of(rank), std::move(request));
  EXPECT_TRUE(registration.ok()) << registration.status();
  if (!registration.ok()) return 0;
  const std::uint32_t channel = registration->channel;
  if (memory_.size() < channel) {
    memory_.resize(channel);
    buckets_.resize(channel);
  }
  memory_[channel - 1].resize(sinks_.size());
  memory_[channel - 1][rank] = std::make_unique<TrainerMemory>(registration->plan.arena_bytes,
                                                               registration->plan.buckets.size());
  buckets_[channel - 1] = registration->plan.buckets.size();
  return channel;
}

absl::Status JobFixture::Map(std::uint32_t rank, std::uint32_t channel) {
  return job_->ArenaMapped(Of(rank), channel, memory(rank, channel).Share());
}

std::uint32_t JobFixture::Agree(const LayoutSpec& spec) {
  std::uint32_t channel = 0;
  for (std::uint32_t rank = 0; rank < sinks_.size(); ++rank) channel = Register(rank, spec);
  for (std::uint32_t rank = 0; rank < sinks_.size(); ++rank) {
    const absl::Status mapped = Map(rank, channel);
    EXPECT_TRUE(mapped.ok()) << mapped;
  }
  for (std::uint32_t rank = 0; rank < sinks_.size(); ++rank) Only<LayoutReadyMessage>(rank);
  TakeAll();
  return channel;
}

void JobFixture::DoStep(std::uint32_t rank, std::uint32_t channel, std::uint64_t step,
                        absl::string_view used_map) {
  std::vector<std::uint32_t> all(buckets_[channel - 1]);
  std::iota(all.begin(), all.end(), 0);
  const absl::Status marked = job_->MarkReady(Of(rank), channel, step, all);
  EXPECT_TRUE(marked.ok()) << marked;
  const absl::Status ended = job_->EndStep(Of(rank), channel, step, used_map);
  EXPECT_TRUE(ended.ok()) << ended;
}

}  // namespace gradsync::daemon
