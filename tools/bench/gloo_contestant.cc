#include <chrono>
#include <cstdint>
#include <exception>
#include <optional>

#include "absl/strings/str_cat.h"
#include "gloo/allreduce.h"
#include "gloo/rendezvous/context.h"
#include "gloo/rendezvous/file_store.h"
#include "gloo/transport/tcp/device.h"
#include "tools/bench/contestant.h"
#include "tools/bench/shared_region.h"
#include "tools/bench/vector_loops.h"

namespace gradsync::bench {
namespace {

// Gloo throws; this turns that into a status.
template <typename Work>
absl::Status Guard(const Work& work) {
  try {
    work();
    return absl::OkStatus();
  } catch (const std::exception& error) {
    return absl::InternalError(absl::StrCat("gloo: ", error.what()));
  }
}

class GlooContestant final : public Contestant {
 public:
  GlooContestant(const ContestantOptions& options, bool faulty)
      : options_(options), faulty_(faulty) {}

  absl::Status Connect() override {
    return Guard([this] {
      gloo::transport::tcp::attr attributes(options_.address.c_str());
      auto device = gloo::transport::tcp::CreateDevice(attributes);
      auto context = std::make_shared<gloo::rendezvous::Context>(static_cast<int>(options_.rank),
                                                                 static_cast<int>(options_.ranks));
      context->setTimeout(std::chrono::seconds(60));
      gloo::rendezvous::FileStore store(options_.directory);
      context->connectFullMesh(store, device);
      context_ = std::move(context);
    });
  }

  absl::Status SetUp(std::size_t bytes) override {
    absl::StatusOr<SharedRegion> memory = SharedRegion::Private(bytes);
    if (!memory.ok()) return memory.status();
    memory_ = *std::move(memory);
    return Guard([this] {
      options_for_call_.emplace(context_);
      switch (ItemSize(options_.dtype)) {
        case 2:
          return SetOutput<std::uint16_t>();
        case 4:
          return SetOutput<float>();
        default:
          return SetOutput<double>();
      }
    });
  }

  std::byte* buffer() override { return memory_.data(); }

  // Gloo adds; the division is the trainer's, as in DDP.
  absl::Status AllReduce(Turn*) override {
    absl::Status status = Guard([this] { gloo::allreduce(*options_for_call_); });
    if (!status.ok()) return status;
    Scale(options_.dtype, memory_.data(), memory_.bytes() / ItemSize(options_.dtype),
          1.0 / options_.ranks);
    if (faulty_) memory_.data()[memory_.bytes() - ItemSize(options_.dtype)] ^= std::byte{1};
    return absl::OkStatus();
  }

  absl::Status TearDown() override {
    options_for_call_.reset();
    memory_ = SharedRegion();
    return absl::OkStatus();
  }

 private:
  template <typename T>
  void SetOutput() {
    options_for_call_->setOutput(reinterpret_cast<T*>(memory_.data()), memory_.bytes() / sizeof(T));
    // Vectorised, and for every type: Debian's Gloo adds float16 one by one and knows no bfloat16.
    options_for_call_->setReduceFunction(
        [dtype = options_.dtype](void* sum, const void* a, const void* b, std::size_t count) {
          Add(dtype, sum, a, b, count);
        });
  }

  const ContestantOptions options_;
  const bool faulty_;
  std::shared_ptr<gloo::rendezvous::Context> context_;
  SharedRegion memory_;
  std::optional<gloo::AllreduceOptions> options_for_call_;
};

}  // namespace

std::unique_ptr<Contestant> MakeGlooContestant(const ContestantOptions& options, bool faulty) {
  return std::make_unique<GlooContestant>(options, faulty);
}

}  // namespace gradsync::bench
