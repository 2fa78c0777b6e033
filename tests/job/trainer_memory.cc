#include "tests/job/trainer_memory.h"

#include <sys/mman.h>

#include <cstdlib>
#include <cstring>

namespace gradsync::daemon {
namespace {

BucketSemaphore* Words(SemaphorePageHeader* header) {
  return reinterpret_cast<BucketSemaphore*>(header + 1);
}

}  // namespace

TrainerMemory::TrainerMemory(std::size_t arena_bytes, std::size_t buckets)
    : bytes_(arena_bytes), buckets_(buckets) {
  arena_ = std::shared_ptr<std::byte>(
      static_cast<std::byte*>(std::aligned_alloc(kBucketAlignment, bytes_)), Free());
  auto semaphores = SemaphorePage::Create(buckets);
  if (arena_ == nullptr || !semaphores.ok()) std::abort();
  semaphores_ = *std::move(semaphores);
  void* const address =
      mmap(nullptr, semaphores_->bytes(), PROT_READ | PROT_WRITE, MAP_SHARED, semaphores_->fd(), 0);
  if (address == MAP_FAILED) std::abort();
  header_ = static_cast<SemaphorePageHeader*>(address);
  Reset();
}

TrainerMemory::~TrainerMemory() { munmap(header_, semaphores_->bytes()); }

void TrainerMemory::Free::operator()(std::byte* data) const { std::free(data); }

RankMemory TrainerMemory::Share() const {
  return {arena_, arena_.get(), semaphores_, nullptr, bytes_};
}

bool TrainerMemory::Shared() const { return arena_.use_count() > 1 || semaphores_.use_count() > 1; }

std::uint64_t TrainerMemory::done(std::size_t bucket) const {
  return Words(header_)[bucket].done.load(std::memory_order_acquire);
}

std::uint64_t TrainerMemory::void_step() const {
  return header_->void_step.load(std::memory_order_acquire);
}

void TrainerMemory::Reset() {
  std::memset(arena_.get(), 0, bytes_);
  header_->void_step.store(0, std::memory_order_relaxed);
  for (std::size_t i = 0; i < buckets_; ++i) {
    Words(header_)[i].done.store(0, std::memory_order_relaxed);
  }
}

}  // namespace gradsync::daemon
