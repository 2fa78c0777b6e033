// The memory of a layout that one trainer and the daemon share: an arena and its semaphores, seen
// from the trainer's side.

#ifndef TESTS_JOB_TRAINER_MEMORY_H_
#define TESTS_JOB_TRAINER_MEMORY_H_

#include <cstddef>
#include <cstdint>
#include <memory>

#include "daemon/arena/semaphore_page.h"
#include "daemon/job/layout_agreement.h"

namespace gradsync::daemon {

// The semaphores are real. The arena is plain memory, so that sanitizers check accesses to it.
class TrainerMemory {
 public:
  TrainerMemory(std::size_t arena_bytes, std::size_t buckets);
  ~TrainerMemory();
  TrainerMemory(const TrainerMemory&) = delete;
  TrainerMemory& operator=(const TrainerMemory&) = delete;

  // The memory that is handed to the daemon.
  RankMemory Share() const;
  // True while the daemon holds a reference to any of it.
  bool Shared() const;

  std::size_t bytes() const { return bytes_; }
  std::byte* data() const { return arena_.get(); }
  template <typename T>
  T* At(std::uint64_t offset) const {
    return reinterpret_cast<T*>(arena_.get() + offset);
  }

  // The words as the trainer reads them.
  std::uint64_t done(std::size_t bucket) const;
  std::uint64_t void_step() const;

  // Sets all memory to zero. None of it may be shared.
  void Reset();

 private:
  struct Free {
    void operator()(std::byte* data) const;
  };

  const std::size_t bytes_;
  const std::size_t buckets_;
  std::shared_ptr<std::byte> arena_;
  std::shared_ptr<SemaphorePage> semaphores_;
  SemaphorePageHeader* header_;  // the trainer's own mapping
};

}  // namespace gradsync::daemon

#endif  // TESTS_JOB_TRAINER_MEMORY_H_
