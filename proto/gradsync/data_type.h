// Element types of gradients. Shared by the client and the daemon; the numbers are those of
// gradsync.v1.DataType on the wire.

#ifndef PROTO_GRADSYNC_DATA_TYPE_H_
#define PROTO_GRADSYNC_DATA_TYPE_H_

#include <cstddef>
#include <cstdint>

namespace gradsync {

enum class DataType : std::uint8_t {
  kUnspecified = 0,
  kFloat32 = 1,
  kFloat64 = 2,
  kFloat16 = 3,   // IEEE 754 binary16
  kBfloat16 = 4,  // upper half of a binary32
};

// Bytes of one element; 0 for any other value.
constexpr std::size_t ItemSize(DataType type) {
  switch (type) {
    case DataType::kFloat32:
      return 4;
    case DataType::kFloat64:
      return 8;
    case DataType::kFloat16:
    case DataType::kBfloat16:
      return 2;
    case DataType::kUnspecified:
      break;
  }
  return 0;
}

// The type's name ("float32") in flags, tables and messages.
constexpr const char* DataTypeName(DataType type) {
  switch (type) {
    case DataType::kFloat32:
      return "float32";
    case DataType::kFloat64:
      return "float64";
    case DataType::kFloat16:
      return "float16";
    case DataType::kBfloat16:
      return "bfloat16";
    case DataType::kUnspecified:
      break;
  }
  return "unspecified";
}

}  // namespace gradsync

#endif  // PROTO_GRADSYNC_DATA_TYPE_H_
