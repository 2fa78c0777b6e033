// What the headers of an HTTP/2 call take in memory.

#ifndef DAEMON_BASE_HEADER_FIELDS_H_
#define DAEMON_BASE_HEADER_FIELDS_H_

#include <algorithm>
#include <cstddef>
#include <cstdint>

namespace gradsync::daemon {

// Follows the fields of a connection's headers (HPACK, RFC 7541), and estimates what gRPC makes of
// them. It decodes no text and keeps no table: a field that names an entry of the table counts as
// much as the longest entry. A value; all its bytes are 0 at first. Not thread-safe.
class HeaderFields {
 public:
  // An honest call has some ten fields, and less than 10 KiB.
  static constexpr std::uint32_t kMostFields = 64;
  static constexpr std::uint32_t kMostBytes = 96 << 10;

  // The headers of another call begin.
  void Begin() {
    state_ = State::kField;
    fields_ = bytes_ = text_ = 0;
  }
  // Takes the next bytes of the headers. False if they have too many fields, take too much memory,
  // or have a number without an end.
  bool Take(const char* bytes, std::size_t size) {
    for (const char* const end = bytes + size; bytes != end;) {
      if (state_ == State::kText) {
        const auto taken = static_cast<std::uint32_t>(
            std::min<std::size_t>(rest_, static_cast<std::size_t>(end - bytes)));
        bytes += taken;
        rest_ -= taken;
        if (rest_ == 0) EndText();
      } else if (!TakeByte(static_cast<std::uint8_t>(*bytes++))) {
        return false;
      }
    }
    return true;
  }

 private:
  // What gRPC keeps for a field besides its text (measured), and the most that its table holds.
  static constexpr std::uint32_t kBytesOfAField = 160, kTableBytes = 4096;
  static constexpr std::uint32_t kFirstOfTable = 62;
  static constexpr int kMostDigits = 4;  // of a number, after its first byte

  enum class State : std::uint8_t { kField, kNumber, kLength, kLengthNumber, kText };
  enum class Kind : std::uint8_t { kIndexed, kKept, kNotKept, kTableSize };

  bool TakeByte(std::uint8_t byte) {
    switch (state_) {
      case State::kField:
        return BeginField(byte);
      case State::kLength:
        huffman_ = (byte & 0x80) != 0;
        return BeginNumber(byte, 0x7f, State::kLengthNumber);
      default:
        number_ += static_cast<std::uint32_t>(byte & 0x7f) << (7 * digits_);
        if ((byte & 0x80) == 0) return EndNumber();
        return ++digits_ < kMostDigits;
    }
  }
  bool BeginField(std::uint8_t byte) {
    if ((byte & 0x80) != 0) {
      kind_ = Kind::kIndexed;
      return BeginNumber(byte, 0x7f, State::kNumber);
    }
    if ((byte & 0x40) != 0) {
      kind_ = Kind::kKept;
      return BeginNumber(byte, 0x3f, State::kNumber);
    }
    kind_ = (byte & 0x20) != 0 ? Kind::kTableSize : Kind::kNotKept;
    return BeginNumber(byte, kind_ == Kind::kTableSize ? 0x1f : 0x0f, State::kNumber);
  }
  bool BeginNumber(std::uint8_t byte, std::uint8_t mask, State state) {
    state_ = state;
    number_ = byte & mask;
    digits_ = 0;
    return number_ < mask ? EndNumber() : true;
  }
  bool EndNumber() {
    if (state_ == State::kLengthNumber) {
      // Huffman's code has at least five bits for a character.
      text_ += huffman_ ? number_ / 5 * 8 + 8 : number_;
      rest_ = number_;
      state_ = State::kText;
      if (rest_ == 0) EndText();
      return Fits();
    }
    if (kind_ == Kind::kTableSize) {
      state_ = State::kField;
      return true;
    }
    ++fields_;
    bytes_ += kBytesOfAField;
    text_ = number_ >= kFirstOfTable ? longest_ : 0;
    // A name without a number comes as a text, before the value.
    texts_ = number_ == 0 ? 2 : 1;
    if (kind_ == Kind::kIndexed) {
      EndField();
    } else {
      state_ = State::kLength;
    }
    return Fits();
  }
  void EndText() {
    state_ = State::kLength;
    if (--texts_ == 0) EndField();
  }
  void EndField() {
    state_ = State::kField;
    bytes_ += text_;
    if (kind_ == Kind::kKept) longest_ = std::max(longest_, std::min(text_, kTableBytes));
    text_ = 0;
  }
  bool Fits() const { return fields_ <= kMostFields && bytes_ + text_ <= kMostBytes; }

  State state_ = State::kField;
  Kind kind_ = Kind::kIndexed;
  bool huffman_ = false;     // the text is coded
  std::uint8_t digits_ = 0;  // of the number, so far
  std::uint8_t texts_ = 0;   // of the field, still to come
  std::uint32_t number_ = 0;
  std::uint32_t rest_ = 0;     // bytes of the text to come
  std::uint32_t text_ = 0;     // bytes of the field's texts, decoded
  std::uint32_t fields_ = 0;   // of the call
  std::uint32_t bytes_ = 0;    // of the call, in memory
  std::uint32_t longest_ = 0;  // bytes of an entry of the connection's table
};

}  // namespace gradsync::daemon

#endif  // DAEMON_BASE_HEADER_FIELDS_H_
