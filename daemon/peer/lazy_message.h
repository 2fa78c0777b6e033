// A message between nodes that is parsed when it is needed. gRPC would parse each message on a
// thread that reads the streams of all users. With this class, gRPC parses only pings there, and
// keeps the bytes of other messages. Reason: a message of 16 MiB takes long to parse. One that
// would take much more memory than it has bytes is not parsed at all.

#ifndef DAEMON_PEER_LAZY_MESSAGE_H_
#define DAEMON_PEER_LAZY_MESSAGE_H_

#include <grpcpp/impl/codegen/proto_utils.h>
#include <grpcpp/support/byte_buffer.h>
#include <grpcpp/support/proto_buffer_reader.h>
#include <grpcpp/support/status.h>

#include <cstddef>
#include <utility>

#include "daemon/peer/parsed_bytes.h"

namespace gradsync::daemon {

// Used by one thread at a time.
template <class Message>
class LazyMessage {
 public:
  // Messages of a step are shorter, unless the step has very many buckets and ranks. Parsing this
  // many bytes takes at most a third of a millisecond.
  static constexpr std::size_t kShortBytes = 8 << 10;
  // A ping, or its answer, is shorter. Parsing this many bytes takes less time than reading them.
  static constexpr std::size_t kPingBytes = 64;
  // What a message may take once it is parsed. Those that are passed on to trainers may take 16 MiB
  // (peer_protocol.h), and ParsesWithin() counts too much.
  static constexpr std::size_t kMostParsedBytes = 64 << 20;

  LazyMessage() = default;
  // A message that is already parsed.
  LazyMessage(Message message)  // NOLINT(google-explicit-constructor): for tests
      : message_(std::move(message)), state_(State::kParsed) {}

  // Called by gRPC. Takes the bytes, and parses them if they are as few as a ping's. Not OK: these
  // few bytes are no message.
  grpc::Status Receive(grpc::ByteBuffer* bytes) {
    bytes_.Swap(bytes);
    state_ = State::kBytes;
    if (bytes_.Length() > kPingBytes || Get() != nullptr) return grpc::Status::OK;
    return grpc::Status(grpc::StatusCode::INTERNAL, "bytes that are no message");
  }

  // The length on the wire, until the message is parsed; then 0.
  std::size_t Bytes() const { return bytes_.Length(); }
  // True if it is parsed, or parsing takes little time.
  bool IsShort() const { return state_ == State::kParsed || bytes_.Length() <= kShortBytes; }
  // Null: it is not parsed yet.
  const Message* IfParsed() const { return state_ == State::kParsed ? &message_ : nullptr; }
  // As Get(), if it is short. Null: it is long.
  const Message* IfShort() const { return IsShort() ? Get() : nullptr; }
  // Parses it if need be. Null: the bytes are no message, or it would take too much memory.
  const Message* Get() const {
    if (state_ == State::kBytes) {
      const bool parsed =
          FitsParsed() && grpc::SerializationTraits<Message>::Deserialize(&bytes_, &message_).ok();
      state_ = parsed ? State::kParsed : State::kBroken;
    }
    return IfParsed();
  }

 private:
  enum class State : unsigned char { kBroken, kBytes, kParsed };

  bool FitsParsed() const {
    // A byte takes less than 64.
    if (bytes_.Length() <= kMostParsedBytes / 64) return true;
    grpc::ProtoBufferReader reader(&bytes_);
    return ParsesWithin(kMostParsedBytes, Message::descriptor(), &reader);
  }

  // Get() changes only the form, not the content.
  mutable grpc::ByteBuffer bytes_;
  mutable Message message_;
  mutable State state_ = State::kBroken;
};

}  // namespace gradsync::daemon

namespace grpc {

template <class Message>
class SerializationTraits<gradsync::daemon::LazyMessage<Message>> {
 public:
  static Status Deserialize(ByteBuffer* bytes, gradsync::daemon::LazyMessage<Message>* message) {
    return message->Receive(bytes);
  }
};

}  // namespace grpc

#endif  // DAEMON_PEER_LAZY_MESSAGE_H_
