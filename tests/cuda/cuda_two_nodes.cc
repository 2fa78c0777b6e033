#include "tests/cuda/cuda_two_nodes.h"

#include <gmock/gmock.h>

#include <cstring>
#include <filesystem>
#include <utility>

#include "tests/fakes/cuda_process.h"

namespace gradsync {
namespace {

using testing::Each;

CUdeviceptr AddressOf(const void* data) { return reinterpret_cast<CUdeviceptr>(data); }

// NCCL's part of a node's environment. The workers inherit it.
std::vector<std::string> NcclNode(const std::string& name) {
  return {"NCCL_HOSTID=" + name, "NCCL_SOCKET_IFNAME=lo"};
}

std::string Absolute(const std::string& path) { return std::filesystem::absolute(path).string(); }

std::vector<std::string> Flags(const std::string& address, const std::string& name,
                               const std::string& flag) {
  return {"--peer_listen=" + address + ":0", "--node_name=" + name,
          "--cuda_library=" + Absolute("tests/fakes/cuda/libcuda.so.1"),
          "--nccl_library=" + Absolute("tests/fakes/nccl/libnccl.so.2"), flag};
}

}  // namespace

// ---- GpuRank ------------------------------------------------------------------------------------

GpuRank::GpuRank(int gpu)
    : gpu_(gpu), context_(fakes::EnterContext(gpu)), stream_(fakes::MakeStream()) {}

absl::Status GpuRank::Join(const SessionOptions& options, const LayoutSpec& spec) {
  const absl::Status opened = OpenSession(options);
  return opened.ok() ? Register(spec) : opened;
}

absl::Status GpuRank::OpenSession(const SessionOptions& options) {
  auto session = Session::Join(options);
  if (!session.ok()) return session.status();
  session_ = *std::move(session);
  return absl::OkStatus();
}

absl::Status GpuRank::Register(LayoutSpec spec) {
  spec.device = fakes::GpuUuid(gpu_);
  auto layout = session_->RegisterLayout(spec);
  if (!layout.ok()) return layout.status();
  layout_ = *std::move(layout);
  return absl::OkStatus();
}

void GpuRank::Enter() const { CUDA_OK(cuCtxSetCurrent(context_)); }

void GpuRank::End() {
  layout_.reset();
  session_.reset();
}

absl::Status GpuRank::Mark(std::uint64_t step, std::size_t bucket, float value) {
  std::uint32_t bits;
  std::memcpy(&bits, &value, sizeof(bits));
  const BucketView view = layout_->bucket(bucket);
  Enter();
  CUDA_OK(cuMemsetD32Async(AddressOf(view.data), bits, view.count, stream_));
  return layout_->MarkReady(step, bucket, {stream_});
}

absl::Status GpuRank::Mark(std::uint64_t step, std::size_t bucket,
                           const std::vector<float>& gradients) {
  Enter();
  fakes::WriteFloats(AddressOf(layout_->bucket(bucket).data), gradients, stream_);
  return layout_->MarkReady(step, bucket, {stream_});
}

absl::Status GpuRank::Step(std::uint64_t step, float value) {
  for (std::size_t bucket = 0; bucket < kBuckets; ++bucket) {
    const absl::Status marked = Mark(step, bucket, value + static_cast<float>(bucket));
    if (!marked.ok()) return marked;
  }
  if (absl::Status ended = layout_->EndStep(step); !ended.ok()) return ended;
  return layout_->WaitOnStream(step, stream_);
}

std::vector<float> GpuRank::Read(std::size_t bucket) {
  Enter();
  const BucketView view = layout_->bucket(bucket);
  return fakes::ReadFloats(AddressOf(view.data), view.count, stream_);
}

float GpuRank::Verdict(std::uint64_t step) {
  Enter();
  return fakes::ReadFloats(AddressOf(layout_->device_verdict(step)), 1, stream_)[0];
}

// ---- GpuNodes -----------------------------------------------------------------------------------

SessionOptions OptionsOf(const std::string& socket, const std::string& coordinator,
                         std::uint32_t rank, std::size_t world) {
  SessionOptions options;
  options.socket = socket;
  options.job_id = "job";
  options.coordinator = coordinator;
  options.rank = rank;
  options.world_size = static_cast<std::uint32_t>(world);
  return options;
}

GpuNodes::GpuNodes(std::vector<Place> places, const std::string& flag)
    : alpha_(Flags("127.0.0.1", "alpha", flag), NcclNode("alpha")),
      beta_(Flags("127.0.0.2", "beta", flag), NcclNode("beta")) {
  set_places(std::move(places));
}

void GpuNodes::set_places(std::vector<Place> places) {
  places_ = std::move(places);
  ranks_.clear();
  for (const Place& place : places_) ranks_.push_back(std::make_unique<GpuRank>(place.gpu));
}

SessionOptions GpuNodes::Options(std::uint32_t rank) {
  SessionOptions options =
      OptionsOf(node(places_[rank].node).socket(), coordinator(), rank, places_.size());
  options.nccl = nccl_;
  return options;
}

void GpuNodes::Join(int absent) {
  OnEveryRank(world(), [&](std::uint32_t rank) {
    if (static_cast<int>(rank) == absent) return;
    const absl::Status joined = ranks_[rank]->Join(Options(rank), spec_);
    EXPECT_TRUE(joined.ok()) << "rank " << rank << ": " << joined;
  });
}

void GpuNodes::End() {
  for (const auto& rank : ranks_) rank->End();
}

void GpuNodes::ExpectConnections(std::uint64_t count, const char* why) {
  if (machine_.fake()) {
    EXPECT_EQ(machine_.Calls("ncclCommInitRankConfig"), count) << why;
  }
}

void GpuNodes::AverageStep(std::uint64_t step, float value) {
  for (std::uint32_t rank = 0; rank < world(); ++rank) {
    const absl::Status stepped = ranks_[rank]->Step(step, value + static_cast<float>(rank));
    EXPECT_TRUE(stepped.ok()) << "rank " << rank << ": " << stepped;
  }
  ExpectAverages(step, value + static_cast<float>(world() - 1) / 2);
}

void GpuNodes::ExpectAverages(std::uint64_t step, float average) {
  for (std::uint32_t rank = 0; rank < world(); ++rank) {
    for (std::size_t bucket = 0; bucket < kBuckets; ++bucket) {
      EXPECT_THAT(ranks_[rank]->Read(bucket), Each(average + static_cast<float>(bucket)))
          << "rank " << rank << ", bucket " << bucket;
    }
    EXPECT_EQ(ranks_[rank]->Verdict(step), 0) << "rank " << rank;
    const absl::Status complete = ranks_[rank]->Wait(step);
    EXPECT_TRUE(complete.ok()) << "rank " << rank << ": " << complete;
  }
}

}  // namespace gradsync
