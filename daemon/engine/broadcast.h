// A broadcast between nodes, as an exchange of bytes.

#ifndef DAEMON_ENGINE_BROADCAST_H_
#define DAEMON_ENGINE_BROADCAST_H_

#include <cstddef>
#include <cstring>
#include <functional>
#include <memory>
#include <utility>
#include <vector>

#include "absl/status/status.h"
#include "daemon/engine/engine.h"

namespace gradsync::daemon {

// The exchange of one node: see Engine::Broadcast(). The root gathers, the others scatter. Either
// fills the node's other buffers, so each chunk's copies are a part of its turn.
inline std::unique_ptr<Exchange> MakeBroadcast(std::vector<std::byte*> buffers, std::size_t bytes,
                                               std::function<void(const absl::Status&)> done) {
  auto exchange = std::make_unique<Exchange>();
  exchange->count = bytes;
  exchange->buffers = buffers.size();
  exchange->gather = [buffers](std::size_t first, std::size_t count, std::byte* to) {
    std::memcpy(to, buffers.front() + first, count);
    for (std::size_t i = 1; i < buffers.size(); ++i) std::memcpy(buffers[i] + first, to, count);
  };
  exchange->scatter = [buffers = std::move(buffers)](std::size_t first, std::size_t count,
                                                     const std::byte* from) {
    for (std::byte* const buffer : buffers) std::memcpy(buffer + first, from, count);
  };
  exchange->done = std::move(done);
  return exchange;
}

}  // namespace gradsync::daemon

#endif  // DAEMON_ENGINE_BROADCAST_H_
