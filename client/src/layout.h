// The Layout that a trainer holds.

#ifndef CLIENT_SRC_LAYOUT_H_
#define CLIENT_SRC_LAYOUT_H_

#include <cstddef>
#include <cstdint>
#include <memory>

#include "absl/status/statusor.h"
#include "client/include/gradsync/client.h"
#include "client/src/layout_plan.h"
#include "client/src/step_sequence.h"

namespace gradsync::client {

// `arena`: where it begins, on a GPU its address there.
std::unique_ptr<Layout> NewLayout(const LayoutSpec& spec, std::uint64_t fingerprint,
                                  LayoutPlan plan, std::shared_ptr<std::byte> arena,
                                  std::shared_ptr<StepSequence> steps);

// Of a layout that NewLayout made. FORKED in a forked child.
absl::StatusOr<std::shared_ptr<StepSequence>> StepsOf(const Layout& layout);

}  // namespace gradsync::client

#endif  // CLIENT_SRC_LAYOUT_H_
