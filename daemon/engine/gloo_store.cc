#include "daemon/engine/gloo_store.h"

#include <algorithm>
#include <utility>

#include "absl/strings/str_cat.h"
#include "daemon/base/clock.h"
#include "gloo/common/error.h"

namespace gradsync::daemon {

GlooStore::GlooStore(RendezvousStore* store, std::string prefix, std::uint64_t deadline_ns,
                     std::function<absl::Status()> failure)
    : store_(store),
      prefix_(std::move(prefix)),
      deadline_ns_(deadline_ns),
      failure_(std::move(failure)) {}

void GlooStore::Check(const absl::Status& status) {
  if (status.ok()) return;
  if (status_.ok()) status_ = status;
  throw gloo::IoException(std::string(status.message()));
}

void GlooStore::set(const std::string& key, const std::vector<char>& data) {
  Check(store_->Set(absl::StrCat(prefix_, key), std::string(data.begin(), data.end())));
}

std::vector<char> GlooStore::get(const std::string& key) {
  for (;;) {
    const std::uint64_t now_ns = MonotonicNowNs();
    const absl::Duration left =
        absl::Nanoseconds(deadline_ns_ > now_ns ? deadline_ns_ - now_ns : 0);
    const absl::StatusOr<std::string> value =
        store_->Get(absl::StrCat(prefix_, key), std::min(left, kPatience));
    if (value.ok()) return std::vector<char>(value->begin(), value->end());
    Check(failure_());
    if (left <= kPatience || !absl::IsDeadlineExceeded(value.status())) Check(value.status());
  }
}

void GlooStore::wait(const std::vector<std::string>& keys) {
  for (const std::string& key : keys) get(key);
}

void GlooStore::wait(const std::vector<std::string>& keys, const std::chrono::milliseconds&) {
  wait(keys);
}

}  // namespace gradsync::daemon
