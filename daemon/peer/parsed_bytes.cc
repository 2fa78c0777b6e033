#include "daemon/peer/parsed_bytes.h"

#include <google/protobuf/io/coded_stream.h>
#include <google/protobuf/message.h>
#include <google/protobuf/wire_format_lite.h>

#include <climits>
#include <cstdint>
#include <string>

#include "absl/container/flat_hash_map.h"

namespace gradsync::daemon {
namespace {

using google::protobuf::Descriptor;
using google::protobuf::FieldDescriptor;
using google::protobuf::MessageFactory;
using google::protobuf::internal::WireFormatLite;

// What the heap takes for each allocation, beside the object itself.
constexpr std::size_t kAllocation = 16;
// The objects of a repeated field have pointers in an array. An array has room for up to twice as
// many elements, and for a few at first.
constexpr std::size_t kPointer = 2 * sizeof(void*);
constexpr std::size_t kArray = 64;
constexpr std::size_t kText = sizeof(std::string) + kAllocation;  // without its bytes
// A field that the type does not have, or has with another wire type. The parser keeps it.
constexpr std::size_t kUnknown = 64;
constexpr int kDeepest = 32;  // parts in parts; our messages have fewer than 10

bool IsOf(const FieldDescriptor& field, WireFormatLite::WireType wire) {
  const auto type = static_cast<WireFormatLite::FieldType>(field.type());
  return wire == WireFormatLite::WireTypeForFieldType(type) ||
         (field.is_packable() && wire == WireFormatLite::WIRETYPE_LENGTH_DELIMITED);
}

// What a number of this field takes in its array.
std::size_t SizeOfNumber(const FieldDescriptor& field) {
  switch (field.cpp_type()) {
    case FieldDescriptor::CPPTYPE_BOOL:
      return 2 * sizeof(bool);
    case FieldDescriptor::CPPTYPE_INT32:
    case FieldDescriptor::CPPTYPE_UINT32:
    case FieldDescriptor::CPPTYPE_ENUM:
    case FieldDescriptor::CPPTYPE_FLOAT:
      return 2 * sizeof(std::uint32_t);
    default:
      return 2 * sizeof(std::uint64_t);
  }
}

// The bytes of a number on the wire, at least.
std::size_t LeastOnWire(const FieldDescriptor& field) {
  switch (
      WireFormatLite::WireTypeForFieldType(static_cast<WireFormatLite::FieldType>(field.type()))) {
    case WireFormatLite::WIRETYPE_FIXED64:
      return sizeof(std::uint64_t);
    case WireFormatLite::WIRETYPE_FIXED32:
      return sizeof(std::uint32_t);
    default:
      return 1;
  }
}

class Sum {
 public:
  Sum(std::size_t most, google::protobuf::io::ZeroCopyInputStream* bytes)
      : left_(most), bytes_(bytes) {}

  // False: there are more than `most`, or the bytes are no message.
  bool Add(const Descriptor* type, int depth) {
    if (depth > kDeepest || !Take(SizeOf(type) + kAllocation)) return false;
    const FieldDescriptor* field = nullptr;
    std::uint32_t last = 0;
    while (const std::uint32_t tag = bytes_.ReadTag()) {
      const int number = WireFormatLite::GetTagFieldNumber(tag);
      if (number == 0) return false;
      if (tag != last) {
        if (!Take(kArray)) return false;
        field = type->FindFieldByNumber(number);
        if (field != nullptr && !IsOf(*field, WireFormatLite::GetTagWireType(tag))) field = nullptr;
        last = tag;
      }
      if (!AddField(tag, field, depth)) return false;
    }
    return bytes_.ConsumedEntireMessage();
  }

 private:
  bool Take(std::size_t bytes) {
    if (bytes > left_) return false;
    left_ -= bytes;
    return true;
  }

  std::size_t SizeOf(const Descriptor* type) {
    const auto [found, added] = sizes_.try_emplace(type, 0);
    if (added) {
      found->second = MessageFactory::generated_factory()->GetPrototype(type)->SpaceUsedLong();
    }
    return found->second;
  }

  // `field`: null: the parser keeps the field as an unknown one.
  bool AddField(std::uint32_t tag, const FieldDescriptor* field, int depth) {
    const auto wire = WireFormatLite::GetTagWireType(tag);
    if (wire == WireFormatLite::WIRETYPE_START_GROUP ||
        wire == WireFormatLite::WIRETYPE_END_GROUP) {
      return false;
    }
    if (wire != WireFormatLite::WIRETYPE_LENGTH_DELIMITED) {
      const std::size_t size =
          field == nullptr ? kUnknown : (field->is_repeated() ? SizeOfNumber(*field) : 0);
      return Take(size) && WireFormatLite::SkipField(&bytes_, tag);
    }
    std::uint32_t length = 0;
    if (!bytes_.ReadVarint32(&length)) return false;
    // The parser reads a part to its end, even beyond that of the message around it.
    const int left = bytes_.BytesUntilLimit();  // -1: there is no limit
    if (length > INT_MAX || (left >= 0 && length > static_cast<std::uint32_t>(left))) return false;
    if (field != nullptr && field->cpp_type() == FieldDescriptor::CPPTYPE_MESSAGE) {
      return Take(kPointer) && AddPart(field->message_type(), static_cast<int>(length), depth);
    }
    const bool text = field == nullptr || field->cpp_type() == FieldDescriptor::CPPTYPE_STRING;
    const std::size_t size = text ? kUnknown + kText + length
                                  : (length / LeastOnWire(*field) + 1) * SizeOfNumber(*field);
    return Take(size) && bytes_.Skip(static_cast<int>(length));
  }

  bool AddPart(const Descriptor* type, int length, int depth) {
    const auto limit = bytes_.PushLimit(length);
    const bool fine = Add(type, depth + 1) && bytes_.BytesUntilLimit() == 0;
    bytes_.PopLimit(limit);
    return fine;
  }

  std::size_t left_;
  google::protobuf::io::CodedInputStream bytes_;
  absl::flat_hash_map<const Descriptor*, std::size_t> sizes_;
};

}  // namespace

bool ParsesWithin(std::size_t most, const Descriptor* type,
                  google::protobuf::io::ZeroCopyInputStream* bytes) {
  return Sum(most, bytes).Add(type, /*depth=*/0);
}

}  // namespace gradsync::daemon
