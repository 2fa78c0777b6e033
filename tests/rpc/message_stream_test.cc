#include "daemon/rpc/message_stream.h"

#include <functional>
#include <memory>
#include <optional>
#include <string>
#include <utility>
#include <vector>

#include "gmock/gmock.h"
#include "gtest/gtest.h"

namespace gradsync::daemon {
namespace {

using ::testing::ElementsAre;
using ::testing::HasSubstr;
using ::testing::IsEmpty;

// What happened to a stream, which may have given itself up since.
struct Record {
  std::vector<int> received;
  std::vector<std::string> sent;
  std::optional<absl::Status> end;       // OnEnd()'s
  std::optional<absl::Status> finished;  // StartFinish()'s
  std::string disconnected;
  int cancels = 0;
};

// Numbers come in; numbers are queued, and go out as text. The test completes the operations.
class FakeStream final : public MessageStream<int, std::string, int> {
 public:
  FakeStream(Record* record, const UnreadLimits& limits, bool server = true)
      : MessageStream(limits), record_(record), server_(server) {}

  using MessageStream::Began;
  using MessageStream::BeganBroken;

  void Cancel() override { ++record_->cancels; }

  // ---- gRPC's part
  void CompleteRead(int message) {
    *read_message_ = message;
    Complete(&read_, true);
  }
  void EndReads() { Complete(&read_, false); }
  void CompleteWrite(bool ok = true) { Complete(&write_, ok); }
  void CompleteFinish() { Complete(&finish_, true); }
  bool writing() const { return write_ != nullptr; }
  bool reading() const { return read_ != nullptr; }

  using MessageStream::HasMessage;

  std::size_t most_granted = 1000;
  int drained = 0;
  bool holds = false;                      // keeps what comes for later
  std::function<void(bool drop)> waiting;  // null: nothing waits

  // Fails what is under way. A stream owns itself until then.
  void CompleteAll() {
    if (read_ != nullptr) EndReads();
    if (write_ != nullptr) CompleteWrite(false);
    if (finish_ != nullptr) CompleteFinish();
  }

 private:
  static void Complete(void** tag, bool ok) {
    void* const completed = std::exchange(*tag, nullptr);
    ASSERT_NE(completed, nullptr) << "no such operation is under way";
    static_cast<Completion*>(completed)->Run(ok);
  }

  void InTurn(const int* message, std::function<void(bool drop)> take) override {
    if (!holds) return MessageStream::InTurn(message, std::move(take));
    ASSERT_FALSE(waiting) << "one message at a time";
    waiting = std::move(take);
  }
  void OnMessage(const int& message) override { record_->received.push_back(message); }
  void OnEnd(const absl::Status& end) override {
    ASSERT_FALSE(record_->end.has_value());
    record_->end = end;
    record_->disconnected = WhyDisconnected();
  }
  absl::Status Grant(std::size_t bytes, std::size_t* granted) override {
    if (bytes > most_granted) return absl::ResourceExhaustedError("too much for the user");
    *granted = bytes;
    return absl::OkStatus();
  }
  void Drained(std::size_t* granted) override {
    *granted = 0;
    ++drained;
  }
  // A number is as many bytes as it says.
  std::size_t BytesOf(const int& number) const override { return static_cast<std::size_t>(number); }
  void ToWire(int number, std::string* out) override { *out = std::to_string(number); }
  void StartRead(int* message, void* tag) override {
    read_message_ = message;
    read_ = tag;
  }
  void StartWrite(const std::string& message, void* tag) override {
    ASSERT_EQ(write_, nullptr) << "a second write is under way";
    record_->sent.push_back(message);
    write_ = tag;
  }
  void StartFinish(const absl::Status& status, void* tag) override {
    record_->finished = status;
    finish_ = tag;
  }
  bool CanFinish() const override { return server_; }

  Record* const record_;
  const bool server_;
  int* read_message_ = nullptr;
  void* read_ = nullptr;
  void* write_ = nullptr;
  void* finish_ = nullptr;
};

constexpr UnreadLimits kLimits{3, 100};

class MessageStreamTest : public testing::Test {
 protected:
  void TearDown() override {
    if (stream_ != nullptr) stream_->CompleteAll();
  }

  Record record_;
  std::shared_ptr<FakeStream> stream_ = std::make_shared<FakeStream>(&record_, kLimits);
};

TEST_F(MessageStreamTest, SendsInOrderOneAtATime) {
  stream_->Began();
  for (const int number : {1, 2, 3}) stream_->Send(number);
  EXPECT_THAT(record_.sent, ElementsAre("1"));
  stream_->CompleteWrite();
  EXPECT_THAT(record_.sent, ElementsAre("1", "2"));
  stream_->CompleteWrite();
  stream_->CompleteWrite();
  EXPECT_THAT(record_.sent, ElementsAre("1", "2", "3"));
  EXPECT_FALSE(stream_->writing());
}

TEST_F(MessageStreamTest, QueueSendsNothingUntilFlush) {
  stream_->Began();
  stream_->Queue(1);
  EXPECT_THAT(record_.sent, IsEmpty());
  stream_->Flush();
  EXPECT_THAT(record_.sent, ElementsAre("1"));
}

TEST_F(MessageStreamTest, SendsEarlierMessagesWhenItOpens) {
  stream_->Send(1);
  EXPECT_THAT(record_.sent, IsEmpty());
  stream_->Began();
  EXPECT_THAT(record_.sent, ElementsAre("1"));
}

TEST_F(MessageStreamTest, ReadsEveryMessage) {
  stream_->Began();
  stream_->CompleteRead(7);
  stream_->CompleteRead(8);
  EXPECT_THAT(record_.received, ElementsAre(7, 8));
}

TEST_F(MessageStreamTest, AMessageThatWaitsForItsTurnIsHandledBeforeTheNextIsRead) {
  stream_->Began();
  EXPECT_FALSE(stream_->HasMessage());
  stream_->holds = true;
  stream_->CompleteRead(7);
  EXPECT_TRUE(stream_->HasMessage()) << "so the other side is not silent";
  EXPECT_FALSE(stream_->reading());
  EXPECT_THAT(record_.received, IsEmpty());
  stream_->Send(1);
  EXPECT_THAT(record_.sent, ElementsAre("1")) << "meanwhile it sends";
  std::exchange(stream_->waiting, nullptr)(/*drop=*/false);
  EXPECT_FALSE(stream_->HasMessage());
  EXPECT_TRUE(stream_->reading());
  stream_->holds = false;
  stream_->CompleteRead(8);
  EXPECT_THAT(record_.received, ElementsAre(7, 8));
}

TEST_F(MessageStreamTest, AMessageThatIsDroppedIsNotHandled) {
  stream_->Began();
  stream_->holds = true;
  stream_->CompleteRead(7);
  std::exchange(stream_->waiting, nullptr)(/*drop=*/true);
  EXPECT_THAT(record_.received, IsEmpty());
  EXPECT_TRUE(stream_->reading()) << "the end may come";
  stream_->holds = false;
}

TEST_F(MessageStreamTest, AStreamThatEndsWhileAMessageWaitsEndsAfterIt) {
  const std::weak_ptr<FakeStream> weak = stream_;
  FakeStream* const stream = stream_.get();
  stream->Began();
  stream->holds = true;
  stream->CompleteRead(7);
  stream->Close(absl::AbortedError("ended"));
  stream_.reset();
  stream->CompleteFinish();
  ASSERT_FALSE(weak.expired()) << "a message waits";
  std::exchange(stream->waiting, nullptr)(/*drop=*/false);
  EXPECT_THAT(record_.received, ElementsAre(7));
  EXPECT_FALSE(record_.end.has_value());
  stream->EndReads();
  EXPECT_FALSE(record_.end.has_value()) << "the end has a turn, too";
  ASSERT_FALSE(weak.expired());
  const auto take = std::exchange(stream->waiting, nullptr);
  take(/*drop=*/true);
  EXPECT_EQ(record_.end, absl::AbortedError("ended")) << "an end is never dropped";
  EXPECT_TRUE(weak.expired());
}

TEST_F(MessageStreamTest, CloseFinishesAfterQueuedMessages) {
  stream_->Began();
  stream_->Send(1);
  stream_->Queue(2);
  stream_->Close(absl::AbortedError("ended"));
  stream_->Send(3);  // dropped
  EXPECT_FALSE(record_.finished.has_value());
  stream_->CompleteWrite();
  stream_->CompleteWrite();
  EXPECT_THAT(record_.sent, ElementsAre("1", "2"));
  EXPECT_EQ(record_.finished, absl::AbortedError("ended"));
}

TEST_F(MessageStreamTest, TheFirstEndCounts) {
  stream_->QueueEnd(absl::AbortedError("first"), 1);
  stream_->QueueEnd(absl::AbortedError("second"), 2);
  stream_->Began();
  stream_->CompleteWrite();
  EXPECT_THAT(record_.sent, ElementsAre("1"));
  EXPECT_EQ(record_.finished, absl::AbortedError("first"));
}

TEST_F(MessageStreamTest, TooManyUnreadMessagesDisconnect) {
  stream_->Began();
  stream_->Send(1);                                          // under way
  for (const int number : {2, 3, 4}) stream_->Send(number);  // as many as may wait
  EXPECT_EQ(record_.cancels, 0);
  stream_->Queue(5);
  EXPECT_EQ(record_.cancels, 0) << "Queue() may be called under any lock";
  stream_->Flush();
  EXPECT_EQ(record_.cancels, 1) << "although the write does not complete";
  stream_->Flush();
  EXPECT_EQ(record_.cancels, 1);
  stream_->CompleteWrite(false);
  stream_->EndReads();
  EXPECT_THAT(record_.disconnected, HasSubstr("3 messages unread, of 9 bytes"));
  EXPECT_THAT(record_.disconnected, HasSubstr("3 messages and 100 bytes are allowed"));
  EXPECT_THAT(record_.sent, ElementsAre("1"));
}

TEST_F(MessageStreamTest, TooManyUnreadBytesDisconnect) {
  stream_->Began();
  stream_->Send(1);
  stream_->Send(60);
  stream_->Send(40);
  EXPECT_EQ(record_.cancels, 0);
  stream_->Send(1);
  EXPECT_EQ(record_.cancels, 1);
  stream_->CompleteWrite(false);
  stream_->EndReads();
  EXPECT_THAT(record_.disconnected, HasSubstr("2 messages unread, of 100 bytes"));
}

TEST_F(MessageStreamTest, AMessageThatWaitsAloneMayBeLonger) {
  stream_->Began();
  stream_->Send(1);  // under way
  stream_->Send(101);
  EXPECT_EQ(record_.cancels, 0);
  stream_->Send(1);
  EXPECT_EQ(record_.cancels, 1);
  stream_->CompleteWrite(false);
  stream_->EndReads();
  EXPECT_THAT(record_.disconnected, HasSubstr("1 messages unread, of 101 bytes"));
}

TEST_F(MessageStreamTest, SentBytesDoNotCount) {
  stream_->Began();
  for (int i = 0; i < 10; ++i) {
    stream_->Send(90);
    stream_->CompleteWrite();
  }
  EXPECT_EQ(record_.cancels, 0);
  EXPECT_EQ(record_.sent.size(), 10u);
}

TEST_F(MessageStreamTest, TheLastMessageIsNotBounded) {
  stream_->Began();
  stream_->Send(1);
  stream_->Send(100);
  stream_->QueueEnd(absl::OkStatus(), 50);
  stream_->Flush();
  EXPECT_EQ(record_.cancels, 0);
  stream_->CompleteWrite();
  stream_->CompleteWrite();
  EXPECT_THAT(record_.sent, ElementsAre("1", "100", "50"));
}

TEST_F(MessageStreamTest, OnEndGetsNoStatusFromTheOtherSide) {
  stream_->Began();
  stream_->EndReads();
  EXPECT_EQ(record_.end, absl::OkStatus());
  EXPECT_EQ(record_.disconnected, "");
  EXPECT_EQ(record_.finished, absl::OkStatus());
}

TEST_F(MessageStreamTest, OnEndGetsTheStatusOfClose) {
  stream_->Began();
  stream_->Close(absl::AbortedError("ended"));
  stream_->EndReads();
  EXPECT_EQ(record_.end, absl::AbortedError("ended"));
}

TEST_F(MessageStreamTest, SendsQueuedMessagesAfterTheOtherSidesHalfClose) {
  stream_->Began();
  stream_->Send(1);
  stream_->Send(2);
  stream_->EndReads();
  stream_->CompleteWrite();
  EXPECT_THAT(record_.sent, ElementsAre("1", "2"));
  EXPECT_FALSE(record_.finished.has_value());
  stream_->CompleteWrite();
  EXPECT_EQ(record_.finished, absl::OkStatus());
}

TEST_F(MessageStreamTest, SendsNothingAfterAFailedWrite) {
  stream_->Began();
  stream_->Send(1);
  stream_->Send(2);
  stream_->CompleteWrite(false);
  stream_->EndReads();
  EXPECT_THAT(record_.sent, ElementsAre("1"));
  EXPECT_EQ(record_.finished, absl::OkStatus());
}

// Meanwhile others queue pings, for as long as the end waits for its turn.
TEST_F(MessageStreamTest, MessagesAfterAFailedWriteAreNotUnread) {
  stream_->Began();
  stream_->holds = true;
  stream_->EndReads();
  stream_->Send(1);
  stream_->CompleteWrite(false);
  for (int number = 2; number < 12; ++number) stream_->Send(number);
  EXPECT_EQ(record_.cancels, 0);
  std::exchange(stream_->waiting, nullptr)(/*drop=*/false);
  EXPECT_EQ(record_.disconnected, "");
  EXPECT_THAT(record_.sent, ElementsAre("1"));
  EXPECT_EQ(record_.finished, absl::OkStatus());
}

TEST_F(MessageStreamTest, ClientFinishesAfterTheServer) {
  stream_ = std::make_shared<FakeStream>(&record_, kLimits, /*server=*/false);
  stream_->Began();
  stream_->Close(absl::OkStatus());
  EXPECT_FALSE(record_.finished.has_value());
  stream_->EndReads();
  EXPECT_TRUE(record_.finished.has_value());
}

TEST_F(MessageStreamTest, StreamThatDoesNotOpenFinishes) {
  stream_ = std::make_shared<FakeStream>(&record_, kLimits, /*server=*/false);
  stream_->Queue(1);
  stream_->BeganBroken();
  EXPECT_TRUE(record_.end.has_value());
  EXPECT_TRUE(record_.finished.has_value());
  EXPECT_THAT(record_.sent, IsEmpty());
}

TEST_F(MessageStreamTest, OwnsItselfUntilItsLastOperationHasCompleted) {
  const std::weak_ptr<FakeStream> weak = stream_;
  FakeStream* const stream = stream_.get();
  stream->Began();
  stream_.reset();
  stream->Send(1);
  stream->EndReads();
  stream->CompleteWrite(false);
  EXPECT_FALSE(weak.expired()) << "Finish is under way";
  stream->CompleteFinish();
  EXPECT_TRUE(weak.expired());
}

TEST_F(MessageStreamTest, DisconnectsAUserWhoIsNotGrantedTheQueue) {
  stream_->most_granted = 90;
  stream_->Began();
  stream_->Send(40);  // is being written, so it counts
  stream_->Send(40);
  EXPECT_EQ(record_.cancels, 0);
  stream_->Send(20);
  EXPECT_EQ(record_.cancels, 1);
  stream_->CompleteAll();
  EXPECT_THAT(record_.disconnected, HasSubstr("too much for the user"));
  EXPECT_THAT(record_.disconnected, HasSubstr("1 messages unread, of 40 bytes"));
  stream_ = nullptr;
}

TEST_F(MessageStreamTest, GoesOnWithoutAnAnswerThatIsNotGranted) {
  stream_->most_granted = 10;
  stream_->Began();
  EXPECT_TRUE(stream_->QueueIfGranted(4).ok());
  const absl::Status granted = stream_->QueueIfGranted(7);
  EXPECT_EQ(granted.code(), absl::StatusCode::kResourceExhausted);
  stream_->Send(6);
  stream_->CompleteWrite();
  stream_->CompleteWrite();
  EXPECT_TRUE(stream_->QueueIfGranted(10).ok());
  stream_->Flush();
  EXPECT_THAT(record_.sent, ElementsAre("4", "6", "10"));
  EXPECT_EQ(record_.cancels, 0);
  EXPECT_EQ(stream_->drained, 1);
}

TEST_F(MessageStreamTest, GivesBackWhatWasGrantedWhenAllIsWritten) {
  stream_->Began();
  for (const int number : {10, 20}) stream_->Send(number);
  stream_->CompleteWrite();
  EXPECT_EQ(stream_->drained, 0) << "the second one is being written";
  stream_->CompleteWrite();
  EXPECT_EQ(stream_->drained, 1);
}

// A client that does not read holds a write for as long as it likes.
TEST_F(MessageStreamTest, KeepsWhatWasGrantedForAWriteThatDoesNotComplete) {
  stream_->Began();
  stream_->Send(90);
  stream_->Cancel();
  stream_->EndReads();
  EXPECT_EQ(stream_->drained, 0);
  stream_->CompleteWrite(false);
  EXPECT_EQ(stream_->drained, 1);
}

}  // namespace
}  // namespace gradsync::daemon
