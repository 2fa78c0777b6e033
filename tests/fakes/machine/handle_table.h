// The objects behind a process's handles. A handle is the object's address. Handles that are not in
// the table are refused, not dereferenced.
//
// Thread-safe. Objects stay alive until Remove.

#ifndef TESTS_FAKES_MACHINE_HANDLE_TABLE_H_
#define TESTS_FAKES_MACHINE_HANDLE_TABLE_H_

#include <cstdint>
#include <map>
#include <memory>
#include <utility>

#include "daemon/base/mutex.h"

namespace gradsync::fakes {

// `Handle` is one of the API's: a pointer to an incomplete type or an integer.
template <typename Handle, typename Object>
class HandleTable {
 public:
  Handle Add(std::shared_ptr<Object> object) {
    const auto key = reinterpret_cast<std::uintptr_t>(object.get());
    daemon::MutexLock lock(&mutex_);
    objects_[key] = std::move(object);
    return (Handle)key;
  }

  // nullptr if the handle is not in the table.
  std::shared_ptr<Object> Find(Handle handle) {
    daemon::MutexLock lock(&mutex_);
    const auto found = objects_.find((std::uintptr_t)handle);
    return found == objects_.end() ? nullptr : found->second;
  }

  std::shared_ptr<Object> Remove(Handle handle) {
    daemon::MutexLock lock(&mutex_);
    const auto found = objects_.find((std::uintptr_t)handle);
    if (found == objects_.end()) return nullptr;
    std::shared_ptr<Object> object = std::move(found->second);
    objects_.erase(found);
    return object;
  }

  // Removes the objects for which `chosen` returns true.
  template <typename Predicate>
  void RemoveIf(Predicate chosen) {
    daemon::MutexLock lock(&mutex_);
    for (auto entry = objects_.begin(); entry != objects_.end();) {
      entry = chosen(*entry->second) ? objects_.erase(entry) : std::next(entry);
    }
  }

 private:
  daemon::Mutex mutex_;
  std::map<std::uintptr_t, std::shared_ptr<Object>> objects_ ABSL_GUARDED_BY(mutex_);
};

}  // namespace gradsync::fakes

#endif  // TESTS_FAKES_MACHINE_HANDLE_TABLE_H_
