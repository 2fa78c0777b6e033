// Types of elements that are reduced. Shared by the client and the daemon; the numbers are those of
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
  kInt8 = 5,
  kUint8 = 6,
  kInt16 = 7,
  kInt32 = 8,
  kInt64 = 9,
};

constexpr bool IsInteger(DataType type) {
  return type >= DataType::kInt8 && type <= DataType::kInt64;
}

// Bytes of one element; 0 for any other value.
constexpr std::size_t ItemSize(DataType type) {
  switch (type) {
    case DataType::kInt8:
    case DataType::kUint8:
      return 1;
    case DataType::kFloat16:
    case DataType::kBfloat16:
    case DataType::kInt16:
      return 2;
    case DataType::kFloat32:
    case DataType::kInt32:
      return 4;
    case DataType::kFloat64:
    case DataType::kInt64:
      return 8;
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
    case DataType::kInt8:
      return "int8";
    case DataType::kUint8:
      return "uint8";
    case DataType::kInt16:
      return "int16";
    case DataType::kInt32:
      return "int32";
    case DataType::kInt64:
      return "int64";
    case DataType::kUnspecified:
      break;
  }
  return "unspecified";
}

}  // namespace gradsync

#endif  // PROTO_GRADSYNC_DATA_TYPE_H_
