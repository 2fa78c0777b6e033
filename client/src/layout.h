// The Layout that a trainer holds.

#ifndef CLIENT_SRC_LAYOUT_H_
#define CLIENT_SRC_LAYOUT_H_

#include <cstddef>
#include <cstdint>
#include <memory>

#include "absl/status/statusor.h"
#include "client/include/gradsync/client.h"
#include "client/src/device_steps.h"
#include "client/src/layout_plan.h"
#include "client/src/step_client.h"

namespace gradsync::client {

// `arena`: its first byte; on a GPU, its device address. `device_steps`: null in host memory.
std::unique_ptr<Layout> NewLayout(const LayoutSpec& spec, std::uint64_t fingerprint,
                                  LayoutPlan plan, std::shared_ptr<std::byte> arena,
                                  std::shared_ptr<StepClient> steps,
                                  std::shared_ptr<DeviceSteps> device_steps);

// The steps of a layout that NewLayout made. FAILED_PRECONDITION FORKED in a forked child.
absl::StatusOr<std::shared_ptr<StepClient>> StepsOf(const Layout& layout);

}  // namespace gradsync::client

#endif  // CLIENT_SRC_LAYOUT_H_
