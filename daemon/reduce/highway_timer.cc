// Highway's library measures the timer when it is loaded: 3 ms of each daemon and each worker.
// Only its benchmarks need the result, and none is here. In a program with this definition, the
// library calls it instead of its own.

#include "hwy/nanobenchmark.h"

namespace hwy {
namespace platform {

uint64_t TimerResolution() { return 1; }

}  // namespace platform
}  // namespace hwy
