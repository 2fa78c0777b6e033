#include "tests/attack/raw_http2.h"

#include <fcntl.h>
#include <linux/sockios.h>
#include <poll.h>
#include <sys/ioctl.h>
#include <sys/socket.h>

#include <cerrno>
#include <chrono>
#include <thread>
#include <utility>

#include "tests/kit/connect.h"

namespace gradsync::attack {
namespace {

// RFC 9113: frame types and flags.
constexpr std::uint8_t kData = 0, kHeaders = 1, kReset = 3, kSettings = 4, kPing = 6,
                       kContinuation = 9, kUnknown = 0x42;
constexpr std::uint32_t kCancel = 8;
constexpr std::uint8_t kEndStream = 1, kEndHeaders = 4;
constexpr std::uint16_t kInitialWindowSize = 4;
constexpr std::size_t kMaxFrameBytes = 16'384;

std::string BigEndian(std::uint64_t value, int bytes) {
  std::string text;
  for (int i = bytes - 1; i >= 0; --i) text += static_cast<char>(value >> (8 * i));
  return text;
}

std::string Frame(std::uint8_t type, std::uint8_t flags, std::uint32_t stream,
                  const std::string& payload) {
  return BigEndian(payload.size(), 3) + BigEndian(type, 1) + BigEndian(flags, 1) +
         BigEndian(stream, 4) + payload;
}

// RFC 7541: a string without Huffman's code.
std::string Text(const std::string& text) {
  std::string length;
  if (text.size() < 127) {
    length = BigEndian(text.size(), 1);
  } else {
    length = "\x7f";
    std::size_t rest = text.size() - 127;
    for (; rest >= 128; rest >>= 7) length += static_cast<char>(rest % 128 + 128);
    length += static_cast<char>(rest);
  }
  return length + text;
}

// A header that the table does not keep.
std::string Header(const std::string& name, const std::string& value) {
  return BigEndian(0, 1) + Text(name) + Text(value);
}

// An empty path: of an answer.
std::string HeadersOf(const std::string& path) {
  if (path.empty()) return Header(":status", "200") + Header("content-type", "application/grpc");
  return Header(":method", "POST") + Header(":scheme", "http") + Header(":path", path) +
         Header(":authority", "localhost") + Header("te", "trailers") +
         Header("content-type", "application/grpc");
}

}  // namespace

RawHttp2::RawHttp2(const std::string& path, std::uint32_t window)
    : RawHttp2(ConnectUnix(path, SOCK_STREAM), window) {}

RawHttp2::RawHttp2(Descriptor connected, std::uint32_t window)
    : RawHttp2(
          std::move(connected),
          "PRI * HTTP/2.0\r\n\r\nSM\r\n\r\n" +
              Frame(kSettings, 0, 0, BigEndian(kInitialWindowSize, 2) + BigEndian(window, 4))) {}

RawHttp2 RawHttp2::Server(Descriptor accepted) {
  return RawHttp2(std::move(accepted), Frame(kSettings, 0, 0, ""));
}

RawHttp2::RawHttp2(Descriptor connected, const std::string& first) : fd_(std::move(connected)) {
  if (fd_.get() < 0) return;
  connected_ = true;
  const timeval patience{5, 0};
  setsockopt(fd_.get(), SOL_SOCKET, SO_SNDTIMEO, &patience, sizeof(patience));
  setsockopt(fd_.get(), SOL_SOCKET, SO_RCVTIMEO, &patience, sizeof(patience));
  Send(first);
}

bool RawHttp2::AwaitCall() {
  std::size_t skip = 24;  // the client's preface
  for (std::string bytes;;) {
    for (constexpr std::size_t kFrame = 9; bytes.size() >= skip + kFrame;) {
      const auto* const frame = reinterpret_cast<const std::uint8_t*>(bytes.data()) + skip;
      if (frame[3] == kHeaders) return true;
      skip += kFrame + (frame[0] << 16 | frame[1] << 8 | frame[2]);
    }
    char more[1 << 12];
    const ssize_t size = recv(fd_.get(), more, sizeof(more), 0);
    if (size <= 0) return false;
    bytes.append(more, static_cast<std::size_t>(size));
  }
}

bool RawHttp2::Send(const std::string& bytes) {
  const ssize_t sent = send(fd_.get(), bytes.data(), bytes.size(), MSG_NOSIGNAL);
  connected_ = connected_ && sent == static_cast<ssize_t>(bytes.size());
  return connected_;
}

bool RawHttp2::Call(const std::string& path, const std::string& message) {
  const std::uint32_t stream = next_stream_;
  next_stream_ += 2;
  return Send(
      Frame(kHeaders, kEndHeaders, stream, HeadersOf(path)) +
      Frame(kData, kEndStream, stream, BigEndian(0, 1) + BigEndian(message.size(), 4) + message));
}

bool RawHttp2::Begin(const std::string& path, const std::string& message) {
  next_stream_ += 2;
  return Send(
      Frame(kHeaders, kEndHeaders, next_stream_ - 2, HeadersOf(path)) +
      Frame(kData, 0, next_stream_ - 2, BigEndian(0, 1) + BigEndian(message.size(), 4) + message));
}

bool RawHttp2::CallWithHeader(const std::string& path, const std::string& name,
                              const std::string& value) {
  const std::uint32_t stream = next_stream_;
  next_stream_ += 2;
  return Send(
      Frame(kHeaders, kEndHeaders | kEndStream, stream, HeadersOf(path) + Header(name, value)));
}

bool RawHttp2::BeginMessage(const std::string& path, std::uint32_t bytes) {
  const std::uint32_t stream = next_stream_;
  next_stream_ += 2;
  return Send(Frame(kHeaders, kEndHeaders, stream, HeadersOf(path)) +
              Frame(kData, 0, stream, BigEndian(0, 1) + BigEndian(bytes, 4))) &&
         ContinueMessage();
}

bool RawHttp2::ContinueMessage() {
  return Send(Frame(kData, 0, next_stream_ - 2, std::string(kMaxFrameBytes, 'x')));
}

bool RawHttp2::BeginHeaders(const std::string& path) {
  next_stream_ += 2;
  return Send(Frame(kHeaders, 0, next_stream_ - 2, HeadersOf(path))) && ContinueHeaders();
}

bool RawHttp2::CallWithTrailers(const std::string& path) {
  next_stream_ += 2;
  return Send(Frame(kHeaders, kEndHeaders, next_stream_ - 2, HeadersOf(path)) +
              Frame(kHeaders, kEndStream, next_stream_ - 2, Header("x", "y"))) &&
         ContinueHeaders() && EndHeaders();
}

bool RawHttp2::BeginIndexedHeaders(const std::string& path) {
  // RFC 7541: a header that the table keeps, and then its number.
  const std::string kept = BigEndian(0x40, 1) + Text("x") + Text("y");
  next_stream_ += 2;
  std::string frames = Frame(kHeaders, 0, next_stream_ - 2, HeadersOf(path) + kept);
  for (int i = 0; i < 56; ++i) {
    frames += Frame(kContinuation, 0, next_stream_ - 2, std::string(kMaxFrameBytes, '\xbe'));
  }
  return Send(frames);
}

bool RawHttp2::CallWithIndexedHeaders(const std::string& path, const std::string& name,
                                      std::size_t value_bytes) {
  std::string headers =
      HeadersOf(path) + BigEndian(0x40, 1) + Text(name) + Text(std::string(value_bytes, 'A'));
  headers.resize(7900, '\xbe');
  next_stream_ += 2;
  return Send(Frame(kHeaders, kEndHeaders, next_stream_ - 2, headers));
}

bool RawHttp2::BeginShortHeaders(const std::string& path) {
  next_stream_ += 2;
  return Send(Frame(kHeaders, 0, next_stream_ - 2, HeadersOf(path)));
}

bool RawHttp2::ContinueShortHeaders() {
  return Send(Frame(kContinuation, 0, next_stream_ - 2, Header("slow", std::string(900, 'v'))));
}

bool RawHttp2::EndHeaders() {
  return Send(Frame(kContinuation, kEndHeaders, next_stream_ - 2, Header("y", "z")));
}

bool RawHttp2::ContinueHeaders() {
  static const auto* const headers = [] {
    auto* const made = new std::string;
    for (int i = 0; made->size() + 200 < kMaxFrameBytes; ++i) {
      *made += Header("x" + std::to_string(i), std::string(100, 'v'));
    }
    return made;
  }();
  std::string frames;
  for (int i = 0; i < 64; ++i) frames += Frame(kContinuation, 0, next_stream_ - 2, *headers);
  return Send(frames);
}

void RawHttp2::OpenMany(const std::string& path) {
  fcntl(fd_.get(), F_SETFL, O_NONBLOCK);
  do {
    next_stream_ += 2;
  } while (Send(Frame(kHeaders, kEndHeaders, next_stream_ - 2, HeadersOf(path))));
}

void RawHttp2::ResetAndClose(const std::string& path) {
  fcntl(fd_.get(), F_SETFL, O_NONBLOCK);
  while (OpenAndReset(path, 500)) {
  }
  shutdown(fd_.get(), SHUT_WR);
}

void RawHttp2::Close() {
  fd_ = Descriptor();
  connected_ = false;
}

int RawHttp2::unsent() const {
  int bytes = 0;
  return ioctl(fd_.get(), SIOCOUTQ, &bytes) == 0 ? bytes : 0;
}

bool RawHttp2::HasEnded() const {
  pollfd end{fd_.get(), 0, 0};
  return fd_.get() < 0 || (poll(&end, 1, 0) == 1 && (end.revents & (POLLHUP | POLLERR)) != 0);
}

bool RawHttp2::SendNothings() {
  static const auto* const frames = [] {
    auto* const made = new std::string;
    for (int i = 0; i < 10'000; ++i) *made += Frame(kUnknown, 0, 0, "");
    return made;
  }();
  return Send(*frames);
}

bool RawHttp2::SendSmallData(std::size_t bytes) {
  const std::string frame = Frame(kData, 0, next_stream_ - 2, std::string(bytes, '\0'));
  std::string frames;
  for (int i = 0; i < 10'000; ++i) frames += frame;
  return Send(frames) && DropAnswers();
}

bool RawHttp2::SendBulk() {
  static const auto* const frames = [] {
    auto* const made = new std::string;
    const std::string payload(kMaxFrameBytes, 'x');
    for (int i = 0; i < 64; ++i) *made += Frame(kUnknown, 0, 0, payload);
    return made;
  }();
  return Send(*frames);
}

bool RawHttp2::SendPings(int count) {
  std::string pings;
  for (int i = 0; i < count; ++i) pings += Frame(kPing, 0, 0, BigEndian(0, 8));
  return Send(pings);
}

bool RawHttp2::PingUntilStalled() {
  using Clock = std::chrono::steady_clock;
  constexpr std::chrono::milliseconds kPace(10);
  while (SendPings(1000)) {
    const Clock::time_point give_up = Clock::now() + std::chrono::seconds(2);
    for (; unsent() > 0; std::this_thread::sleep_for(std::chrono::milliseconds(1))) {
      if (HasEnded()) return false;
      if (Clock::now() > give_up) return true;
    }
    std::this_thread::sleep_for(kPace);
  }
  return !HasEnded();
}

void RawHttp2::SendNoMore() { shutdown(fd_.get(), SHUT_WR); }

bool RawHttp2::OpenAndReset(const std::string& path, int calls) {
  // POST and http by their numbers in HPACK's table, to send as many calls as possible.
  const std::string headers =
      std::string("\x83\x86\x04") + Text(path) + "\x01" + Text("a") + Header("te", "trailers");
  std::string frames;
  for (int i = 0; i < calls; ++i) {
    frames += Frame(kHeaders, kEndHeaders, next_stream_, headers) +
              Frame(kReset, 0, next_stream_, BigEndian(kCancel, 4));
    next_stream_ += 2;
  }
  return Send(frames) && DropAnswers();
}

bool RawHttp2::DropAnswers() {
  char dropped[1 << 14];
  ssize_t size = 0;
  while ((size = recv(fd_.get(), dropped, sizeof(dropped), MSG_DONTWAIT)) > 0) {
  }
  connected_ = size < 0 && errno == EAGAIN;
  return connected_;
}

}  // namespace gradsync::attack
