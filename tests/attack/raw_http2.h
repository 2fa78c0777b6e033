// A client of HTTP/2 that sends frames by hand, so that it can do what gRPC's never does. Or a
// server.

#ifndef TESTS_ATTACK_RAW_HTTP2_H_
#define TESTS_ATTACK_RAW_HTTP2_H_

#include <cstddef>
#include <cstdint>
#include <string>

#include "tests/kit/child_process.h"

namespace gradsync::attack {

// One connection. It reads nothing, unless told to. If the server reads nothing for 5 s, the
// connection counts as ended: the kernel may report its end only after a minute. Not thread-safe.
class RawHttp2 {
 public:
  // `window`: the bytes of each answer that the server may send; it never gets more.
  RawHttp2(const std::string& path, std::uint32_t window);  // of a Unix socket
  RawHttp2(Descriptor connected, std::uint32_t window);
  // Plays the server for a client that has connected. The first method below that is used answers
  // the client's first call; its `path` is empty.
  static RawHttp2 Server(Descriptor accepted);
  // A server: reads until the client's first call has begun.
  bool AwaitCall();

  // False if the server has refused or ended the connection.
  bool connected() const { return connected_; }
  // Ends the connection.
  void Close();
  // Bytes that it has sent and the server has not read.
  int unsent() const;
  // Whether the server has ended the connection. connected() may be false without that.
  bool HasEnded() const;
  // Sends a unary call with `message`, serialized, on a stream of its own.
  bool Call(const std::string& path, const std::string& message);
  // Begins a call, sends its first message, and keeps the call open.
  bool Begin(const std::string& path, const std::string& message);
  // Sends a call whose header `name` has this value.
  bool CallWithHeader(const std::string& path, const std::string& name, const std::string& value);
  // Begins a call whose message has `bytes` bytes, and sends the first 16 KiB of them.
  bool BeginMessage(const std::string& path, std::uint32_t bytes);
  // Sends 16 KiB more of the message that was begun last, however much the server wants.
  bool ContinueMessage();
  // Begins a call with 1 MiB of headers, and does not end them.
  bool BeginHeaders(const std::string& path);
  // The same with headers of one byte each on the wire, but at most 0.9 MiB.
  bool BeginIndexedHeaders(const std::string& path);
  // Begins a call with less than 8 KiB of headers, which take much more memory: their table keeps
  // one of `name` with a value of so many bytes, and the others name it with a byte each.
  bool CallWithIndexedHeaders(const std::string& path, const std::string& name,
                              std::size_t value_bytes);
  // Begins a call, and sends 1 MiB of headers at its end (trailers).
  bool CallWithTrailers(const std::string& path);
  // The same as BeginHeaders() with the first frame of the headers alone.
  bool BeginShortHeaders(const std::string& path);
  // Sends a little more of the headers that were begun last: less than 1 KiB.
  bool ContinueShortHeaders();
  // Sends 1 MiB more of the headers that were begun last.
  bool ContinueHeaders();
  // Ends them. The call stays open.
  bool EndHeaders();
  // Opens `calls` calls and resets each at once. Then drops what the server has sent.
  bool OpenAndReset(const std::string& path, int calls);
  // Opens as many calls as the socket takes at once. They stay open, and send no message.
  void OpenMany(const std::string& path);
  // Opens and resets as many calls as the socket takes at once, and says that nothing more comes.
  // The connection stays.
  void ResetAndClose(const std::string& path);
  // Sends many frames that mean nothing and need no answer.
  bool SendNothings();
  // The same, but 1 MiB in 64 long frames.
  bool SendBulk();
  // Sends 10,000 frames of `bytes` data each for the call that was begun last, and does not wait
  // for the server's window. Then drops what the server has sent.
  bool SendSmallData(std::size_t bytes);
  // Sends `count` pings at once. Each is answered with 17 bytes.
  bool SendPings(int count);
  // Sends pings, no faster than the daemon allows, until the server reads nothing for 2 s. False if
  // the server ends the connection.
  bool PingUntilStalled();
  // Says that nothing more comes. The connection stays.
  void SendNoMore();

 private:
  RawHttp2(Descriptor connected, const std::string& first);
  bool Send(const std::string& bytes);
  bool DropAnswers();

  Descriptor fd_;
  bool connected_ = false;
  std::uint32_t next_stream_ = 1;
};

}  // namespace gradsync::attack

#endif  // TESTS_ATTACK_RAW_HTTP2_H_
