// Tests on a real machine. Those that speak to the driver through its C ABI alone run there as they
// are: tools/gpu_check gives them the real libraries in the fakes' place and names the GPUs in
// GRADSYNC_REAL_GPUS, UUIDs with commas between them.

#ifndef TESTS_FAKES_MACHINE_REAL_GPUS_H_
#define TESTS_FAKES_MACHINE_REAL_GPUS_H_

#include <string>
#include <vector>

namespace gradsync::fakes {

// Empty: on fakes.
const std::vector<std::string>& RealGpus();

}  // namespace gradsync::fakes

#endif  // TESTS_FAKES_MACHINE_REAL_GPUS_H_
