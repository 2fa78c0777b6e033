// What the engines of two nodes tell each other while they connect: the value that a node stores
// for the others, the first bytes of a connection, and the store's keys and values.

#include <map>
#include <memory>
#include <string>
#include <utility>
#include <vector>

#include "absl/time/time.h"
#include "daemon/engine/peer_hello.h"
#include "daemon/engine/stored_peer.h"
#include "daemon/peer/rendezvous.h"
#include "tests/fuzz/byte_reader.h"
#include "tests/fuzz/check.h"

namespace gradsync::daemon {
namespace {

void CheckStoredPeer(const std::string& value) {
  const auto peer = DecodeStoredPeer(value);
  if (!peer.ok()) return;
  FUZZ_CHECK(peer->token.size() == kPeerTokenBytes);
  FUZZ_CHECK(peer->address.length > 0 && peer->address.length <= sizeof(peer->address.storage));
  const std::size_t line = value.find('\n');
  FUZZ_CHECK(peer->agreement == (line == std::string::npos ? "" : value.substr(line + 1)));
  const std::string host = value.substr(0, value.find(' '));
  const auto again = DecodeStoredPeer(EncodeStoredPeer(host, 7417, peer->token, peer->agreement));
  FUZZ_CHECK(again.ok() && again->token == peer->token && again->agreement == peer->agreement);
}

void CheckHello(fuzz::ByteReader reader) {
  const std::string token = reader.Bytes(kPeerTokenBytes);
  std::string bytes = reader.Bool() ? token : "";
  bytes += reader.Bytes(reader.left());
  const auto hello = DecodePeerHello(bytes, token);
  if (hello.has_value()) FUZZ_CHECK(EncodePeerHello(token, *hello) == bytes);
}

// A coordinator's store, as its nodes use it, beside a model of it; and an agent's.
class Stores {
 public:
  void Run(fuzz::ByteReader reader) {
    // Behind the longest value.
    constexpr std::size_t kMost = Rendezvous::kMaxValueBytes + 8;
    for (int i = 0; i < 1000 && !reader.empty(); ++i) {
      const std::uint32_t action = reader.Below(8);
      std::string key = reader.Bytes(reader.Below(8));
      if (reader.Below(16) == 0) key.resize(reader.Number(Rendezvous::kMaxKeyBytes) % 1000, 'k');
      switch (action) {
        case 0:
        case 1:
        case 2:
          Put(key, std::string(reader.Number(Rendezvous::kMaxValueBytes) % kMost, 'v'));
          break;
        case 3:
        case 4:
          When(key);
          break;
        case 5:
          Get(key);
          break;
        case 6:
          for (std::uint32_t more = reader.Byte(); more > 0; --more) {
            Put(std::to_string(more), "v");
          }
          break;
        default:
          if (!reader.Bool()) break;
          store_.Cancel(absl::CancelledError("the nodes have changed"));
          cancelled_ = true;
      }
    }
    for (const auto& [key, one] : asked_) {
      FUZZ_CHECK(*one.answers == (one.answered ? one.times : 0));
    }
    FUZZ_CHECK(values_.size() <= Rendezvous::kMaxKeys);
    FUZZ_CHECK(agent_asked_ <= agent_gets_);
  }

 private:
  struct Asked {
    std::shared_ptr<int> answers = std::make_shared<int>(0);
    int times = 0;
    bool answered = false;  // by now
  };

  void Put(const std::string& key, const std::string& value) {
    const bool fits = !key.empty() && key.size() <= Rendezvous::kMaxKeyBytes &&
                      value.size() <= Rendezvous::kMaxValueBytes &&
                      values_.size() < Rendezvous::kMaxKeys && values_.count(key) == 0;
    FUZZ_CHECK(store_.Put(key, value).ok() == fits);
    if (!fits) return;
    values_[key] = value;
    if (const auto found = asked_.find(key); found != asked_.end() && !cancelled_) {
      found->second.answered = true;
    }
    FUZZ_CHECK(agent_.Put(key, value).ok());
  }

  void When(const std::string& key) {
    const int before = asked_.count(key) > 0 ? *asked_[key].answers : 0;
    Asked& asked = asked_[key];
    const auto found = values_.find(key);
    const bool known = found != values_.end();
    const absl::Status status =
        store_.When(key, [answers = asked.answers, known,
                          expected = known ? found->second : ""](const std::string& value) {
          ++*answers;
          FUZZ_CHECK(!known || value == expected);
        });
    FUZZ_CHECK(*asked.answers == before + (known && !cancelled_ ? 1 : 0));
    if (status.ok() && !cancelled_) ++asked.times;
    if (known && !cancelled_) asked.answered = true;
  }

  void Get(const std::string& key) {
    const auto found = values_.find(key);
    const auto got = store_.Get(key, absl::ZeroDuration());
    FUZZ_CHECK(got.ok() == (found != values_.end() && !cancelled_));
    if (got.ok()) FUZZ_CHECK(*got == found->second);
    ++agent_gets_;
    const auto at_agent = agent_.Get(key, absl::ZeroDuration());
    FUZZ_CHECK(at_agent.ok() == (found != values_.end()));
  }

  Rendezvous store_;
  std::map<std::string, std::string> values_;
  std::map<std::string, Asked> asked_;
  bool cancelled_ = false;

  int agent_asked_ = 0;
  int agent_gets_ = 0;
  Rendezvous agent_{[](const std::string&, const std::string&) {},
                    [this](const std::string&) { ++agent_asked_; }};
};

}  // namespace
}  // namespace gradsync::daemon

extern "C" int LLVMFuzzerTestOneInput(const std::uint8_t* data, std::size_t size) {
  gradsync::fuzz::ByteReader reader(data, size);
  switch (reader.Below(3)) {
    case 0:
      gradsync::daemon::CheckStoredPeer(reader.Bytes(reader.left()));
      break;
    case 1:
      gradsync::daemon::CheckHello(reader);
      break;
    default:
      gradsync::daemon::Stores().Run(reader);
  }
  return 0;
}
