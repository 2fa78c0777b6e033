// A lane's connection to another node. The fuzzer plays that node: it sends messages that are
// expected, others, and parts of them, and reads when it likes.

#include <sys/socket.h>
#include <unistd.h>

#include <algorithm>
#include <array>
#include <cstring>
#include <deque>
#include <string>
#include <utility>
#include <vector>

#include "absl/status/status.h"
#include "daemon/base/unique_fd.h"
#include "daemon/engine/lane_connection.h"
#include "daemon/engine/peer_stream.h"
#include "tests/fuzz/byte_reader.h"
#include "tests/fuzz/check.h"

namespace gradsync::daemon {
namespace {

constexpr int kMaxActions = 200;
constexpr std::size_t kHeaderBytes = 16;

std::string Header(std::uint64_t number, std::uint64_t bytes) {
  std::string header(kHeaderBytes, '\0');
  std::memcpy(header.data(), &number, 8);
  std::memcpy(header.data() + 8, &bytes, 8);
  return header;
}

class World {
 public:
  explicit World(fuzz::ByteReader reader) : reader_(reader) {
    std::array<int, 2> ends{};
    FUZZ_CHECK(socketpair(AF_UNIX, SOCK_STREAM | SOCK_NONBLOCK | SOCK_CLOEXEC, 0, ends.data()) ==
               0);
    other_ = UniqueFd(ends[1]);
    connection_ =
        LaneConnection(PeerStream(UniqueFd(ends[0]), nullptr, PeerStream::Role::kConnects));
  }

  void Run() {
    for (int i = 0; i < kMaxActions && !reader_.empty(); ++i) {
      Act();
      if (!Move()) return;
    }
  }

 private:
  void Act() {
    switch (reader_.Below(8)) {
      case 0:
      case 1:
        // Exactly as large as the message, so that sanitizers see one byte too many.
        received_.emplace_back(1 + reader_.Byte() % 64);
        connection_.Receive({&received_group_, received_.back().data(), received_.back().size()});
        return;
      case 2:
        Send(reader_.Below(16) == 0 ? 40'000 : 1 + reader_.Byte() % 64);
        return;
      case 3: {
        // The next message as it is expected.
        const std::size_t next = spoken_++;
        const std::size_t bytes =
            next < received_.size() ? received_[next].size() : 1 + reader_.Byte() % 64;
        std::string data = reader_.Bytes(reader_.Below(8));
        data.resize(bytes, 'd');
        Speak(Header(next + 1, bytes) + data);
        return;
      }
      case 4:
        Speak(reader_.Bytes(reader_.Below(32)));
        return;
      case 5: {
        const std::size_t next = spoken_++;
        Speak(Header(reader_.Number(next + 1),
                     reader_.Number(next < received_.size() ? received_[next].size() : 8)));
        return;
      }
      case 6:
        Hear();
        return;
      default:
        if (reader_.Below(4) == 0) other_.reset();
    }
  }

  void Send(std::size_t bytes) {
    std::vector<std::byte>& data = sent_.emplace_back(bytes, std::byte{'s'});
    data.front() = static_cast<std::byte>(reader_.Byte());
    connection_.Send({&sent_group_, data.data(), bytes});
    to_hear_ += Header(sent_.size(), bytes);
    to_hear_.append(reinterpret_cast<const char*>(data.data()), bytes);
  }

  // Bytes that do not fit into the socket are lost, for the model too.
  void Speak(const std::string& bytes) {
    if (!other_.valid() || bytes.empty()) return;
    // In parts, as a network may bring them.
    const std::size_t first = reader_.Below(static_cast<std::uint32_t>(bytes.size() % 255) + 1);
    const std::pair<std::size_t, std::size_t> parts[] = {{0, first}, {first, bytes.size() - first}};
    for (const auto& [from, count] : parts) {
      if (count == 0) continue;
      const ssize_t taken = send(other_.get(), bytes.data() + from, count, MSG_NOSIGNAL);
      if (taken <= 0) return;
      said_.append(bytes, from, static_cast<std::size_t>(taken));
      if (from == 0 && reader_.Bool() && !Move()) return;
    }
  }

  void Hear() {
    char bytes[65536];
    if (!other_.valid()) return;
    const ssize_t got = recv(other_.get(), bytes, sizeof(bytes), 0);
    if (got <= 0) return;
    const auto count = static_cast<std::size_t>(got);
    FUZZ_CHECK(heard_ + count <= to_hear_.size());
    FUZZ_CHECK(to_hear_.compare(heard_, count, bytes, count) == 0);
    heard_ += count;
  }

  // Moves, and compares with what was said. False: the connection has failed.
  bool Move() {
    if (failed_) return false;
    std::vector<TransferGroup*> done;
    const absl::Status status = connection_.Move(&done);
    done_ += static_cast<std::size_t>(std::count(done.begin(), done.end(), &received_group_));
    failed_ = !status.ok();
    Expect();
    FUZZ_CHECK(!absl::IsInternal(status) || wrong_);
    FUZZ_CHECK(status.ok() || absl::IsInternal(status) || !other_.valid());
    // A connection that can neither send nor has ended has read everything.
    FUZZ_CHECK(!status.ok() || (!wrong_ && done_ == expected_done_));
    FUZZ_CHECK(done_ <= expected_done_);
    return !failed_;
  }

  // How many messages have come whole, by a second decoder.
  void Expect() {
    while (!wrong_ && expected_done_ < received_.size()) {
      const std::vector<std::byte>& data = received_[expected_done_];
      if (said_.size() - parsed_ < kHeaderBytes) return;
      if (said_.compare(parsed_, kHeaderBytes, Header(expected_done_ + 1, data.size())) != 0) {
        wrong_ = true;
        return;
      }
      if (said_.size() - parsed_ - kHeaderBytes < data.size()) return;
      const char* const came = said_.data() + parsed_ + kHeaderBytes;
      FUZZ_CHECK(failed_ || std::memcmp(data.data(), came, data.size()) == 0);
      parsed_ += kHeaderBytes + data.size();
      ++expected_done_;
    }
  }

  fuzz::ByteReader reader_;
  std::deque<std::vector<std::byte>> received_;  // by message; before the connection uses it
  std::deque<std::vector<std::byte>> sent_;
  TransferGroup received_group_, sent_group_;
  LaneConnection connection_;
  UniqueFd other_;
  bool failed_ = false;

  std::size_t spoken_ = 0;  // messages that were begun
  std::string said_;        // by the other node
  std::size_t parsed_ = 0;  // of it
  std::size_t expected_done_ = 0;
  bool wrong_ = false;  // it has sent another message than the expected one
  std::size_t done_ = 0;
  std::string to_hear_;
  std::size_t heard_ = 0;
};

}  // namespace
}  // namespace gradsync::daemon

extern "C" int LLVMFuzzerTestOneInput(const std::uint8_t* data, std::size_t size) {
  gradsync::daemon::World(gradsync::fuzz::ByteReader(data, size)).Run();
  return 0;
}
