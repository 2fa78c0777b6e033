// What a rank reads of its state, when, and when it stops.

#include "client/src/state_reader.h"

#include <fcntl.h>
#include <sys/mman.h>
#include <unistd.h>

#include <algorithm>
#include <array>
#include <atomic>
#include <cstring>
#include <deque>
#include <functional>
#include <future>
#include <memory>
#include <optional>
#include <string>
#include <thread>
#include <vector>

#include "absl/strings/escaping.h"
#include "absl/strings/str_cat.h"
#include "absl/synchronization/mutex.h"
#include "absl/time/clock.h"
#include "client/src/error.h"
#include "client/src/state_image.h"
#include "gmock/gmock.h"
#include "gtest/gtest.h"
#include "proto/gradsync/v1/gradsync.pb.h"
#include "tests/kit/thread_sleep.h"

namespace gradsync::client {
namespace {

using testing::HasSubstr;

constexpr absl::Duration kPatience = absl::Seconds(40);
constexpr std::size_t kStagingBytes = 1 << 16;

std::shared_ptr<StagingMemory> NewStaging() {
  const int memfd = memfd_create("staging", MFD_CLOEXEC | MFD_ALLOW_SEALING);
  EXPECT_EQ(ftruncate(memfd, kStagingBytes), 0);
  EXPECT_EQ(fcntl(memfd, F_ADD_SEALS, F_SEAL_SHRINK), 0);
  auto mapped = MappedMemory::Map(memfd, kStagingBytes, "staging");
  return std::make_shared<StagingMemory>(*std::move(mapped), FileDescriptor(memfd));
}

// Zeros that nobody hashes in the time of a test, and that take no memory.
class EndlessZeros {
 public:
  EndlessZeros()
      : data_(
            mmap(nullptr, kBytes, PROT_READ, MAP_PRIVATE | MAP_ANONYMOUS | MAP_NORESERVE, -1, 0)) {
    EXPECT_NE(data_, MAP_FAILED);
  }
  ~EndlessZeros() { munmap(data_, kBytes); }
  StateItem item() const { return {"endless", data_, kBytes}; }

 private:
  static constexpr std::size_t kBytes = std::size_t{1} << 40;
  void* const data_;
};

// Keeps what is sent.
class Outbox final : public StateSender {
 public:
  void SendState(v1::SessionRequest request) override {
    absl::MutexLock lock(&mutex_);
    sent_.push_back(std::move(request));
  }
  // The next message; an empty one if none comes.
  v1::SessionRequest Next() {
    const auto some = [this] { return !sent_.empty(); };
    absl::MutexLock lock(&mutex_);
    if (!mutex_.AwaitWithTimeout(absl::Condition(&some), kPatience)) return {};
    auto request = std::move(sent_.front());
    sent_.pop_front();
    return request;
  }
  bool empty() {
    absl::MutexLock lock(&mutex_);
    return sent_.empty();
  }

 private:
  absl::Mutex mutex_;
  std::deque<v1::SessionRequest> sent_;
};

// Items that the test chooses. `on_read` runs inside of Read.
class TestState final : public TrainerState {
 public:
  explicit TestState(std::vector<StateItem> items) : items_(std::move(items)) {}

  absl::StatusOr<std::vector<StateItem>> Read() override {
    ++reads;
    reading = true;
    if (on_read) on_read();
    if (failure.ok()) return items_;
    reading = false;
    return failure;
  }
  void Done() override { reading = false; }

  std::function<void()> on_read;
  absl::Status failure;
  std::atomic<int> reads{0};
  std::atomic<bool> reading{false};

  void Set(std::vector<StateItem> items) { items_ = std::move(items); }

 private:
  std::vector<StateItem> items_;
};

class StateReaderTest : public testing::Test {
 protected:
  StateReaderTest() { reader_.Open(&outbox_, 1, staging_); }

  std::shared_ptr<TestState> Serve(std::vector<StateItem> items) {
    auto state = std::make_shared<TestState>(std::move(items));
    EXPECT_TRUE(reader_.Serve(state).ok());
    return state;
  }
  void Ask(std::uint64_t transfer, bool offer) {
    v1::StateQuestion question;
    question.set_transfer(transfer);
    question.set_offer(offer);
    reader_.OnQuestion(question);
  }
  void AskChunk(std::uint64_t transfer, std::uint64_t number, std::uint64_t bytes) {
    v1::StateChunk chunk;
    chunk.set_transfer(transfer);
    chunk.set_chunk(number);
    chunk.set_bytes(bytes);
    chunk.set_write(true);
    reader_.OnChunk(chunk);
  }
  // Takes the whole state, chunk by chunk. Returns its digests, which come at some time.
  std::vector<std::string> TakeImage(std::uint64_t transfer, std::string* image) {
    std::vector<std::string> digests;
    const auto next = [&] {
      auto request = outbox_.Next();
      if (!request.has_state_digests()) return request;
      for (const auto& item : request.state_digests().items()) digests.push_back(item.sha256());
      return outbox_.Next();
    };
    const auto offer = next();
    EXPECT_EQ(offer.state_offer().transfer(), transfer) << offer.DebugString();
    const std::uint64_t bytes = offer.state_offer().bytes();
    for (std::uint64_t chunk = 0; image->size() < bytes; ++chunk) {
      const std::size_t size = std::min<std::size_t>(kStagingBytes, bytes - image->size());
      AskChunk(transfer, chunk, size);
      const auto written = next();
      EXPECT_EQ(written.state_written().chunk(), chunk) << written.DebugString();
      if (!written.has_state_written()) return digests;
      image->append(reinterpret_cast<const char*>(staging_->data()), size);
    }
    if (digests.empty()) {
      const auto last = outbox_.Next();
      for (const auto& item : last.state_digests().items()) digests.push_back(item.sha256());
    }
    return digests;
  }

  // Nobody uses the staging memory.
  bool StagingIsFree() {
    if (!staging_->Acquire(absl::InfinitePast(), nullptr)) return false;
    staging_->Release();
    return true;
  }

  Outbox outbox_;
  const std::shared_ptr<StagingMemory> staging_ = NewStaging();
  StateReader reader_;
};

TEST_F(StateReaderTest, HashesWhileTheStateIsFrozen) {
  const auto state = Serve({{"abc", "abc", 3}, {"empty", nullptr, 0}});
  Ask(7, false);
  EXPECT_TRUE(outbox_.empty());
  EXPECT_EQ(state->reads, 0);
  const auto pin = reader_.Freeze();
  const auto digests = outbox_.Next().state_digests();
  EXPECT_EQ(digests.transfer(), 7u);
  ASSERT_EQ(digests.items_size(), 2);
  EXPECT_EQ(digests.items(0).name(), "abc");
  EXPECT_EQ(absl::BytesToHexString(digests.items(0).sha256()),
            "ba7816bf8f01cfea414140de5dae2223b00361a396177a9cb410ff61f20015ad");
  EXPECT_EQ(absl::BytesToHexString(digests.items(1).sha256()),
            "e3b0c44298fc1c149afbf4c8996fb92427ae41e4649b934ca495991b7852b855");
  reader_.Thaw(pin, StateReader::State::kMayChange);
  EXPECT_FALSE(state->reading);
  EXPECT_EQ(state->reads, 1);
}

TEST_F(StateReaderTest, GivesItsStateInChunks) {
  const std::string large(3 * kStagingBytes + 5, 'g');
  Serve({{"small", "abc", 3}, {"large", large.data(), large.size()}});
  reader_.FreezeUntilWait();
  Ask(1, true);
  std::string bytes;
  EXPECT_EQ(TakeImage(1, &bytes).size(), 2u);
  auto memory = NewImageMemory(bytes.size());
  std::memcpy(memory.get(), bytes.data(), bytes.size());
  const auto image = ParseImage(1, memory, bytes.size());
  ASSERT_TRUE(image.ok()) << image.status();
  ASSERT_EQ(image->items.size(), 2u);
  EXPECT_EQ(std::memcmp(image->items[1].data.data(), large.data(), large.size()), 0);
}

TEST_F(StateReaderTest, AThawReturnsOnlyAfterTheReading) {
  const EndlessZeros zeros;
  const auto state = Serve({zeros.item()});
  Ask(1, false);
  for (int wait = 0; wait < 3; ++wait) {
    std::promise<void> begun;
    state->on_read = [&] { begun.set_value(); };
    const auto pin = reader_.Freeze();
    begun.get_future().wait();
    reader_.Thaw(pin, StateReader::State::kSame);
    EXPECT_FALSE(state->reading);
  }
  EXPECT_EQ(state->reads, 3);
  EXPECT_TRUE(outbox_.empty());
}

TEST_F(StateReaderTest, TheSameStateIsReadOnWhereTheReadingStopped) {
  const std::string large(2 * kStagingBytes, 'g');
  const auto state = Serve({{"large", large.data(), large.size()}});
  auto pin = reader_.Freeze();
  Ask(1, true);
  const std::uint64_t bytes = outbox_.Next().state_offer().bytes();
  EXPECT_TRUE(outbox_.Next().has_state_digests());
  AskChunk(1, 0, kStagingBytes);
  EXPECT_TRUE(outbox_.Next().has_state_written());
  reader_.Thaw(pin, StateReader::State::kSame);
  EXPECT_FALSE(state->reading);
  AskChunk(1, 1, kStagingBytes);
  EXPECT_TRUE(outbox_.empty());
  pin = reader_.Freeze();
  EXPECT_EQ(outbox_.Next().state_written().chunk(), 1u);
  AskChunk(1, 2, bytes - 2 * kStagingBytes);
  EXPECT_EQ(outbox_.Next().state_written().chunk(), 2u);
  reader_.Thaw(pin, StateReader::State::kMayChange);
  EXPECT_EQ(state->reads, 2);
}

TEST_F(StateReaderTest, AThawWaitsForASourceThatReads) {
  const auto state = Serve({{"abc", "abc", 3}});
  std::promise<void> begun;
  std::promise<void> released;
  state->on_read = [&] {
    begun.set_value();
    released.get_future().wait();
  };
  Ask(1, false);
  const auto pin = reader_.Freeze();
  begun.get_future().wait();
  std::atomic<bool> thawed{false};
  std::thread waiter([&] {
    reader_.Thaw(pin, StateReader::State::kSame);
    thawed = true;
  });
  // It cannot be thawed before: the source has not returned.
  std::this_thread::yield();
  EXPECT_FALSE(thawed);
  released.set_value();
  waiter.join();
  EXPECT_FALSE(state->reading);
}

TEST_F(StateReaderTest, ASourceThatFailsIsRefusedWithItsMessage) {
  const auto state = Serve({});
  state->failure = absl::InternalError("no optimizer yet");
  auto pin = reader_.Freeze();
  Ask(4, true);
  const auto refused = outbox_.Next().state_refused();
  EXPECT_EQ(refused.transfer(), 4u);
  EXPECT_EQ(refused.reason(), "rank 1: no optimizer yet");
  // It is not read again for that question.
  for (int wait = 0; wait < 100; ++wait) {
    reader_.Thaw(pin, StateReader::State::kSame);
    pin = reader_.Freeze();
  }
  EXPECT_EQ(state->reads, 1);
  state->failure = absl::OkStatus();
  state->Set({{"", "x", 1}});
  Ask(5, true);
  EXPECT_THAT(outbox_.Next().state_refused().reason(), HasSubstr("needs a name"));
  reader_.Thaw(pin, StateReader::State::kSame);
}

TEST_F(StateReaderTest, WithoutASourceEveryQuestionIsRefused) {
  Ask(1, true);
  EXPECT_THAT(outbox_.Next().state_refused().reason(), HasSubstr("call ServeState"));
  Serve({{"abc", "abc", 3}});
  Ask(2, false);
  EXPECT_TRUE(reader_.Serve(nullptr).ok());
  EXPECT_THAT(outbox_.Next().state_refused().reason(), HasSubstr("no more"));
}

TEST_F(StateReaderTest, ACancelledTransferEnds) {
  const auto state = Serve({{"abc", "abc", 3}});
  reader_.FreezeUntilWait();
  Ask(1, true);
  std::vector<v1::SessionRequest> sent = {outbox_.Next(), outbox_.Next()};
  EXPECT_TRUE(sent[0].has_state_offer());
  EXPECT_TRUE(sent[1].has_state_digests());
  reader_.OnCancelled(1);
  AskChunk(1, 0, 3);
  // The staging memory is free, and the next transfer gets it.
  ASSERT_TRUE(staging_->Acquire(absl::Now() + kPatience, nullptr));
  Ask(2, true);
  staging_->Release();
  std::string image;
  EXPECT_EQ(TakeImage(2, &image).size(), 1u);
  EXPECT_TRUE(outbox_.empty());
}

TEST_F(StateReaderTest, ACancelledTransferEndsTheReading) {
  const EndlessZeros zeros;
  const auto state = Serve({zeros.item()});
  std::promise<void> begun;
  state->on_read = [&] { begun.set_value(); };
  Ask(1, false);
  reader_.FreezeUntilWait();
  begun.get_future().wait();
  reader_.OnCancelled(2);
  EXPECT_EQ(state->reads, 1);
  reader_.OnCancelled(1);
  const absl::Time deadline = absl::Now() + kPatience;
  while (state->reading && absl::Now() < deadline) std::this_thread::yield();
  EXPECT_FALSE(state->reading);
}

TEST_F(StateReaderTest, AChangedStateIsHashedAnew) {
  const auto state = Serve({{"abc", "abc", 3}});
  const EndlessZeros zeros;
  state->Set({{"first", "abc", 3}, zeros.item()});
  std::promise<void> begun;
  state->on_read = [&] { begun.set_value(); };
  Ask(1, false);
  auto pin = reader_.Freeze();
  begun.get_future().wait();
  reader_.Thaw(pin, StateReader::State::kMayChange);
  EXPECT_TRUE(outbox_.empty());
  state->on_read = nullptr;
  state->Set({{"first", "xyz", 3}});
  pin = reader_.Freeze();
  const auto digests = outbox_.Next().state_digests();
  ASSERT_EQ(digests.items_size(), 1);
  EXPECT_EQ(absl::BytesToHexString(digests.items(0).sha256()).substr(0, 8), "3608bca1");
  reader_.Thaw(pin, StateReader::State::kMayChange);
}

TEST_F(StateReaderTest, AStateThatChangesAfterTheOfferIsRefused) {
  const auto state = Serve({{"abc", "abc", 3}});
  auto pin = reader_.Freeze();
  Ask(1, true);
  EXPECT_TRUE(outbox_.Next().has_state_offer());
  EXPECT_TRUE(outbox_.Next().has_state_digests());
  reader_.Thaw(pin, StateReader::State::kSame);
  state->Set({{"abc", "abcd", 4}});
  pin = reader_.Freeze();
  EXPECT_THAT(outbox_.Next().state_refused().reason(), HasSubstr("changed"));
  reader_.Thaw(pin, StateReader::State::kSame);
}

TEST_F(StateReaderTest, AStateThatMayHaveChangedAfterTheOfferIsRefused) {
  Serve({{"abc", "abc", 3}});
  auto pin = reader_.Freeze();
  Ask(1, true);
  EXPECT_TRUE(outbox_.Next().has_state_offer());
  EXPECT_TRUE(outbox_.Next().has_state_digests());
  reader_.Thaw(pin, StateReader::State::kMayChange);
  pin = reader_.Freeze();
  EXPECT_THAT(outbox_.Next().state_refused().reason(), HasSubstr("changed"));
  reader_.Thaw(pin, StateReader::State::kSame);
}

TEST_F(StateReaderTest, AnImpossibleChunkIsRefused) {
  const std::string large(3 * kStagingBytes, 'g');
  const auto state = Serve({});
  reader_.FreezeUntilWait();
  struct Case {
    std::size_t state_bytes;
    std::uint64_t number;
    std::uint64_t bytes;
  };
  std::uint64_t transfer = 0;
  for (const Case& one : {Case{3, 1, 64}, Case{3, 0, 0}, Case{3, 0, 1024},
                          Case{large.size(), 0, kStagingBytes + 1}}) {
    state->Set({{"state", large.data(), one.state_bytes}});
    Ask(++transfer, true);
    EXPECT_TRUE(outbox_.Next().has_state_offer());
    EXPECT_TRUE(outbox_.Next().has_state_digests());
    AskChunk(transfer, one.number, one.bytes);
    EXPECT_THAT(outbox_.Next().state_refused().reason(),
                HasSubstr(absl::StrCat("chunk ", one.number, " of ", one.bytes)));
    EXPECT_TRUE(StagingIsFree());
  }
}

TEST_F(StateReaderTest, AChunkThatIsNotOfTheOfferIsIgnored) {
  Serve({{"abc", "abc", 3}});
  Ask(1, false);
  AskChunk(1, 0, 64);
  auto pin = reader_.Freeze();
  EXPECT_TRUE(outbox_.Next().has_state_digests());
  Ask(2, true);
  EXPECT_TRUE(outbox_.Next().has_state_offer());
  EXPECT_TRUE(outbox_.Next().has_state_digests());
  reader_.Thaw(pin, StateReader::State::kSame);
  AskChunk(2, 0, 128);
  AskChunk(1, 9, 64);
  pin = reader_.Freeze();
  EXPECT_EQ(outbox_.Next().state_written().transfer(), 2u);
  reader_.Thaw(pin, StateReader::State::kSame);
  EXPECT_TRUE(outbox_.empty());
}

TEST_F(StateReaderTest, AnOfferWaitsForTheStagingMemory) {
  const auto state = Serve({{"abc", "abc", 3}});
  ASSERT_TRUE(staging_->Acquire(absl::InfinitePast(), nullptr));
  std::promise<pid_t> begun;
  state->on_read = [&] { begun.set_value(ThisThread()); };
  Ask(1, true);
  auto pin = reader_.Freeze();
  AwaitSleep(begun.get_future().get());
  // A thaw does not wait for the memory.
  reader_.Thaw(pin, StateReader::State::kSame);
  EXPECT_FALSE(state->reading);
  EXPECT_TRUE(outbox_.empty());
  state->on_read = nullptr;
  pin = reader_.Freeze();
  staging_->Release();
  EXPECT_TRUE(outbox_.Next().has_state_offer());
  EXPECT_FALSE(StagingIsFree());
  reader_.Thaw(pin, StateReader::State::kSame);
}

TEST_F(StateReaderTest, TheStagingMemoryIsHeldUntilTheTransferEnds) {
  Serve({{"abc", "abc", 3}});
  const auto pin = reader_.Freeze();
  Ask(1, true);
  EXPECT_TRUE(outbox_.Next().has_state_offer());
  EXPECT_TRUE(outbox_.Next().has_state_digests());
  reader_.OnStepDone();  // of another layout
  EXPECT_FALSE(StagingIsFree());
  AskChunk(1, 0, 128);
  EXPECT_TRUE(outbox_.Next().has_state_written());
  EXPECT_FALSE(StagingIsFree()) << "the daemon may still read it";
  reader_.OnStepDone();
  EXPECT_TRUE(StagingIsFree());
  reader_.Thaw(pin, StateReader::State::kMayChange);
  reader_.FreezeUntilWait();
  Ask(2, true);
  EXPECT_TRUE(outbox_.Next().has_state_offer());
  EXPECT_TRUE(outbox_.Next().has_state_digests());
  Ask(3, false);
  EXPECT_TRUE(StagingIsFree());
}

// The last message of the answer is the chunk if the state has one item, and the digests if it has
// so many that the chunk comes first.
TEST_F(StateReaderTest, AStepThatEndsRightAfterTheAnswerGivesTheStagingMemoryBack) {
  std::vector<StateItem> state;
  for (const std::size_t items : {1, 500}) {
    while (state.size() < items) state.push_back({absl::StrCat(state.size()), "abc", 3});
    Serve(state);
    for (int i = 0; i < 1000; ++i) {
      const std::uint64_t transfer = 1000 * items + i;
      const auto pin = reader_.Freeze();
      Ask(transfer, true);
      std::string bytes;
      EXPECT_EQ(TakeImage(transfer, &bytes).size(), items);
      reader_.OnStepDone();
      ASSERT_TRUE(StagingIsFree()) << "transfer " << i << " of " << items << " items";
      reader_.Thaw(pin, StateReader::State::kMayChange);
    }
  }
}

TEST_F(StateReaderTest, ASourceIsReadNoMoreOnceAnotherServes) {
  const EndlessZeros zeros;
  const auto endless = Serve({zeros.item()});
  std::promise<void> begun;
  endless->on_read = [&] { begun.set_value(); };
  Ask(1, false);
  reader_.FreezeUntilWait();
  begun.get_future().wait();
  Serve({{"abc", "abc", 3}});
  EXPECT_FALSE(endless->reading);
  EXPECT_TRUE(outbox_.Next().has_state_digests());
}

TEST_F(StateReaderTest, AfterAnInterruptOnlyANewWaitReads) {
  Serve({{"abc", "abc", 3}});
  const auto abandoned = reader_.Freeze();
  reader_.Interrupt();
  Ask(1, false);
  EXPECT_TRUE(outbox_.empty());
  const auto pin = reader_.Freeze();
  EXPECT_TRUE(outbox_.Next().has_state_digests());
  // The wait that was left returns at last, and takes nothing from the one that lasts.
  reader_.Thaw(abandoned, StateReader::State::kMayChange);
  Ask(2, false);
  EXPECT_TRUE(outbox_.Next().has_state_digests());
  reader_.Thaw(pin, StateReader::State::kSame);
}

TEST_F(StateReaderTest, AnInterruptDoesNotWaitForTheReadingOfTheNextWait) {
  const auto state = Serve({{"abc", "abc", 3}});
  std::array<std::promise<void>, 2> begun;
  std::array<std::promise<void>, 2> released;
  state->on_read = [&] {
    const std::size_t read = state->reads - 1;
    begun.at(read).set_value();
    released.at(read).get_future().wait();
  };
  Ask(1, false);
  reader_.Freeze();
  begun[0].get_future().wait();
  const absl::Time start = absl::Now();
  std::thread interrupter([&] { reader_.Interrupt(); });
  while (reader_.interruptions() == 0) std::this_thread::yield();
  const auto pin = reader_.Freeze();
  released[0].set_value();
  begun[1].get_future().wait();
  interrupter.join();
  EXPECT_LT(absl::Now() - start, absl::Seconds(8)) << "it gave up";
  released[1].set_value();
  EXPECT_TRUE(outbox_.Next().has_state_digests());
  reader_.Thaw(pin, StateReader::State::kSame);
}

TEST_F(StateReaderTest, AnInterruptWaitsForACallThatReads) {
  std::atomic<pid_t> thread{0};
  std::atomic<bool> returned{false};
  std::thread interrupter;
  {
    const StateReader::OwnReading own(&reader_);
    EXPECT_FALSE(own.interrupted());
    interrupter = std::thread([&] {
      thread = ThisThread();
      reader_.Interrupt();
      returned = true;
    });
    while (!own.interrupted()) std::this_thread::yield();
    AwaitSleep(thread, &returned);
    EXPECT_FALSE(returned);
  }
  interrupter.join();
}

// A helper thread makes the trainer's calls, and the trainer may leave one before it has begun.
TEST_F(StateReaderTest, ACallThatWasLeftBeforeItBeganPinsNothing) {
  const auto state = Serve({{"abc", "abc", 3}});
  Ask(1, false);
  const std::uint64_t before = reader_.interruptions();
  reader_.Interrupt();
  std::thread helper([&] {
    reader_.CallBegan(before);
    const auto left = reader_.Freeze();
    EXPECT_EQ(left, 0u) << "it pins";
    EXPECT_TRUE(StateReader::OwnReading(&reader_).interrupted());
    reader_.Thaw(left, StateReader::State::kMayChange);
    // The trainer's next call is not that one.
    reader_.CallBegan(reader_.interruptions());
    EXPECT_FALSE(StateReader::OwnReading(&reader_).interrupted());
    EXPECT_EQ(state->reads, 0);
    EXPECT_TRUE(outbox_.empty());
    const auto pin = reader_.Freeze();
    EXPECT_TRUE(outbox_.Next().has_state_digests());
    reader_.Thaw(pin, StateReader::State::kSame);
  });
  helper.join();
}

TEST_F(StateReaderTest, AfterTheEndNothingIsRead) {
  const auto state = Serve({{"abc", "abc", 3}});
  Ask(1, false);
  reader_.Stop();
  reader_.AwaitStopped();
  const auto pin = reader_.Freeze();
  reader_.Thaw(pin, StateReader::State::kMayChange);
  EXPECT_EQ(state->reads, 0);
  EXPECT_TRUE(outbox_.empty());
  EXPECT_TRUE(StateReader::OwnReading(&reader_).interrupted());
}

TEST_F(StateReaderTest, TheEndDoesNotWaitForTheStagingMemory) {
  const auto state = Serve({{"abc", "abc", 3}});
  ASSERT_TRUE(staging_->Acquire(absl::InfinitePast(), nullptr));
  std::promise<pid_t> begun;
  state->on_read = [&] { begun.set_value(ThisThread()); };
  reader_.FreezeUntilWait();
  Ask(1, true);
  AwaitSleep(begun.get_future().get());
  reader_.Stop();
  reader_.AwaitStopped();
  EXPECT_FALSE(state->reading);
}

}  // namespace
}  // namespace gradsync::client
