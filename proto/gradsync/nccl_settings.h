// What a job may choose of how its gradients are summed between its GPUs. Shared by the client and
// the daemon; the numbers are those of gradsync.v1 on the wire.

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

// As what gradients are summed and travel between GPUs. Trainers on one GPU are added up in float32
// in any case. A job that is on one GPU sends nothing, and has kAuto whatever it chose.
enum class NcclWireType : std::uint8_t {
  kAuto = 0,  // 16-bit types as float32, others as they are
  // As they are: half the bytes for 16-bit types, whose sum is rounded at every GPU on the way.
  kSame = 1,
  // float32 in 16 bits: half the bytes; each GPU's sum is rounded once, and again at every GPU on
  // the way. Others as they are. What is too large for a float16 becomes Inf.
  kBfloat16 = 2,
  kFloat16 = 3,
};

struct NcclSettings {
  static constexpr std::uint32_t kMaxCtas = 64;  // NCCL's channels

  std::uint32_t max_ctas = 0;  // that its kernels may take; 0: NCCL's choice
  NcclAlgorithm algorithm = NcclAlgorithm::kAuto;
  NcclProtocol protocol = NcclProtocol::kAuto;
  NcclWireType wire_type = NcclWireType::kAuto;
};

// As NCCL_ALGO takes them; "" for NCCL's choice, nullptr for what is none of them.
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

// As NCCL_PROTO takes them, in the same way.
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

// As options name them, in the same way.
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
