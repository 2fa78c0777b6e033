// The staging memory of a session, and who uses it now.

#ifndef CLIENT_SRC_STAGING_MEMORY_H_
#define CLIENT_SRC_STAGING_MEMORY_H_

#include <atomic>
#include <cstddef>
#include <memory>
#include <utility>

#include "absl/base/thread_annotations.h"
#include "absl/status/status.h"
#include "absl/synchronization/mutex.h"
#include "absl/time/time.h"
#include "client/src/mapped_memory.h"
#include "client/src/unix_socket.h"

namespace gradsync::client {

// Broadcast, AllReduce and a transfer of the model's state use it, one at a time. Thread-safe. The
// Connection and the thread that reads the state share it. Legal call order of one user:
//
//   Acquire Populate? Release
class StagingMemory {
 public:
  // `memory`: created by the daemon. `memfd`: the file that it maps; closed once the memory is
  // sealed.
  StagingMemory(std::shared_ptr<MappedMemory> memory, FileDescriptor memfd)
      : memory_(std::move(memory)), memfd_(std::move(memfd)) {}

  std::byte* data() const { return memory_->data(); }
  std::size_t size() const { return memory_->size(); }

  // Waits until nobody else uses the memory. False: `deadline` has passed, or `*cancelled` has
  // become true and Wake() was called. `cancelled`: may be null.
  bool Acquire(absl::Time deadline, const std::atomic<bool>* cancelled) ABSL_LOCKS_EXCLUDED(mutex_);
  void Release() ABSL_LOCKS_EXCLUDED(mutex_);
  // Makes Acquire look at `*cancelled`.
  void Wake() ABSL_LOCKS_EXCLUDED(mutex_) { absl::MutexLock lock(&mutex_); }

  // Calls MappedMemory::PopulateAndSeal, once. Waits while another thread does so: the reader of a
  // cancelled transfer may still be in this call.
  absl::Status Populate() ABSL_LOCKS_EXCLUDED(populate_mutex_);

 private:
  const std::shared_ptr<MappedMemory> memory_;

  absl::Mutex mutex_;
  bool used_ ABSL_GUARDED_BY(mutex_) = false;

  absl::Mutex populate_mutex_;
  FileDescriptor memfd_ ABSL_GUARDED_BY(populate_mutex_);
  bool populated_ ABSL_GUARDED_BY(populate_mutex_) = false;
};

// Releases the memory at the end of the scope.
class StagingTurn {
 public:
  // `memory` is acquired.
  explicit StagingTurn(StagingMemory* memory) : memory_(*memory) {}
  ~StagingTurn() { memory_.Release(); }
  StagingTurn(const StagingTurn&) = delete;
  StagingTurn& operator=(const StagingTurn&) = delete;

 private:
  StagingMemory& memory_;
};

}  // namespace gradsync::client

#endif  // CLIENT_SRC_STAGING_MEMORY_H_
