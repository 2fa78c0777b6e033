// How NCCL sums a job's gradients between its GPUs. Shared by the client and the daemon; the
// numbers are those of gradsync.v1 on the wire.

#ifndef PROTO_GRADSYNC_NCCL_SETTINGS_H_
#define PROTO_GRADSYNC_NCCL_SETTINGS_H_

#include <cstdint>

namespace gradsync {

enum class NcclAlgorithm : std::uint8_t {
  kAuto = 0,  // NCCL's choice
  kTree = 1,
  kRing = 2,
  kCollnetDirect = 3,
  kCollnetChain = 4,
  kNvls = 5,
  kNvlsTree = 6,
};

enum class NcclProtocol : std::uint8_t {
  kAuto = 0,  // NCCL's choice
  kLl = 1,
  kLl128 = 2,
  kSimple = 3,
};

// The type in which gradients are summed and travel between GPUs. Trainers that share one GPU are
// always summed in float32. A job on one GPU sends nothing, so the choice has no effect there.
enum class NcclWireType : std::uint8_t {
  kAuto = 0,  // 16-bit types travel as float32, other types as themselves
  // Every type travels as itself. For 16-bit types: half the bytes, and every GPU on the way rounds
  // the sum.
  kSame = 1,
  // float32 travels in 16 bits: half the bytes. Each GPU's own sum is rounded once, and every GPU
  // on the way rounds again. Values that are too large for a float16 become Inf. Other types travel
  // as themselves.
  kBfloat16 = 2,
  kFloat16 = 3,
};

struct NcclSettings {
  static constexpr std::uint32_t kMaxCtas = 64;  // NCCL has no more channels

  std::uint32_t max_ctas = 0;  // the most thread blocks of a kernel; 0: NCCL's choice
  NcclAlgorithm algorithm = NcclAlgorithm::kAuto;
  NcclProtocol protocol = NcclProtocol::kAuto;
  NcclWireType wire_type = NcclWireType::kAuto;
};

// The value of NCCL_ALGO; "" for NCCL's choice, nullptr for any other number.
constexpr const char* NcclName(NcclAlgorithm algorithm) {
  switch (algorithm) {
    case NcclAlgorithm::kAuto:
      return "";
    case NcclAlgorithm::kTree:
      return "Tree";
    case NcclAlgorithm::kRing:
      return "Ring";
    case NcclAlgorithm::kCollnetDirect:
      return "CollnetDirect";
    case NcclAlgorithm::kCollnetChain:
      return "CollnetChain";
    case NcclAlgorithm::kNvls:
      return "NVLS";
    case NcclAlgorithm::kNvlsTree:
      return "NVLSTree";
  }
  return nullptr;
}

// The value of NCCL_PROTO, in the same way.
constexpr const char* NcclName(NcclProtocol protocol) {
  switch (protocol) {
    case NcclProtocol::kAuto:
      return "";
    case NcclProtocol::kLl:
      return "LL";
    case NcclProtocol::kLl128:
      return "LL128";
    case NcclProtocol::kSimple:
      return "Simple";
  }
  return nullptr;
}

// The name in options, in the same way.
constexpr const char* NcclName(NcclWireType wire_type) {
  switch (wire_type) {
    case NcclWireType::kAuto:
      return "";
    case NcclWireType::kSame:
      return "same";
    case NcclWireType::kBfloat16:
      return "bfloat16";
    case NcclWireType::kFloat16:
      return "float16";
  }
  return nullptr;
}

}  // namespace gradsync

#endif  // PROTO_GRADSYNC_NCCL_SETTINGS_H_
