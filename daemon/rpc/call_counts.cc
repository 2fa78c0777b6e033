#include "daemon/rpc/call_counts.h"

#include <arpa/inet.h>
#include <grpc/grpc.h>
#include <grpc/support/alloc.h>
#include <netinet/in.h>

#include <cstddef>
#include <string>
#include <utility>

#include "absl/strings/escaping.h"
#include "absl/strings/match.h"
#include "absl/strings/numbers.h"
#include "absl/strings/str_cat.h"
#include "absl/strings/string_view.h"
#include "daemon/base/mutex.h"

namespace gradsync::daemon {
namespace {

// Takes an answer of gRPC: JSON, or null. It is searched as text: to parse one takes 0.3 ms.
std::string Text(char* json) {
  std::string text = json == nullptr ? "" : json;
  gpr_free(json);
  return text;
}

// gRPC writes large numbers as text. It leaves zeros out.
std::uint64_t Number(absl::string_view json, absl::string_view name) {
  const std::string key = absl::StrCat("\"", name, "\":\"");
  const std::size_t at = json.find(key);
  if (at == absl::string_view::npos) return 0;
  json.remove_prefix(at + key.size());
  std::uint64_t number = 0;
  return absl::SimpleAtoi(json.substr(0, json.find('"')), &number) ? number : 0;
}

// Each number of this name, in order.
std::vector<std::intptr_t> Numbers(absl::string_view json, absl::string_view name) {
  const std::string key = absl::StrCat("\"", name, "\":\"");
  std::vector<std::intptr_t> numbers;
  for (std::size_t at = json.find(key); at != absl::string_view::npos; at = json.find(key)) {
    json.remove_prefix(at + key.size());
    std::intptr_t number = 0;
    if (absl::SimpleAtoi(json.substr(0, json.find('"')), &number)) numbers.push_back(number);
  }
  return numbers;
}

// True if no more follows after this page of an answer.
bool IsLast(absl::string_view page) { return absl::StrContains(page, "\"end\":true"); }

// The text that follows `before`; empty if `before` is not there.
absl::string_view After(absl::string_view text, absl::string_view before) {
  const std::size_t at = text.find(before);
  return at == absl::string_view::npos ? absl::string_view() : text.substr(at + before.size());
}

CallCounts Counts(absl::string_view json, absl::string_view started, absl::string_view succeeded,
                  absl::string_view failed) {
  return {Number(json, started), Number(json, succeeded) + Number(json, failed)};
}

CallCounts ConnectionCounts(absl::string_view socket) {
  return Counts(socket, "streamsStarted", "streamsSucceeded", "streamsFailed");
}

// Held while NewestNumber() has a server of its own.
Mutex* NextMutex() {
  static auto* const mutex = new Mutex;
  return mutex;
}

// gRPC's number of the last server, if it is above `newest`.
std::intptr_t NewestServer(std::intptr_t newest) {
  for (bool end = false; !end;) {
    const std::string page = Text(grpc_channelz_get_servers(newest + 1));
    const std::vector<std::intptr_t> servers = Numbers(page, "serverId");
    if (!servers.empty()) newest = servers.back();
    end = servers.empty() || IsLast(page);
  }
  return newest;
}

// gRPC's number of an object that it makes now.
std::intptr_t NewestNumber() {
  static std::intptr_t last = 0;
  MutexLock lock(NextMutex());
  // gRPC does not tell the number that it gave last. So this makes a server, which takes 2 us.
  grpc_server* const made = grpc_server_create(nullptr, nullptr);
  last = NewestServer(last);
  grpc_server_destroy(made);
  return last;
}

}  // namespace

std::string ConnectionCalls::Text() const {
  const bool v6 = ip.size() == sizeof(in6_addr);
  char host[INET6_ADDRSTRLEN] = "";
  if (v6 || ip.size() == sizeof(in_addr)) {
    inet_ntop(v6 ? AF_INET6 : AF_INET, ip.data(), host, sizeof(host));
  }
  return v6 ? absl::StrCat("[", host, "]:", port) : absl::StrCat(host, ":", port);
}

CountedServer CountedServer::Newest() {
  MutexLock lock(NextMutex());
  CountedServer newest;
  newest.id_ = NewestServer(0);
  return newest;
}

CallCounts CountedServer::Calls() const {
  return Counts(Text(grpc_channelz_get_server(id_)), "callsStarted", "callsSucceeded",
                "callsFailed");
}

std::vector<ConnectionCalls> CountedServer::Connections() const {
  std::vector<ConnectionCalls> connections;
  std::intptr_t last = 0;
  for (bool end = false; !end;) {
    const std::string page = Text(grpc_channelz_get_server_sockets(id_, last + 1, 0));
    const std::vector<std::intptr_t> sockets = Numbers(page, "socketId");
    for (const std::intptr_t socket : sockets) {
      last = socket;
      const std::string answer = Text(grpc_channelz_get_socket(last));
      const absl::string_view remote = After(answer, "\"remote\":");
      const absl::string_view ip = After(remote, "\"ip_address\":\"");
      const absl::string_view port = After(remote, "\"port\":");
      ConnectionCalls connection;
      if (!absl::Base64Unescape(ip.substr(0, ip.find('"')), &connection.ip)) continue;
      int number = 0;
      if (!absl::SimpleAtoi(port.substr(0, port.find_first_not_of("0123456789")), &number))
        continue;
      connection.port = static_cast<std::uint16_t>(number);
      connection.calls = ConnectionCounts(answer);
      connections.push_back(std::move(connection));
    }
    end = sockets.empty() || IsLast(page);
  }
  return connections;
}

bool CountedServer::HasConnections() const {
  return absl::StrContains(Text(grpc_channelz_get_server_sockets(id_, 0, 1)), "\"socketId\"");
}

CountedConnection CountedConnection::Next(int descriptor) {
  CountedConnection next;
  next.name_ = absl::StrCat(" fd:", descriptor, "\"");
  next.after_ = NewestNumber();
  return next;
}

std::optional<CallCounts> CountedConnection::Calls() {
  if (id_ != 0) {
    const std::string answer = Text(grpc_channelz_get_socket(id_));
    if (answer.empty()) return std::nullopt;
    return ConnectionCounts(answer);
  }
  // Other threads may let gRPC make any number of objects before this connection. A later object of
  // that name would be a connection that has got the descriptor after this one.
  for (const std::intptr_t newest = NewestNumber(); after_ < newest;) {
    const std::string answer = Text(grpc_channelz_get_socket(++after_));
    if (!absl::StrContains(answer, name_)) continue;
    id_ = after_;
    return ConnectionCounts(answer);
  }
  return std::nullopt;
}

}  // namespace gradsync::daemon
