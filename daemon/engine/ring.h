// A queue that grows and never shrinks, so that a steady state allocates nothing.

#ifndef DAEMON_ENGINE_RING_H_
#define DAEMON_ENGINE_RING_H_

#include <cstddef>
#include <utility>
#include <vector>

namespace gradsync::daemon {

// Not thread-safe. T is copied.
template <typename T>
class Ring {
 public:
  bool empty() const { return size_ == 0; }
  // Requires !empty().
  T& front() { return items_[first_]; }

  void Push(const T& item) {
    if (size_ == items_.size()) {
      std::vector<T> grown(items_.empty() ? 16 : 2 * items_.size());
      for (std::size_t i = 0; i < size_; ++i) grown[i] = items_[(first_ + i) % items_.size()];
      items_ = std::move(grown);
      first_ = 0;
    }
    items_[(first_ + size_) % items_.size()] = item;
    ++size_;
  }

  // Requires !empty().
  void Pop() {
    first_ = (first_ + 1) % items_.size();
    --size_;
  }

 private:
  std::vector<T> items_;
  std::size_t first_ = 0;
  std::size_t size_ = 0;
};

}  // namespace gradsync::daemon

#endif  // DAEMON_ENGINE_RING_H_
