// How many calls a gRPC server has, as gRPC itself counts them (channelz).
//
// gRPC counts a call when its headers arrive. That can be long before a thread of ours hears of it:
// a thread that reads a connection hands nothing on for as long as there is more to read. Each call
// takes about 13 KiB until it is destroyed, even if the client has reset it at once.

#ifndef DAEMON_RPC_CALL_COUNTS_H_
#define DAEMON_RPC_CALL_COUNTS_H_

#include <cstdint>
#include <optional>
#include <string>
#include <vector>

namespace gradsync::daemon {

struct CallCounts {
  std::uint64_t started = 0;
  std::uint64_t ended = 0;
  std::uint64_t open() const { return started > ended ? started - ended : 0; }
};

// The calls of one TCP connection.
struct ConnectionCalls {
  std::string ip;  // 4 or 16 bytes in the network's order
  std::uint16_t port = 0;
  CallCounts calls;

  std::string Text() const;  // "10.0.0.1:4711"
};

// A gRPC server. A value. Its methods are thread-safe and never wait for calls or connections. They
// return zeros, or nothing, if the server has ended.
class CountedServer {
 public:
  CountedServer() = default;
  // The server that was started last. Called right after BuildAndStart(). No other thread may start
  // a server between these two calls.
  static CountedServer Newest();

  // gRPC does not count the end of a call that it refuses itself, such as one without a path. So
  // over time, `open` becomes larger than the truth. It can also be smaller: a call counts as ended
  // once it is answered, although a connection that is busy with reading still holds it. To call
  // this 20 times a second takes 0.3 % of a core (measured).
  CallCounts Calls() const;
  // The server's connections, with exact counts. Asks gRPC about each connection, so call it
  // rarely. Connections from AddInsecureChannelFromFd() are not in the result. The others stay in
  // it until the last of their calls is destroyed.
  std::vector<ConnectionCalls> Connections() const;
  // True if Connections() would return any.
  bool HasConnections() const;

 private:
  std::intptr_t id_ = 0;  // gRPC's; 0: none
};

// A connection from AddInsecureChannelFromFd(). gRPC does not list it. But gRPC numbers all its
// objects, so this class tries the next numbers, each once, until the name is right. Not
// thread-safe; copies are independent.
class CountedConnection {
 public:
  // The connection that gRPC is about to make from this descriptor. Called right before
  // AddInsecureChannelFromFd(). Thread-safe.
  static CountedConnection Next(int descriptor);

  // Exact counts. nullopt: gRPC has not made the connection yet, or has destroyed both it and the
  // last of its calls.
  std::optional<CallCounts> Calls();

 private:
  std::string name_;
  std::intptr_t after_ = 0;  // gRPC's number of the connection is larger
  std::intptr_t id_ = 0;     // gRPC's; 0: not found yet
};

}  // namespace gradsync::daemon

#endif  // DAEMON_RPC_CALL_COUNTS_H_
