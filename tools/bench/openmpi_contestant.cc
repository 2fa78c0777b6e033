#include <utility>

#include "absl/strings/str_cat.h"
#include "absl/strings/string_view.h"
#include "tools/bench/contestant.h"
#include "tools/bench/shared_region.h"
#include "tools/bench/vector_loops.h"

#ifdef GRADSYNC_HAVE_MPI
#include <mpi.h>
#endif

namespace gradsync::bench {

#ifdef GRADSYNC_HAVE_MPI
namespace {

void AddBinary16(void* in, void* in_out, int* count, MPI_Datatype*) {
  Add(DataType::kFloat16, in_out, in_out, in, static_cast<std::size_t>(*count));
}

void AddBfloat16(void* in, void* in_out, int* count, MPI_Datatype*) {
  Add(DataType::kBfloat16, in_out, in_out, in, static_cast<std::size_t>(*count));
}

absl::Status MpiStatus(int code, absl::string_view call) {
  if (code == MPI_SUCCESS) return absl::OkStatus();
  char text[MPI_MAX_ERROR_STRING] = {};
  int length = 0;
  MPI_Error_string(code, text, &length);
  return absl::InternalError(absl::StrCat(call, ": ", text));
}

class OpenMpiContestant final : public Contestant {
 public:
  explicit OpenMpiContestant(const ContestantOptions& options) : options_(options) {}
  ~OpenMpiContestant() override {
    if (connected_) MPI_Finalize();
  }

  absl::Status Connect() override {
    absl::Status status = MpiStatus(MPI_Init(nullptr, nullptr), "MPI_Init");
    if (!status.ok()) return status;
    connected_ = true;
    MPI_Comm_set_errhandler(MPI_COMM_WORLD, MPI_ERRORS_RETURN);
    // Everybody has mapped everybody's shared memory.
    status = MpiStatus(MPI_Barrier(MPI_COMM_WORLD), "MPI_Barrier");
    if (!status.ok()) return status;
    switch (options_.dtype) {
      case DataType::kFloat32:
        type_ = MPI_FLOAT;
        break;
      case DataType::kFloat64:
        type_ = MPI_DOUBLE;
        break;
      // Open MPI has no 16-bit types.
      case DataType::kFloat16:
        type_ = MPI_UINT16_T;
        return MpiStatus(MPI_Op_create(AddBinary16, 1, &add_), "MPI_Op_create");
      case DataType::kBfloat16:
        type_ = MPI_UINT16_T;
        return MpiStatus(MPI_Op_create(AddBfloat16, 1, &add_), "MPI_Op_create");
      default:
        return absl::InvalidArgumentError("no dtype");
    }
    add_ = MPI_SUM;
    return absl::OkStatus();
  }

  absl::Status SetUp(std::size_t bytes) override {
    absl::StatusOr<SharedRegion> memory = SharedRegion::Private(bytes);
    if (!memory.ok()) return memory.status();
    memory_ = *std::move(memory);
    count_ = memory_.bytes() / ItemSize(options_.dtype);
    return absl::OkStatus();
  }

  std::byte* buffer() override { return memory_.data(); }

  absl::Status AllReduce(Turn*) override {
    absl::Status status =
        MpiStatus(MPI_Allreduce(MPI_IN_PLACE, memory_.data(), static_cast<int>(count_), type_, add_,
                                MPI_COMM_WORLD),
                  "MPI_Allreduce");
    if (!status.ok()) return status;
    Scale(options_.dtype, memory_.data(), count_, 1.0 / options_.ranks);
    return absl::OkStatus();
  }

  absl::Status TearDown() override {
    memory_ = SharedRegion();
    return absl::OkStatus();
  }

 private:
  const ContestantOptions options_;
  bool connected_ = false;
  MPI_Datatype type_ = MPI_DATATYPE_NULL;
  MPI_Op add_ = MPI_OP_NULL;
  SharedRegion memory_;
  std::size_t count_ = 0;
};

}  // namespace

std::unique_ptr<Contestant> MakeOpenMpiContestant(const ContestantOptions& options) {
  return std::make_unique<OpenMpiContestant>(options);
}
#else
std::unique_ptr<Contestant> MakeOpenMpiContestant(const ContestantOptions&) { return nullptr; }
#endif

}  // namespace gradsync::bench
