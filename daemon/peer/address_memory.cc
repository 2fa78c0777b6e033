#include "daemon/peer/address_memory.h"

#include <utility>
#include <vector>

#include "absl/strings/str_cat.h"
#include "daemon/base/error.h"

namespace gradsync::daemon {

class AddressMemory::Origin final : public MemoryOrigin {
 public:
  // What an address or a network may have.
  struct Bound {
    std::string name;
    std::uint64_t bytes = 0;
  };

  Origin(std::shared_ptr<State> state, std::vector<Bound> bounds)
      : state_(std::move(state)), bounds_(std::move(bounds)) {}

  absl::Status Take(std::uint64_t bytes) override {
    const MutexLock lock(&state_->mutex);
    for (const Bound& bound : bounds_) {
      const auto found = state_->bytes.find(bound.name);
      const std::uint64_t held = found == state_->bytes.end() ? 0 : found->second;
      // held <= bound.bytes, so the subtraction cannot wrap.
      if (bytes > bound.bytes - held) return TooMuch(bound, held, bytes);
    }
    if (bytes == 0) return absl::OkStatus();
    for (const Bound& bound : bounds_) state_->bytes[bound.name] += bytes;
    return absl::OkStatus();
  }

  void GiveBack(std::uint64_t bytes) override {
    if (bytes == 0) return;
    const MutexLock lock(&state_->mutex);
    for (const Bound& bound : bounds_) {
      const auto found = state_->bytes.find(bound.name);
      found->second -= bytes;
      if (found->second == 0) state_->bytes.erase(found);
    }
  }

 private:
  static absl::Status TooMuch(const Bound& bound, std::uint64_t held, std::uint64_t bytes) {
    return MakeError(
        absl::StatusCode::kResourceExhausted, reason::kQuota,
        absl::StrCat("the nodes of ", bound.name, " make this daemon keep ", held,
                     " bytes and ask for ", bytes, " more; ", bound.bytes,
                     " allowed: end jobs of these nodes, or raise quota_control_bytes_per_user"),
        {{field::kAddress, bound.name}});
  }

  const std::shared_ptr<State> state_;
  const std::vector<Bound> bounds_;
};

std::shared_ptr<MemoryOrigin> AddressMemory::Of(const std::string& address,
                                                const std::string& network) const {
  std::vector<Origin::Bound> bounds = {{address, kQuotas * bytes_per_user_}};
  if (network != address) bounds.push_back({network, kQuotasOfNetwork * bytes_per_user_});
  return std::make_shared<Origin>(state_, std::move(bounds));
}

std::uint64_t AddressMemory::BytesOf(const std::string& address) const {
  const MutexLock lock(&state_->mutex);
  const auto found = state_->bytes.find(address);
  return found == state_->bytes.end() ? 0 : found->second;
}

}  // namespace gradsync::daemon
