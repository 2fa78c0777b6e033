// Lets threads wait for a test.

#ifndef TESTS_KIT_GATE_H_
#define TESTS_KIT_GATE_H_

#include "daemon/base/mutex.h"

namespace gradsync::daemon {

// Opens once. Thread-safe.
class Gate {
 public:
  void Open() {
    MutexLock lock(&mutex_);
    open_ = true;
    changed_.NotifyAll();
  }
  void Wait() {
    MutexLock lock(&mutex_);
    while (!open_) changed_.Wait(&mutex_);
  }

 private:
  Mutex mutex_;
  CondVar changed_;
  bool open_ ABSL_GUARDED_BY(mutex_) = false;
};

}  // namespace gradsync::daemon

#endif  // TESTS_KIT_GATE_H_
