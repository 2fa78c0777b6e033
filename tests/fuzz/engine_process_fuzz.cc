// What an engine process asks of the daemon: chunks of its exchanges, in lanes of shared memory,
// and values of the rendezvous store. The fuzzer plays the process, beside models of both.

#include <algorithm>
#include <array>
#include <cstddef>
#include <cstdint>
#include <cstring>
#include <deque>
#include <map>
#include <memory>
#include <optional>
#include <set>
#include <string>
#include <utility>
#include <vector>

#include "absl/status/status.h"
#include "absl/time/time.h"
#include "daemon/engine/engine.h"
#include "daemon/engine/engine_settings.h"
#include "daemon/engine/lane_memory.h"
#include "daemon/peer/rendezvous.h"
#include "daemon/worker/chunk_ledger.h"
#include "daemon/worker/lane_socket.h"
#include "daemon/worker/store_desk.h"
#include "daemon/worker/worker.pb.h"
#include "tests/fuzz/byte_reader.h"
#include "tests/fuzz/check.h"

namespace gradsync::daemon {
namespace {

constexpr int kMaxActions = 300;
constexpr std::size_t kChunkBytes = EngineSettings::kMinChunkBytes;
constexpr std::size_t kLaneBytes = LaneBytes(kChunkBytes, /*nodes=*/2);

// ---- Chunks

// An exchange as the daemon submits it, and what is known of it.
struct Submitted {
  std::unique_ptr<Exchange> exchange;  // null: the ledger has it
  Exchange* raw = nullptr;
  std::size_t item_bytes = 0;
  // Exactly as large as the exchange, so that sanitizers see one byte too many.
  std::unique_ptr<std::byte[]> data;
  std::size_t gathers_left = 0;
  std::size_t scatters_left = 0;
  int running = 0;
  bool answered = false;
  bool finished = false;
};

class Chunks {
 public:
  void Run(fuzz::ByteReader reader) {
    for (int i = 0; i < kMaxActions && !reader.empty(); ++i) Act(&reader);
    // The process ends.
    for (auto& [id, one] : submitted_) {
      if (!one.answered) Answer(id, absl::UnavailableError("it has ended"));
    }
    while (!running_.empty()) End(0);
    for (const auto& [id, one] : submitted_) {
      FUZZ_CHECK(one.finished);
      FUZZ_CHECK(!ledger_.Awaits(id) && !ledger_.TakeFinished(id).has_value());
    }
  }

 private:
  void Act(fuzz::ByteReader* reader) {
    switch (reader->Below(10)) {
      case 0:
        return Submit(reader);
      case 1:
        return Broadcast(reader);
      case 2:
        if (!running_.empty()) End(reader->Byte() % running_.size());
        return;
      case 3: {
        const std::uint64_t id = reader->Number(last_);
        if (!ledger_.Awaits(id)) return;
        return Answer(id, reader->Bool() ? absl::OkStatus() : absl::AbortedError("it has failed"));
      }
      case 4: {
        // Any request.
        ChunkRequest request;
        const std::string bytes = reader->Bytes(sizeof(request));
        std::memcpy(static_cast<void*>(&request), bytes.data(), bytes.size());
        return Ask(request);
      }
      default:
        return Ask(NearlyRight(reader));
    }
  }

  void Submit(fuzz::ByteReader* reader) {
    constexpr std::array<DataType, 5> kTypes = {DataType::kFloat32, DataType::kFloat64,
                                                DataType::kBfloat16, DataType::kInt8,
                                                DataType::kInt64};
    Submitted one;
    one.exchange = std::make_unique<Exchange>();
    one.raw = one.exchange.get();
    one.raw->dtype = kTypes[reader->Below(kTypes.size())];
    one.item_bytes = ItemSize(WorkType(one.raw->dtype, one.raw->op));
    const std::size_t items = kChunkBytes / one.item_bytes;
    one.raw->count = reader->Number(items) % (3 * items);
    one.raw->buffers = reader->Below(4);
    one.gathers_left = one.scatters_left = (one.raw->count + items - 1) / items;
    const std::uint64_t id = ledger_.Add(one.raw);
    Remember(id, std::move(one));
  }

  void Broadcast(fuzz::ByteReader* reader) {
    Submitted one;
    auto exchange = std::make_unique<Exchange>();
    one.raw = exchange.get();
    one.item_bytes = 1;
    one.raw->count = reader->Number(kChunkBytes) % (3 * kChunkBytes);
    const bool root = reader->Bool();
    const std::size_t chunks = (one.raw->count + kChunkBytes - 1) / kChunkBytes;
    (root ? one.gathers_left : one.scatters_left) = chunks;
    const std::uint64_t id = ledger_.AddBroadcast(std::move(exchange), root);
    Remember(id, std::move(one));
  }

  void Remember(std::uint64_t id, Submitted one) {
    FUZZ_CHECK(id == last_ + 1);
    last_ = id;
    one.data = std::make_unique<std::byte[]>(one.raw->count * one.item_bytes);
    submitted_.emplace(id, std::move(one));
  }

  // A chunk as a process in order asks for it, or nearly so.
  ChunkRequest NearlyRight(fuzz::ByteReader* reader) const {
    ChunkRequest request;
    request.step = 1 + reader->Below(2);
    request.exchange = last_ - std::min<std::uint64_t>(last_, reader->Below(3));
    const auto found = submitted_.find(request.exchange);
    if (found == submitted_.end() || found->second.finished) return request;
    const Submitted& one = found->second;
    const std::size_t items = kChunkBytes / one.item_bytes;
    const std::size_t left =
        request.step == ChunkRequest::kGather ? one.gathers_left : one.scatters_left;
    const std::size_t first = left == 0 ? 0 : (left - 1) * items;
    request.first = reader->Number(first);
    request.count =
        reader->Number(std::min(items, one.raw->count - std::min(first, one.raw->count)));
    request.offset = reader->Bool() ? 0 : reader->Number(kLaneBytes - kChunkBytes);
    return request;
  }

  // Whether the request may be granted, by a second check.
  bool MayAsk(const ChunkRequest& request) const {
    const auto found = submitted_.find(request.exchange);
    if (found == submitted_.end() || found->second.answered) return false;
    const Submitted& one = found->second;
    const std::uint64_t total = one.raw->count;
    const bool in_bucket = request.first % kShardItems == 0 && request.first < total &&
                           request.count > 0 && request.count <= total - request.first;
    const bool in_chunk = request.count <= kChunkBytes / one.item_bytes;
    const bool in_lane = request.offset % kSlotAlignment == 0 && request.offset <= kLaneBytes &&
                         in_chunk && request.count * one.item_bytes <= kLaneBytes - request.offset;
    const bool left = (request.step == ChunkRequest::kGather && one.gathers_left > 0) ||
                      (request.step == ChunkRequest::kScatter && one.scatters_left > 0);
    return in_bucket && in_lane && left;
  }

  void Ask(const ChunkRequest& request) {
    const bool may = MayAsk(request);
    const std::optional<ChunkLedger::Chunk> chunk = ledger_.Begin(request);
    FUZZ_CHECK(chunk.has_value() == may);
    if (!may) return;
    Submitted& one = submitted_.at(request.exchange);
    const std::size_t bytes = request.count * one.item_bytes;
    FUZZ_CHECK(chunk->exchange == one.raw && chunk->traffic == bytes * (1 + one.raw->buffers));
    const bool gathers = request.step == ChunkRequest::kGather;
    --(gathers ? one.gathers_left : one.scatters_left);
    // Both ends of what the callback reads and writes.
    std::byte* const sum = lane_.get() + request.offset;
    std::byte* const data = one.data.get() + request.first * one.item_bytes;
    for (const std::size_t at : {std::size_t{0}, bytes - 1}) {
      if (gathers) {
        sum[at] = data[at];
      } else {
        data[at] = sum[at];
      }
    }
    ++one.running;
    running_.push_back(request.exchange);
  }

  void End(std::size_t which) {
    const std::uint64_t id = running_[which];
    running_.erase(running_.begin() + static_cast<std::ptrdiff_t>(which));
    ledger_.End(id);
    --submitted_.at(id).running;
    Finish(id);
  }

  void Answer(std::uint64_t id, absl::Status status) {
    Submitted& one = submitted_.at(id);
    FUZZ_CHECK(!one.answered);
    const bool whole = one.gathers_left == 0 && one.scatters_left == 0 && one.running == 0;
    FUZZ_CHECK(ledger_.IsWhole(id) == whole);
    if (status.ok() && !whole) status = absl::UnavailableError("it has finished early");
    ledger_.Answer(id, status);
    FUZZ_CHECK(!ledger_.Awaits(id));
    one.answered = true;
    Finish(id);
  }

  void Finish(std::uint64_t id) {
    Submitted& one = submitted_.at(id);
    const auto finished = ledger_.TakeFinished(id);
    FUZZ_CHECK(finished.has_value() == (one.answered && one.running == 0));
    if (!finished.has_value()) return;
    FUZZ_CHECK(!one.finished && finished->exchange == one.raw);
    FUZZ_CHECK((finished->owned == nullptr) == (one.exchange != nullptr));
    FUZZ_CHECK(!finished->status.ok() || (one.gathers_left == 0 && one.scatters_left == 0));
    one.finished = true;
    one.exchange = nullptr;
    one.raw = nullptr;
  }

  ChunkLedger ledger_{kChunkBytes, kLaneBytes};
  const std::unique_ptr<std::byte[]> lane_ = std::make_unique<std::byte[]>(kLaneBytes);
  std::uint64_t last_ = 0;
  std::map<std::uint64_t, Submitted> submitted_;
  std::vector<std::uint64_t> running_;  // the exchanges of the callbacks that run
};

// ---- The store

class Store {
 public:
  void Run(fuzz::ByteReader reader) {
    for (int i = 0; i < kMaxActions && !reader.empty(); ++i) Act(&reader);
    FUZZ_CHECK(answers_ <= gets_);
  }

 private:
  void Act(fuzz::ByteReader* reader) {
    worker::EngineEvent event;
    switch (reader->Below(8)) {
      case 0:
        event.mutable_set()->set_key(Key(reader));
        event.mutable_set()->set_value(std::string(reader->Number(2) % 5000, 'v'));
        return Take(event);
      case 1:
        event.set_get(Key(reader));
        return Take(event);
      case 2:
        for (int more = reader->Byte(); more > 0; --more) {
          event.set_get("k" + std::to_string(gets_));
          Take(event);
        }
        return;
      case 3: {
        // Any event. The engine's failure does not come here.
        const bool parsed = event.ParseFromString(reader->Bytes(reader->Below(64)));
        if (parsed && !event.has_failed()) Take(event);
        return;
      }
      case 4:
        if (reader->Below(16) != 0) return;
        cancelled_ = true;
        return store_.Cancel(absl::CancelledError("the nodes have changed"));
      case 5: {
        // Another node stores a value.
        const std::string key = Key(reader);
        Expect(store_.Put(key, "theirs").ok(), key, "theirs");
        return;
      }
      default:
        if (desk_.busy()) Look();
    }
  }

  static std::string Key(fuzz::ByteReader* reader) { return reader->Bytes(reader->Below(4)); }

  void Take(const worker::EngineEvent& event) {
    const absl::Status status = desk_.Take(event);
    if (event.has_set()) {
      Expect(status.ok(), event.set().key(), event.set().value());
    } else {
      FUZZ_CHECK(status.ok());
      Ask(event.get());
    }
    FUZZ_CHECK(desk_.busy() == !wanted_.empty());
    FUZZ_CHECK(desk_.refused() == refused_);
  }

  // The process has asked for a key. It may ask for each key once.
  void Ask(const std::string& key) {
    const bool fits = key.size() <= Rendezvous::kMaxKeyBytes && gets_ < Rendezvous::kMaxKeys;
    if (!fits || !asked_.insert(key).second) {
      refused_ = true;
      return;
    }
    wanted_.push_back(key);
    ++gets_;
  }

  // A value was stored, or was not.
  void Expect(bool stored, const std::string& key, const std::string& value) {
    const bool fits = !key.empty() && key.size() <= Rendezvous::kMaxKeyBytes &&
                      value.size() <= Rendezvous::kMaxValueBytes &&
                      values_.size() < Rendezvous::kMaxKeys && values_.count(key) == 0;
    FUZZ_CHECK(stored == fits);
    if (fits) values_[key] = value;
  }

  void Look() {
    const std::string key = wanted_.front();
    wanted_.pop_front();
    bool answered = false;
    const absl::Status status =
        desk_.Look(absl::ZeroDuration(), [&](const std::string& given, const std::string& value) {
          FUZZ_CHECK(given == key && values_.count(key) > 0 && values_.at(key) == value);
          answered = true;
          ++answers_;
        });
    FUZZ_CHECK(status.ok() == !cancelled_);
    FUZZ_CHECK(answered == (!cancelled_ && values_.count(key) > 0));
    if (status.ok() && !answered) wanted_.push_back(key);
    FUZZ_CHECK(desk_.busy() == !wanted_.empty());
  }

  Rendezvous store_;
  StoreDesk desk_{&store_};
  std::map<std::string, std::string> values_;
  std::set<std::string> asked_;
  std::deque<std::string> wanted_;
  bool refused_ = false;
  bool cancelled_ = false;
  std::size_t gets_ = 0;  // keys in asked_
  std::size_t answers_ = 0;
};

}  // namespace
}  // namespace gradsync::daemon

extern "C" int LLVMFuzzerTestOneInput(const std::uint8_t* data, std::size_t size) {
  gradsync::fuzz::ByteReader reader(data, size);
  if (reader.Bool()) {
    gradsync::daemon::Store().Run(reader);
  } else {
    gradsync::daemon::Chunks().Run(reader);
  }
  return 0;
}
