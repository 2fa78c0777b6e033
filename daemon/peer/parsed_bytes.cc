#include "daemon/peer/parsed_bytes.h"

#include <google/protobuf/io/coded_stream.h>
#include <google/protobuf/message.h>
#include <google/protobuf/wire_format_lite.h>

#include <cstdint>

#include "absl/container/flat_hash_map.h"

namespace gradsync::daemon {
namespace {

using google::protobuf::Descriptor;
using google::protobuf::FieldDescriptor;
using google::protobuf::MessageFactory;
using google::protobuf::internal::WireFormatLite;

// What the heap takes for each allocation, beside the object itself.
constexpr std::size_t kAllocation = 16;
// The objects of a repeated field have pointers in an array, and numbers are such an array. It has
// room for up to twice as many.
constexpr std::size_t kPerElement = 2 * sizeof(std::uint64_t);
constexpr std::size_t kText = 32 + kAllocation;  // std::string, without its bytes
constexpr std::size_t kUnknown = 16 + kText;     // a field that the type does not have
constexpr int kDeepest = 32;                     // parts in parts; our messages have fewer than 10

class Sum {
 public:
  Sum(std::size_t most, google::protobuf::io::ZeroCopyInputStream* bytes)
      : left_(most), bytes_(bytes) {}

  // False: there are more than `most`, or the bytes are no message.
  bool Add(const Descriptor* type, int depth) {
    if (depth > kDeepest || !Take(SizeOf(type) + kAllocation)) return false;
    const FieldDescriptor* field = nullptr;
    while (const std::uint32_t tag = bytes_.ReadTag()) {
      const int number = WireFormatLite::GetTagFieldNumber(tag);
      if (field == nullptr || field->number() != number) field = type->FindFieldByNumber(number);
      if (number == 0 || !AddField(tag, field, depth)) return false;
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
    const auto [size, added] = sizes_.try_emplace(type, 0);
    if (added) {
      size->second = MessageFactory::generated_factory()->GetPrototype(type)->SpaceUsedLong();
    }
    return size->second;
  }

  // `field`: null: the type has none of this number.
  bool AddField(std::uint32_t tag, const FieldDescriptor* field, int depth) {
    const auto wire = WireFormatLite::GetTagWireType(tag);
    if (wire == WireFormatLite::WIRETYPE_START_GROUP ||
        wire == WireFormatLite::WIRETYPE_END_GROUP) {
      return false;
    }
    if (wire != WireFormatLite::WIRETYPE_LENGTH_DELIMITED) {
      const bool kept = field == nullptr || field->is_repeated();
      return (!kept || Take(field == nullptr ? kUnknown : kPerElement)) &&
             WireFormatLite::SkipField(&bytes_, tag);
    }
    std::uint32_t length = 0;
    if (!bytes_.ReadVarint32(&length)) return false;
    if (field != nullptr && field->cpp_type() == FieldDescriptor::CPPTYPE_MESSAGE) {
      return Take(kPerElement) && AddPart(field->message_type(), length, depth);
    }
    const bool text = field == nullptr || field->cpp_type() == FieldDescriptor::CPPTYPE_STRING;
    // A packed number has at least one byte.
    const std::size_t size =
        text ? kUnknown + kPerElement + length : kAllocation + std::size_t{length} * kPerElement;
    return Take(size) && bytes_.Skip(static_cast<int>(length));
  }

  bool AddPart(const Descriptor* type, std::uint32_t length, int depth) {
    const auto limit = bytes_.PushLimit(static_cast<int>(length));
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
