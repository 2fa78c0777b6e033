#include "daemon/worker/chunk_ledger.h"

#include <algorithm>
#include <utility>

#include "daemon/engine/lane_memory.h"

namespace gradsync::daemon {

std::uint64_t ChunkLedger::Add(Exchange* exchange) {
  Pending pending;
  pending.exchange = exchange;
  pending.item_bytes = ItemSize(WorkType(exchange->dtype, exchange->op));
  const std::size_t items = ChunkItems(pending);
  pending.gathers_left = (exchange->count + items - 1) / items;
  pending.scatters_left = pending.gathers_left;
  return Add(std::move(pending));
}

std::uint64_t ChunkLedger::AddBroadcast(std::unique_ptr<Exchange> exchange, bool root) {
  Pending pending;
  pending.exchange = exchange.get();
  pending.owned = std::move(exchange);
  pending.item_bytes = 1;
  const std::size_t chunks = (pending.exchange->count + chunk_bytes_ - 1) / chunk_bytes_;
  (root ? pending.gathers_left : pending.scatters_left) = chunks;
  return Add(std::move(pending));
}

std::uint64_t ChunkLedger::Add(Pending pending) {
  pending_[++last_] = std::move(pending);
  return last_;
}

std::size_t ChunkLedger::ChunkItems(const Pending& pending) const {
  return chunk_bytes_ / std::max<std::size_t>(pending.item_bytes, 1);
}

bool ChunkLedger::Fits(const Pending& pending, const ChunkRequest& request) const {
  const std::size_t total = pending.exchange->count;
  return request.count > 0 && request.count <= ChunkItems(pending) &&
         request.first % kShardItems == 0 && request.first <= total &&
         request.count <= total - request.first && request.offset % kSlotAlignment == 0 &&
         request.offset <= lane_bytes_ &&
         request.count * pending.item_bytes <= lane_bytes_ - request.offset;
}

std::optional<ChunkLedger::Chunk> ChunkLedger::Begin(const ChunkRequest& request) {
  const auto found = pending_.find(request.exchange);
  if (found == pending_.end() || found->second.answered) return std::nullopt;
  Pending& pending = found->second;
  const bool known =
      request.step == ChunkRequest::kGather || request.step == ChunkRequest::kScatter;
  if (!known || !Fits(pending, request)) return std::nullopt;
  std::size_t& left =
      request.step == ChunkRequest::kGather ? pending.gathers_left : pending.scatters_left;
  if (left == 0) return std::nullopt;
  --left;
  ++pending.running;
  return Chunk{pending.exchange,
               request.count * pending.item_bytes * (1 + pending.exchange->buffers)};
}

void ChunkLedger::End(std::uint64_t exchange) { --pending_.find(exchange)->second.running; }

bool ChunkLedger::Awaits(std::uint64_t exchange) const {
  const auto found = pending_.find(exchange);
  return found != pending_.end() && !found->second.answered;
}

bool ChunkLedger::IsWhole(std::uint64_t exchange) const {
  const Pending& pending = pending_.find(exchange)->second;
  return pending.gathers_left == 0 && pending.scatters_left == 0 && pending.running == 0;
}

void ChunkLedger::Answer(std::uint64_t exchange, const absl::Status& status) {
  Pending& pending = pending_.find(exchange)->second;
  pending.answered = true;
  pending.status = status;
}

std::optional<ChunkLedger::Finished> ChunkLedger::TakeFinished(std::uint64_t exchange) {
  const auto found = pending_.find(exchange);
  if (found == pending_.end() || !found->second.answered || found->second.running > 0) {
    return std::nullopt;
  }
  Pending pending = std::move(found->second);
  pending_.erase(found);
  return Finished{pending.exchange, std::move(pending.owned), pending.status};
}

}  // namespace gradsync::daemon
