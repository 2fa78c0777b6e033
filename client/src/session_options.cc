#include "client/src/session_options.h"

#include <sys/un.h>

#include <algorithm>
#include <string>

#include "absl/strings/ascii.h"
#include "absl/strings/match.h"
#include "absl/strings/str_cat.h"
#include "absl/strings/string_view.h"
#include "client/src/error.h"
#include "client/src/fd_socket.h"
#include "client/src/utf8.h"
#include "gradsync/limits.h"
#include "gradsync/shared_memory.h"
#include "proto/gradsync/v1/gradsync.pb.h"

namespace gradsync::client {
namespace {

constexpr char kClientVersion[] = "gradsync-client/1.0";

constexpr std::size_t kMaxCoordinatorBytes = 255;

absl::Status Malformed(absl::string_view option, absl::string_view what) {
  return MakeError(absl::StatusCode::kInvalidArgument, reason::kMalformed,
                   absl::StrCat("SessionOptions.", option, " ", what));
}

}  // namespace

absl::Status ValidateOptions(const SessionOptions& options) {
  constexpr std::size_t kMaxPath = sizeof(sockaddr_un::sun_path) - 1;
  if (options.socket.empty()) return Malformed("socket", "is empty");
  if (!absl::EndsWith(options.socket, ".sock") || options.socket.find('\0') != std::string::npos) {
    return Malformed("socket", absl::StrCat("'", ValidUtf8(options.socket),
                                            "' is not a path that ends in .sock"));
  }
  if (FdSocketPath(options.socket).size() > kMaxPath) {
    return Malformed("socket", absl::StrCat("'", options.socket,
                                            "' is too long: with \"-fd\" it "
                                            "may have ",
                                            kMaxPath, " bytes"));
  }
  if (options.job_id.empty() || options.job_id.size() > kMaxJobIdBytes ||
      !std::all_of(options.job_id.begin(), options.job_id.end(),
                   [](unsigned char c) { return absl::ascii_isprint(c); })) {
    return Malformed("job_id", absl::StrCat("must have 1 to ", kMaxJobIdBytes,
                                            " printable characters, the same on every rank"));
  }
  if (options.token.size() > kMaxTokenBytes) {
    return Malformed("token", absl::StrCat("is longer than ", kMaxTokenBytes, " bytes"));
  }
  if (options.coordinator.size() > kMaxCoordinatorBytes ||
      !std::all_of(options.coordinator.begin(), options.coordinator.end(),
                   [](unsigned char c) { return absl::ascii_isgraph(c); })) {
    return Malformed("coordinator", absl::StrCat("must have up to ", kMaxCoordinatorBytes,
                                                 " printable characters, host or host:port"));
  }
  if (options.world_size == 0) return Malformed("world_size", "is 0");
  if (options.rank >= options.world_size) {
    return Malformed("rank", absl::StrCat("is ", options.rank, " in a world of ",
                                          options.world_size, " ranks; ranks count from 0"));
  }
  switch (options.on_rank_loss) {
    case LossPolicy::kAbort:
    case LossPolicy::kHold:
    case LossPolicy::kContinue:
      break;
    default:
      return Malformed("on_rank_loss", "is not a LossPolicy");
  }
  if (options.state_source != StateSource::kSurvivor &&
      options.state_source != StateSource::kTrainer) {
    return Malformed("state_source", "is not a StateSource");
  }
  if (options.hold_timeout < absl::ZeroDuration()) return Malformed("hold_timeout", "is negative");
  if (options.divisor != Divisor::kLiveRanks && options.divisor != Divisor::kWorld) {
    return Malformed("divisor", "is not a Divisor");
  }
  if (options.step_timeout < absl::ZeroDuration()) return Malformed("step_timeout", "is negative");
  const NcclSettings& nccl = options.nccl;
  if (nccl.max_ctas > NcclSettings::kMaxCtas) {
    return Malformed("nccl.max_ctas",
                     absl::StrCat("is ", nccl.max_ctas, "; 0 to ", NcclSettings::kMaxCtas));
  }
  if (NcclName(nccl.algorithm) == nullptr)
    return Malformed("nccl.algorithm", "is not an NcclAlgorithm");
  if (NcclName(nccl.protocol) == nullptr)
    return Malformed("nccl.protocol", "is not an NcclProtocol");
  if (NcclName(nccl.wire_type) == nullptr)
    return Malformed("nccl.wire_type", "is not an NcclWireType");
  return absl::OkStatus();
}

void FillOpenSession(const SessionOptions& options, v1::OpenSession* open) {
  open->mutable_protocol()->set_oldest(kProtocolOldest);
  open->mutable_protocol()->set_newest(kProtocolNewest);
  open->set_shared_memory_abi(kSharedMemoryAbi);
  open->set_job_id(options.job_id);
  open->set_token(options.token);
  open->set_rank(options.rank);
  open->set_world_size(options.world_size);
  v1::JobOptions& job = *open->mutable_options();
  job.set_on_rank_loss(static_cast<v1::LossPolicy>(options.on_rank_loss));
  if (options.on_rank_loss == LossPolicy::kHold) {
    job.set_state_source(static_cast<v1::StateSource>(options.state_source));
    if (options.hold_timeout > absl::ZeroDuration()) {
      job.set_hold_timeout_ms(TimeoutMs(options.hold_timeout));
    }
  }
  job.set_divisor(static_cast<v1::Divisor>(options.divisor));
  if (options.step_timeout > absl::ZeroDuration()) {
    job.set_step_timeout_ms(TimeoutMs(options.step_timeout));
  }
  job.mutable_nccl()->set_max_ctas(options.nccl.max_ctas);
  job.mutable_nccl()->set_algorithm(static_cast<v1::NcclAlgorithm>(options.nccl.algorithm));
  job.mutable_nccl()->set_protocol(static_cast<v1::NcclProtocol>(options.nccl.protocol));
  job.mutable_nccl()->set_wire_type(static_cast<v1::NcclWireType>(options.nccl.wire_type));
  open->set_client(kClientVersion);
  open->set_coordinator(options.coordinator);
}

std::uint64_t TimeoutMs(absl::Duration timeout) {
  const absl::Duration bounded =
      std::clamp(timeout, absl::Milliseconds(1), absl::Hours(10 * 365 * 24));
  return static_cast<std::uint64_t>(
      absl::ToInt64Milliseconds(absl::Ceil(bounded, absl::Milliseconds(1))));
}

static_assert(static_cast<int>(NcclAlgorithm::kNvlsTree) == v1::NCCL_ALGORITHM_NVLS_TREE);
static_assert(static_cast<int>(NcclProtocol::kSimple) == v1::NCCL_PROTOCOL_SIMPLE);
static_assert(static_cast<int>(NcclWireType::kSame) == v1::NCCL_WIRE_TYPE_SAME);
static_assert(static_cast<int>(NcclWireType::kBfloat16) == v1::NCCL_WIRE_TYPE_BFLOAT16);
static_assert(static_cast<int>(NcclWireType::kFloat16) == v1::NCCL_WIRE_TYPE_FLOAT16);
static_assert(static_cast<int>(LossPolicy::kContinue) == v1::LOSS_POLICY_CONTINUE);
static_assert(static_cast<int>(LossPolicy::kHold) == v1::LOSS_POLICY_HOLD);
static_assert(static_cast<int>(LossPolicy::kAbort) == v1::LOSS_POLICY_ABORT);
static_assert(static_cast<int>(StateSource::kTrainer) == v1::STATE_SOURCE_TRAINER);
static_assert(static_cast<int>(StateSource::kSurvivor) == v1::STATE_SOURCE_SURVIVOR);
static_assert(static_cast<int>(Divisor::kWorld) == v1::DIVISOR_WORLD);
static_assert(static_cast<int>(Divisor::kLiveRanks) == v1::DIVISOR_LIVE_RANKS);

}  // namespace gradsync::client
