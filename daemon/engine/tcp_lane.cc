#include "daemon/engine/tcp_lane.h"

#include <algorithm>
#include <cstring>
#include <utility>

#include "daemon/base/clock.h"
#include "daemon/reduce/combine_order_free.h"

namespace gradsync::daemon {
namespace {

std::size_t RoundUp(std::size_t value, std::size_t unit) {
  return (value + unit - 1) / unit * unit;
}

}  // namespace

TcpLane::TcpLane(std::uint32_t node, const std::vector<std::string>& node_names,
                 std::vector<PeerStream> peers, std::size_t chunk_bytes, std::byte* memory,
                 Owner* owner, LaneProgress* progress)
    : node_(static_cast<int>(node)),
      nodes_(static_cast<int>(node_names.size())),
      chunk_bytes_(chunk_bytes),
      owner_(owner),
      progress_(progress),
      links_(std::move(peers), node_names),
      addends_(static_cast<std::size_t>(nodes_)) {
  const std::size_t bytes = SlotBytes(chunk_bytes_, static_cast<std::uint32_t>(nodes_));
  if (memory == nullptr) {
    memory_.reset(new std::byte[kLaneSlots * bytes + kSlotAlignment]);
    const auto address = reinterpret_cast<std::uintptr_t>(memory_.get());
    memory = memory_.get() + (RoundUp(address, kSlotAlignment) - address);
  }
  for (Slot& slot : slots_) {
    slot.memory = memory;
    memory += bytes;
  }
}

TcpLane::~TcpLane() { Stop(); }

void TcpLane::Start() {
  thread_ = std::thread([this] { Run(); });
}

void TcpLane::Stop() {
  {
    MutexLock lock(&mutex_);
    stopping_ = true;
  }
  changed_.NotifyOne();
  if (thread_.joinable()) thread_.join();
}

void TcpLane::Push(const LaneWork& work) {
  {
    MutexLock lock(&mutex_);
    queue_.Push(work);
  }
  changed_.NotifyOne();
}

void TcpLane::Abort() { links_.Abort(); }

LaneStatistics TcpLane::Statistics() const {
  LaneStatistics statistics;
  statistics.bytes_sent = bytes_sent_.load(std::memory_order_relaxed);
  statistics.bytes_received = bytes_received_.load(std::memory_order_relaxed);
  statistics.busy_ns = busy_ns_.load(std::memory_order_relaxed);
  statistics.chunks = chunks_.load(std::memory_order_relaxed);
  return statistics;
}

bool TcpLane::Take(bool wait, Slot* slot) {
  MutexLock lock(&mutex_);
  while (wait && queue_.empty() && !stopping_) changed_.Wait(&mutex_);
  if (queue_.empty()) return false;
  LaneWork& work = queue_.front();
  slot->work = work;
  work.next += work.stride;
  if (work.next >= work.chunks) queue_.Pop();
  return true;
}

void TcpLane::Run() {
  Slot* last = nullptr;  // this node has sent its sum to the others
  std::uint64_t busy_since_ns = 0;
  for (;;) {
    Slot* next = &slots_[taken_ % kLaneSlots];
    if (Take(/*wait=*/last == nullptr, next)) {
      if (last == nullptr) busy_since_ns = MonotonicNowNs();
      Begin(next);
    } else if (last == nullptr) {
      return;
    } else {
      next = nullptr;
    }
    if (last != nullptr) Complete(last);
    if (next != nullptr) Sum(next);
    const std::uint64_t now_ns = MonotonicNowNs();
    busy_ns_.fetch_add(now_ns - busy_since_ns, std::memory_order_relaxed);
    busy_since_ns = now_ns;
    last = next;
  }
}

// ---- A chunk's shards ---------------------------------------------------------------------------

TcpLane::Shard TcpLane::ShardOf(const Slot& slot, int node) const {
  const std::size_t begin = std::min(static_cast<std::size_t>(node) * slot.shard_items, slot.count);
  return {begin, std::min(slot.shard_items, slot.count - begin)};
}

std::size_t TcpLane::Offset(const Slot& slot, const Shard& shard) const {
  return slot.data + shard.begin * slot.wire_bytes;
}

std::size_t TcpLane::InboxOffset(const Slot& slot, int node) const {
  return chunk_bytes_ + chunk_bytes_ / 2 +
         static_cast<std::size_t>(node) * slot.shard_items * slot.wire_bytes;
}

void TcpLane::Prepare(Slot* slot) {
  const LaneWork& work = slot->work;
  slot->number = taken_++;
  slot->first = work.next * work.chunk_items;
  slot->count = std::min(work.chunk_items, work.exchange->count - slot->first);
  slot->wire_bytes = work.root >= 0 ? 1 : ItemSize(work.wire);
  slot->narrowed = slot->wire_bytes < work.item_bytes;
  slot->data = slot->narrowed ? chunk_bytes_ : 0;
  const auto nodes = static_cast<std::size_t>(nodes_);
  slot->shard_items = RoundUp((slot->count + nodes - 1) / nodes, kShardItems);
  slot->shard_receives = 0;
  slot->receives_results = false;
  slot->dropped = false;
}

// ---- The steps ----------------------------------------------------------------------------------

bool TcpLane::Check(Slot* slot, const absl::Status& status) {
  // A wait that was aborted: the engine has failed by then.
  if (!status.ok() && !owner_->failed()) owner_->Broken(status);
  if (owner_->failed()) slot->dropped = true;
  return !slot->dropped;
}

// Names the memory for a chunk's messages before the node makes its own data, so that they can come
// at once. They are written over memory that is free by then: a node's sum arrives after the shard
// that it contains was sent.
void TcpLane::PostReceives(Slot* slot) {
  const int root = slot->work.root;
  const Shard own = ShardOf(*slot, node_);
  if (node_ == root) return;
  for (int step = 1; step < nodes_; ++step) {
    const int node = (node_ + nodes_ - step) % nodes_;
    const auto index = static_cast<std::size_t>(node);
    if (own.count > 0 && (root < 0 || node == root)) {
      const std::size_t offset = root < 0 ? InboxOffset(*slot, node) : Offset(*slot, own);
      links_.Receive(index, &slot->shards, slot->memory + offset, own.count * slot->wire_bytes);
      ++slot->shard_receives;
    }
    const Shard other = ShardOf(*slot, node);
    if (other.count > 0) {
      links_.Receive(index, &slot->results, slot->memory + Offset(*slot, other),
                     other.count * slot->wire_bytes);
      slot->receives_results = true;
    }
  }
  links_.Start();
}

void TcpLane::SendTo(Slot* slot, int node, const Shard& shard) {
  if (shard.count == 0) return;
  const std::size_t bytes = shard.count * slot->wire_bytes;
  links_.Send(static_cast<std::size_t>(node), &slot->sent, slot->memory + Offset(*slot, shard),
              bytes);
  bytes_sent_.fetch_add(bytes, std::memory_order_relaxed);
}

void TcpLane::PostShards(Slot* slot) {
  if (slot->work.root >= 0 && slot->work.root != node_) return;
  for (int step = 1; step < nodes_; ++step) {
    const int node = (node_ + step) % nodes_;
    SendTo(slot, node, ShardOf(*slot, node));
  }
  links_.Start();
}

void TcpLane::PostResults(Slot* slot) {
  const Shard own = ShardOf(*slot, node_);
  for (int step = 1; step < nodes_; ++step) {
    const int node = (node_ + step) % nodes_;
    if (node == slot->work.root) continue;
    SendTo(slot, node, own);
  }
  links_.Start();
}

void TcpLane::Begin(Slot* slot) {
  Prepare(slot);
  if (!Check(slot, absl::OkStatus())) return;
  PostReceives(slot);
  if (slot->count > 0 && (slot->work.root < 0 || slot->work.root == node_)) {
    slot->work.exchange->gather(slot->first, slot->count, slot->memory);
    if (slot->narrowed) {
      Narrow(slot->work.wire, reinterpret_cast<const float*>(slot->memory), slot->count,
             slot->memory + slot->data);
    }
  }
  PostShards(slot);
  progress_->begun.store(slot->number + 1, std::memory_order_release);
  Check(slot, absl::OkStatus());
}

bool TcpLane::Await(Slot* slot, int phase, LaneLinks::Group* group) {
  if (!Check(slot, absl::OkStatus())) return false;
  progress_->waiting.store(4 * slot->number + static_cast<std::uint64_t>(phase),
                           std::memory_order_release);
  const absl::Status waited = links_.Await(group);
  progress_->waiting.store(0, std::memory_order_release);
  return Check(slot, waited);
}

void TcpLane::AddUp(Slot* slot) {
  const Shard own = ShardOf(*slot, node_);
  if (own.count == 0) return;
  std::byte* const sum = slot->memory + Offset(*slot, own);
  for (int node = 0; node < nodes_; ++node) {
    addends_[static_cast<std::size_t>(node)] =
        node == node_ ? sum : slot->memory + InboxOffset(*slot, node);
  }
  const ReduceOp op = slot->work.exchange->op;
  if (IsOrderFree(op, slot->work.wire)) {
    CombineOrderFree(op, slot->work.wire, addends_, own.count, {&sum, 1});
  } else {
    SumShards(slot->work.wire, addends_, own.count, sum);
  }
}

void TcpLane::Sum(Slot* slot) {
  if (slot->dropped) return;
  if (!Await(slot, 1, &slot->shards)) return;
  if (slot->work.root < 0) AddUp(slot);
  bytes_received_.fetch_add(static_cast<std::uint64_t>(slot->shard_receives) *
                                ShardOf(*slot, node_).count * slot->wire_bytes,
                            std::memory_order_relaxed);
  PostResults(slot);
  Check(slot, absl::OkStatus());
}

void TcpLane::Complete(Slot* slot) {
  Exchange* const exchange = slot->work.exchange;
  if (!slot->dropped && Await(slot, 2, &slot->results)) {
    if (slot->receives_results) {
      bytes_received_.fetch_add((slot->count - ShardOf(*slot, node_).count) * slot->wire_bytes,
                                std::memory_order_relaxed);
    }
    if (slot->count > 0 && slot->work.root != node_) {
      if (slot->narrowed) {
        Widen(slot->work.wire, slot->memory + slot->data, slot->count,
              reinterpret_cast<float*>(slot->memory));
      }
      exchange->scatter(slot->first, slot->count, slot->memory);
    }
    // The kernel must have taken this node's sum before its memory is used again.
    Await(slot, 3, &slot->sent);
  }
  if (slot->dropped) {
    exchange->dropped.store(true, std::memory_order_relaxed);
  } else {
    chunks_.fetch_add(1, std::memory_order_relaxed);
  }
  if (exchange->chunks_left.fetch_sub(1, std::memory_order_acq_rel) == 1) {
    owner_->Finished(slot->work);
  }
}

}  // namespace gradsync::daemon
