// Keeps some file descriptors back. When all others are in use, the daemon can still accept the
// connections of clients that ask for health or status.

#ifndef DAEMON_RPC_DESCRIPTOR_RESERVE_H_
#define DAEMON_RPC_DESCRIPTOR_RESERVE_H_

#include <cstddef>
#include <vector>

#include "daemon/base/unique_fd.h"

namespace gradsync::daemon {

// Holds descriptors that stand for nothing. Used by one thread.
class DescriptorReserve {
 public:
  // Holds `count`, or as many as there are.
  explicit DescriptorReserve(std::size_t count);

  // Gives `count` of them back to the process. False if it holds fewer.
  bool Free(std::size_t count);
  // Takes descriptors until it holds as many as at first.
  void Refill();
  bool full() const { return held_.size() == count_; }

 private:
  const std::size_t count_;
  std::vector<UniqueFd> held_;
};

}  // namespace gradsync::daemon

#endif  // DAEMON_RPC_DESCRIPTOR_RESERVE_H_
