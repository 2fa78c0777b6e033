// Tests on a real machine. Tests that use only the driver's C ABI run there unchanged:
// tools/gpu_check puts the real libraries in the place of the fakes and names the GPUs in
// GRADSYNC_REAL_GPUS, as UUIDs with commas between them.

#ifndef TESTS_FAKES_MACHINE_REAL_GPUS_H_
#define TESTS_FAKES_MACHINE_REAL_GPUS_H_

#include <string>
#include <vector>

namespace gradsync::fakes {

// Empty on a fake machine.
const std::vector<std::string>& RealGpus();
// "GRADSYNC_REAL_GPUS=...", for another process.
std::string RealGpusVariable(const std::vector<std::string>& uuids);

}  // namespace gradsync::fakes

#endif  // TESTS_FAKES_MACHINE_REAL_GPUS_H_
