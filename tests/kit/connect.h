// Connections that a test makes itself, without gRPC.

#ifndef TESTS_KIT_CONNECT_H_
#define TESTS_KIT_CONNECT_H_

#include <string>

#include "tests/kit/child_process.h"

namespace gradsync {

// Connects to a Unix socket. `type`: as for socket(). Invalid: it was refused. Thread-safe.
Descriptor ConnectUnix(const std::string& path, int type);

// Connects to "host:port", an IPv4 address, from an address of this machine: all loopback addresses
// belong to it. Bytes that are sent go at once. Invalid: it was refused. Thread-safe.
Descriptor ConnectTcp(const std::string& to, const std::string& from_host = "0.0.0.0");

// Listens on a free port of an IPv4 address of this machine. Sets `*address` to "host:port".
Descriptor ListenTcp(const std::string& host, std::string* address);
// The next connection. Invalid: none has come after `timeout_ms`. Thread-safe.
Descriptor AcceptOne(const Descriptor& listener, int timeout_ms);

}  // namespace gradsync

#endif  // TESTS_KIT_CONNECT_H_
