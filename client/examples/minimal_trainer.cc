// The smallest trainer: every rank fits y = 3x + 2 to samples of its own, and gradsync averages the
// gradients.
#include <cstdint>
#include <cstdio>

#include "gradsync/client.h"

absl::Status Train() {
  // Rank, world size and job from torchrun's variables, the daemon's socket from GRADSYNC_SOCKET.
  auto options = gradsync::SessionOptions::FromEnvironment();
  if (!options.ok()) return options.status();
  auto session = gradsync::Session::Join(*options);
  if (!session.ok()) return session.status();
  gradsync::LayoutSpec spec;
  spec.parameters = {{"weight", {1}}, {"bias", {1}}};
  auto layout = (*session)->RegisterLayout(spec);
  if (!layout.ok()) return layout.status();

  float weight = 0, bias = 0;
  auto* weight_gradient = static_cast<float*>((*layout)->gradient(0).data);  // in shared memory
  auto* bias_gradient = static_cast<float*>((*layout)->gradient(1).data);
  for (std::uint64_t i = 0; i < 400; ++i) {
    const std::uint64_t step = (*layout)->next_step();
    const float x = static_cast<float>((i + options->rank) % 5) - 2;
    const float error = weight * x + bias - (3 * x + 2);
    *weight_gradient = error * x;
    *bias_gradient = error;
    for (std::size_t bucket = 0; bucket < (*layout)->bucket_count(); ++bucket) {
      if (auto status = (*layout)->MarkReady(step, bucket); !status.ok()) return status;
    }
    if (auto status = (*layout)->EndStep(step); !status.ok()) return status;
    if (auto result = (*layout)->WaitStep(step); !result.ok()) return result.status();
    weight -= 0.1f * *weight_gradient;  // the average over the ranks by now
    bias -= 0.1f * *bias_gradient;
  }
  std::printf("rank %u: y = %.3f x + %.3f\n", options->rank, weight, bias);
  return (*session)->Leave();
}

int main() {
  const absl::Status status = Train();
  if (!status.ok()) std::fprintf(stderr, "%s\n", status.ToString().c_str());
  return status.ok() ? 0 : 1;
}
