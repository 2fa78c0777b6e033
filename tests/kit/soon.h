// Waits until a thread of a library has done something, when nothing reports it.

#ifndef TESTS_KIT_SOON_H_
#define TESTS_KIT_SOON_H_

#include <cstdint>
#include <functional>
#include <thread>

#include "tests/kit/deadline.h"

namespace gradsync {

// False: `condition` did not hold within kPatienceMs.
inline bool Soon(const std::function<bool()>& condition) {
  const std::uint64_t give_up_ns = NowNs() + std::uint64_t{kPatienceMs} * 1'000'000;
  while (!condition()) {
    if (NowNs() >= give_up_ns) return false;
    std::this_thread::yield();
  }
  return true;
}

}  // namespace gradsync

#endif  // TESTS_KIT_SOON_H_
