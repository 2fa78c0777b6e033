// The frames that come on an HTTP/2 connection.

#ifndef DAEMON_BASE_HEADER_FRAMES_H_
#define DAEMON_BASE_HEADER_FRAMES_H_

#include <algorithm>
#include <array>
#include <cstddef>
#include <cstdint>

#include "daemon/base/header_fields.h"

namespace gradsync::daemon {

// Follows the frames that one side sends (RFC 9113), and limits headers, calls, resets, and bytes
// that are no data. gRPC 1.51 does not: its limits, 8 KiB of headers for instance, hold only once
// the other side has acknowledged them. It keeps headers in memory until the last of them has come,
// and trailers until the call ends. gRPC spends as much time on a frame without data as on one with
// a few bytes. A value; all bytes of a default one are 0. Not thread-safe.
class HeaderFrames {
 public:
  // The most bytes of headers for a call. An honest call has a few hundred.
  static constexpr std::uint32_t kMostBytes = 8 << 10;
  // The most calls that one side may reset between two calls of ForgetResets(). It is more than
  // the 32 that a trainer's connection may have open: a client may reset all of them at once.
  static constexpr std::uint32_t kMostResets = 48;
  // The most bytes that are no data at once, and how many one side regains in a second. Data are
  // the payloads of DATA and of a client's HEADERS; calls have limits of their own. A message of up
  // to 16 KiB takes 9 other bytes of its sender, and up to 26 of its reader (two WINDOW_UPDATEs).
  // So one side may send and read 60,000 messages in a second. Measured on 2 busy cores, in a
  // second: 0.14 MB of a trainer with 4,000 barriers, 0.18 MB of one with 260,000 buckets, and 0.18
  // MB of a node with 6,000 messages.
  //
  // When the daemon stops for a while, messages wait, and then come at once. A trainer's connection
  // has a window of 64 KiB: at most some 4,400 messages wait, with 39 KiB besides data. Between
  // daemons the window grows, and nothing bounds what waits. Measured with 4,096 buckets and 4
  // ranks on each of two nodes: a node sends 120 KB when its coordinator has stopped for 2 s, so
  // with 8 ranks nearly 256 KiB. A coordinator sends 32 KiB when a node has stopped for 0.7 s.
  //
  // 256 KiB of frames on a call that has ended keep a thread of gRPC's executor busy for 131 ms.
  // These threads serve all connections. With 1 MiB of a node, a neighbour's longest step is 94 ms.
  static constexpr std::uint32_t kMostBesidesOfTrainer = 48 << 10;
  static constexpr std::uint32_t kMostBesidesOfNode = 1 << 20;
  static constexpr std::uint32_t kMostBesidesOfCoordinator = 256 << 10;
  static constexpr std::uint32_t kRegainedBesides = 2 << 20;

  // A trainer's frames, or those of another client of the node, with any number of calls.
  HeaderFrames() = default;
  // The frames of another node, a client of this coordinator. `most_calls`: over the life of the
  // connection; 0: as a trainer's.
  explicit HeaderFrames(std::uint32_t most_calls) : most_headers_(most_calls) {}
  // The frames of a coordinator, a server. It sends headers twice for a call: before its messages,
  // and as trailers.
  static HeaderFrames OfServer(std::uint32_t most_calls) {
    HeaderFrames frames(2 * most_calls);
    frames.skipped_ = kPreface;  // a server sends none
    frames.of_server_ = true;
    return frames;
  }

  // Takes the next bytes of the connection. Called again only after true. False if there are
  // - more than kMostBytes of headers for a call, or fields that header_fields.h refuses,
  // - too many calls, or too many resets,
  // - trailers of a client: no client of gRPC sends any,
  // - too many bytes that are no data.
  bool Take(const char* bytes, std::size_t size) {
    for (const char* const end = bytes + size; bytes != end;) {
      if (const std::size_t rest = static_cast<std::size_t>(end - bytes); skipped_ < kPreface) {
        const std::size_t taken = std::min<std::size_t>(rest, kPreface - skipped_);
        skipped_ += static_cast<std::uint32_t>(taken);
        bytes += taken;
      } else if (payload_ > 0) {
        const std::size_t taken = std::min<std::size_t>(rest, payload_);
        payload_ -= static_cast<std::uint32_t>(taken);
        if (has_fields_ && !TakeFields(bytes, taken)) return false;
        bytes += taken;
      } else {
        frame_[read_ % frame_.size()] = static_cast<std::uint8_t>(*bytes++);
        if (++read_ >= frame_.size() && !Begin()) return false;
      }
    }
    return true;
  }

  // The bytes of headers whose end has not come.
  std::uint32_t unfinished() const { return unfinished_; }
  // True if ForgetResets() or Regain() would matter: calls were reset, or many bytes came that are
  // no data.
  bool counts() const { return resets_ > 0 || besides_ > most_besides() / 4; }
  std::uint32_t most_besides() const {
    if (of_server_) return kMostBesidesOfCoordinator;
    return most_headers_ > 0 ? kMostBesidesOfNode : kMostBesidesOfTrainer;
  }
  void ForgetResets() { resets_ = 0; }
  // So much time has passed since the last call.
  void Regain(std::uint64_t ns) {
    const std::uint64_t regained = ns / 1'000 * kRegainedBesides / 1'000'000;
    besides_ -= static_cast<std::uint32_t>(std::min<std::uint64_t>(besides_, regained));
  }

 private:
  static constexpr std::size_t kPreface = 24;
  static constexpr std::uint8_t kData = 0, kHeaders = 1, kReset = 3, kContinuation = 9;
  static constexpr std::uint8_t kEndHeaders = 4, kPriority = 0x20;
  static constexpr std::uint32_t kPriorityBytes = 5;

  std::uint32_t Number(std::size_t at, std::size_t size) const {
    std::uint32_t number = 0;
    for (std::size_t i = 0; i < size; ++i) number = number << 8 | frame_[at + i];
    return number;
  }

  // A frame begins.
  bool Begin() {
    read_ = 0;
    payload_ = Number(0, 3);
    const std::uint8_t type = frame_[3];
    has_fields_ = type == kHeaders || type == kContinuation;
    const bool is_data = type == kData || (type == kHeaders && !of_server_);
    besides_ += static_cast<std::uint32_t>(frame_.size()) + (is_data ? 0 : payload_);
    if (besides_ > most_besides()) return false;
    if (type == kReset) return ++resets_ <= kMostResets;
    if (!has_fields_) return true;
    if (type == kHeaders) {
      const std::uint32_t stream = Number(5, 4) & 0x7fffffff;
      // A stream's second headers are trailers.
      if (!of_server_ && stream <= last_stream_) return false;
      if (most_headers_ > 0 && ++headers_ > most_headers_) return false;
      last_stream_ = stream;
      unfinished_ = 0;
      fields_.Begin();
      // gRPC takes the length of padding for a field, and so does this class.
      to_skip_ = (frame_[4] & kPriority) != 0 ? kPriorityBytes : 0;
    }
    unfinished_ += payload_;
    const bool many = unfinished_ > kMostBytes;
    if ((frame_[4] & kEndHeaders) != 0) unfinished_ = 0;
    return !many;
  }

  bool TakeFields(const char* bytes, std::size_t size) {
    const auto skipped = static_cast<std::uint32_t>(std::min<std::size_t>(size, to_skip_));
    to_skip_ -= skipped;
    return fields_.Take(bytes + skipped, size - skipped);
  }

  HeaderFields fields_;
  bool of_server_ = false;
  std::uint32_t most_headers_ = 0;  // of the connection; 0: any number
  std::uint32_t headers_ = 0;       // that have begun; not counted if any number may
  std::uint32_t resets_ = 0;
  std::uint32_t besides_ = 0;            // bytes that are no data
  std::uint32_t to_skip_ = 0;            // of the payload, before the fields
  bool has_fields_ = false;              // the frame's payload
  std::uint32_t skipped_ = 0;            // of the connection's preface
  std::uint32_t payload_ = 0;            // bytes to come of the frame
  std::array<std::uint8_t, 9> frame_{};  // the frame's first bytes
  std::uint8_t read_ = 0;                // how many bytes of frame_ have come
  std::uint32_t last_stream_ = 0;
  std::uint32_t unfinished_ = 0;
};

}  // namespace gradsync::daemon

#endif  // DAEMON_BASE_HEADER_FRAMES_H_
