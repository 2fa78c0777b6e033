#include <stdlib.h>

#include <cstdint>
#include <filesystem>
#include <fstream>
#include <iterator>
#include <string>
#include <utility>

#include "absl/strings/str_cat.h"
#include "absl/time/clock.h"
#include "absl/time/time.h"
#include "daemon/cuda/nccl_library.h"
#include "daemon/engine/nccl_communicator.h"
#include "tools/bench/clocks.h"
#include "tools/bench/cuda_contestants.h"
#include "tools/bench/cuda_rank.h"
#include "tools/bench/vector_loops.h"

namespace gradsync::bench {
namespace {

constexpr absl::Duration kTimeout = absl::Minutes(1);
constexpr absl::Duration kLookAgain = absl::Milliseconds(5);

class CudaNcclContestant final : public Contestant {
 public:
  explicit CudaNcclContestant(const ContestantOptions& options) : options_(options) {}

  absl::Status Connect() override {
    if (options_.ranks > options_.gpus) ActAsMachine(options_.rank);
    absl::StatusOr<std::unique_ptr<CudaRank>> gpu = CudaRank::Open(options_);
    if (!gpu.ok()) return gpu.status();
    gpu_ = *std::move(gpu);
    absl::StatusOr<std::unique_ptr<const daemon::NcclLibrary>> nccl =
        daemon::NcclLibrary::Open(options_.nccl_library);
    if (!nccl.ok()) return nccl.status();
    nccl_ = *std::move(nccl);
    daemon::NcclCommunicatorOptions communicator;
    communicator.rank = static_cast<int>(options_.rank);
    communicator.ranks = static_cast<int>(options_.ranks);
    absl::StatusOr<std::string> id = UniqueId(communicator.rank);
    if (!id.ok()) return id.status();
    communicator.unique_id = *std::move(id);
    communicator.blocking = true;
    absl::StatusOr<std::unique_ptr<daemon::NcclCommunicator>> connected =
        daemon::NcclCommunicator::Connect(nccl_.get(), communicator);
    if (!connected.ok()) return connected.status();
    communicator_ = *std::move(connected);
    return absl::OkStatus();
  }

  absl::Status SetUp(std::size_t bytes) override {
    absl::Status status = gpu_->AllocateHost(bytes);
    if (!status.ok()) return status;
    absl::StatusOr<CUdeviceptr> buffer = gpu_->AllocateDevice(bytes);
    if (!buffer.ok()) return buffer.status();
    buffer_ = *buffer;
    count_ = bytes / ItemSize(options_.dtype);
    return absl::OkStatus();
  }

  std::byte* buffer() override { return gpu_->host(); }
  absl::Status Upload() override { return gpu_->Upload(buffer_); }

  // NCCL adds; the division, which DDP leaves to a kernel, is done here and not timed.
  absl::Status Download() override {
    absl::Status status = gpu_->Download(buffer_);
    if (!status.ok()) return status;
    Scale(options_.dtype, gpu_->host(), count_, 1.0 / options_.ranks);
    return absl::OkStatus();
  }

  absl::Status AllReduce(Turn* turn) override {
    absl::Status status = communicator_->AllReduce(buffer_, options_.dtype, count_, gpu_->stream());
    turn->marked_ns = turn->enqueued_ns = MonotonicNs();
    return status.ok() ? gpu_->Synchronize() : status;
  }

  absl::Status TearDown() override {
    gpu_->FreeDevice();
    return absl::OkStatus();
  }

 private:
  // NCCL refuses two ranks on one GPU, unless it takes them for ranks of two machines. Then it
  // connects them by sockets.
  static void ActAsMachine(std::uint32_t rank) {
    setenv("NCCL_HOSTID", absl::StrCat("rank-", rank).c_str(), /*overwrite=*/1);
    setenv("NCCL_SOCKET_IFNAME", "lo", /*overwrite=*/1);
  }

  // Rank 0 makes it; the others find it in the team's directory.
  absl::StatusOr<std::string> UniqueId(int rank) const {
    const std::string path = absl::StrCat(options_.directory, "/nccl-id");
    if (rank == 0) {
      absl::StatusOr<std::string> id = daemon::NcclCommunicator::NewUniqueId(nccl_.get());
      if (!id.ok()) return id;
      std::ofstream(path + ".new", std::ios::binary) << *id;
      std::filesystem::rename(path + ".new", path);
      return id;
    }
    for (const absl::Time end = absl::Now() + kTimeout; absl::Now() < end;
         absl::SleepFor(kLookAgain)) {
      std::ifstream file(path, std::ios::binary);
      if (file.is_open()) return std::string(std::istreambuf_iterator<char>(file), {});
    }
    return absl::DeadlineExceededError("rank 0 has made no unique id");
  }

  const ContestantOptions options_;
  std::unique_ptr<CudaRank> gpu_;
  std::unique_ptr<const daemon::NcclLibrary> nccl_;
  std::unique_ptr<daemon::NcclCommunicator> communicator_;
  CUdeviceptr buffer_ = 0;
  std::size_t count_ = 0;
};

}  // namespace

std::unique_ptr<Contestant> MakeCudaNcclContestant(const ContestantOptions& options) {
  return std::make_unique<CudaNcclContestant>(options);
}

}  // namespace gradsync::bench
