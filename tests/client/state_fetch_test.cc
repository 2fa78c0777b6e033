// How a replacement gets the state, from a daemon that sends what the test says.

#include <algorithm>
#include <cstring>
#include <functional>
#include <future>
#include <memory>
#include <string>
#include <thread>
#include <utility>
#include <vector>

#include "client/include/gradsync/client.h"
#include "client/src/state_image.h"
#include "gmock/gmock.h"
#include "gtest/gtest.h"
#include "tests/client/job_of_threads.h"
#include "tests/client/scripted_daemon.h"
#include "tests/kit/thread_sleep.h"

namespace gradsync {
namespace {

using client::StateImageSource;
using testing::HasSubstr;

constexpr std::size_t kStagingBytes = 8192;

v1::SessionOpened Replacement() {
  v1::SessionOpened opened;
  opened.set_replacement(true);
  opened.set_staging_bytes(kStagingBytes);
  v1::CurrentLayout& current = *opened.add_layouts();
  current.set_step(12);
  v1::RegisterLayout& layout = *current.mutable_layout();
  layout.set_name("model");
  v1::Parameter& parameter = *layout.add_parameters();
  parameter.set_name("weight");
  parameter.add_shape(3);
  parameter.add_shape(4);
  parameter.set_dtype(v1::DATA_TYPE_FLOAT64);
  layout.set_last_bucket_cap_bytes(100);
  layout.set_op(v1::REDUCE_OP_SUM);
  layout.set_buffer_bytes(48);
  return opened;
}

class Weight final : public TrainerState {
 public:
  absl::StatusOr<std::vector<StateItem>> Read() override {
    if (on_read) on_read();
    if (!failure.ok()) return failure;
    return std::vector<StateItem>{{"weight", value.data(), value.size()}};
  }
  void Done() override {}

  std::string value = "abc";
  absl::Status failure;
  std::function<void()> on_read;
};

class StateFetchTest : public testing::Test {
 protected:
  explicit StateFetchTest(const v1::SessionOpened& opened = Replacement()) : daemon_(opened) {
    SessionOptions options;
    options.socket = daemon_.socket();
    options.job_id = "scripted";
    options.world_size = 2;
    options.on_rank_loss = LossPolicy::kHold;
    auto joined = Session::Join(options);
    EXPECT_TRUE(joined.ok()) << joined.status();
    if (joined.ok()) session_ = *std::move(joined);
  }

  std::future<absl::StatusOr<StateImage>> Fetch(absl::Duration timeout) {
    return std::async(std::launch::async, [=] { return session_->FetchState(timeout); });
  }
  std::future<absl::Status> Confirm(absl::Duration timeout = absl::InfiniteDuration()) {
    return std::async(std::launch::async, [=] { return session_->ConfirmState(timeout); });
  }
  v1::SessionRequest Next() {
    auto request = daemon_.Next();
    EXPECT_TRUE(request.has_value());
    return request.value_or(v1::SessionRequest());
  }
  void Begin(std::uint64_t transfer, std::uint64_t bytes) {
    v1::SessionResponse response;
    response.mutable_state_begin()->set_transfer(transfer);
    response.mutable_state_begin()->set_bytes(bytes);
    response.mutable_state_begin()->set_source(1);
    daemon_.Say(response);
  }
  void SayChunk(std::uint64_t transfer, std::uint64_t number, const std::string& bytes) {
    std::memcpy(daemon_.staging(), bytes.data(), std::min(bytes.size(), kStagingBytes));
    v1::SessionResponse response;
    response.mutable_state_chunk()->set_transfer(transfer);
    response.mutable_state_chunk()->set_chunk(number);
    response.mutable_state_chunk()->set_bytes(bytes.size());
    daemon_.Say(response);
  }
  void Cancel(std::uint64_t transfer) {
    v1::SessionResponse response;
    response.mutable_state_cancelled()->set_transfer(transfer);
    daemon_.Say(response);
  }
  void Admit(std::uint64_t transfer) {
    v1::SessionResponse response;
    response.mutable_state_admitted()->set_transfer(transfer);
    daemon_.Say(response);
  }
  void Fail(absl::StatusCode code, const std::string& message) {
    v1::SessionResponse response;
    response.mutable_state_failed()->mutable_status()->set_code(static_cast<int>(code));
    response.mutable_state_failed()->mutable_status()->set_message(message);
    daemon_.Say(response);
  }
  // The image of one item, in chunks as the daemon cuts it.
  void SendImage(std::uint64_t transfer, const std::string& value) {
    const StateImageSource source({{"weight", value.data(), value.size()}});
    std::string image(source.bytes(), '\0');
    source.Copy(0, image.size(), reinterpret_cast<std::byte*>(image.data()));
    Begin(transfer, image.size());
    for (std::size_t at = 0, number = 0; at < image.size(); at += kStagingBytes, ++number) {
      SayChunk(transfer, number, image.substr(at, kStagingBytes));
      const auto read = Next();
      EXPECT_EQ(read.state_read().transfer(), transfer) << read.DebugString();
      EXPECT_EQ(read.state_read().chunk(), number);
    }
  }
  // FetchState, which gets `value`.
  void FetchValue(std::uint64_t transfer, const std::string& value) {
    auto fetched = Fetch(absl::InfiniteDuration());
    EXPECT_TRUE(Next().has_fetch_state());
    SendImage(transfer, value);
    ASSERT_TRUE(fetched.get().ok());
  }

  ScriptedDaemon daemon_;
  std::unique_ptr<Session> session_;
};

TEST_F(StateFetchTest, TheCurrentLayoutsAreThoseOfTheJob) {
  const auto layouts = session_->CurrentLayouts();
  ASSERT_EQ(layouts.size(), 1u);
  EXPECT_EQ(layouts[0].step, 12u);
  const LayoutSpec& spec = layouts[0].spec;
  EXPECT_EQ(spec.name, "model");
  ASSERT_EQ(spec.parameters.size(), 1u);
  EXPECT_EQ(spec.parameters[0].name, "weight");
  EXPECT_THAT(spec.parameters[0].shape, testing::ElementsAre(3, 4));
  EXPECT_EQ(spec.parameters[0].dtype, DataType::kFloat64);
  EXPECT_EQ(spec.bucket_cap_bytes, 25u << 20);
  EXPECT_EQ(spec.last_bucket_cap_bytes, 100u);
  EXPECT_EQ(spec.op, ReduceOp::kSum);
  EXPECT_EQ(spec.buffer_bytes, 48u);
}

TEST_F(StateFetchTest, TheStateIsFetchedLoadedAndConfirmed) {
  const std::string value(3 * kStagingBytes, 'v');
  auto fetched = Fetch(absl::Seconds(7));
  EXPECT_EQ(Next().fetch_state().timeout_ms(), 7000u);
  SendImage(1, value);
  const auto image = fetched.get();
  ASSERT_TRUE(image.ok()) << image.status();
  EXPECT_EQ(image->source, 1u);
  ASSERT_EQ(image->items.size(), 1u);
  EXPECT_EQ(image->items[0].name, "weight");
  EXPECT_EQ(std::memcmp(image->items[0].data.data(), value.data(), value.size()), 0);
  ExpectError(session_->ConfirmState(), absl::StatusCode::kFailedPrecondition,
              "PROTOCOL_VIOLATION");  // it serves no state
  ASSERT_TRUE(session_->ServeState(std::make_shared<Weight>()).ok());
  auto confirmed = Confirm();
  const auto digests = Next();
  EXPECT_EQ(digests.state_digests().transfer(), 1u);
  ASSERT_EQ(digests.state_digests().items_size(), 1);
  EXPECT_EQ(digests.state_digests().items(0).name(), "weight");
  Admit(1);
  const absl::Status status = confirmed.get();
  EXPECT_TRUE(status.ok()) << status;
  ExpectError(session_->FetchState().status(), absl::StatusCode::kFailedPrecondition,
              "PROTOCOL_VIOLATION");
}

TEST_F(StateFetchTest, ANewTransferReplacesTheOld) {
  auto fetched = Fetch(absl::InfiniteDuration());
  EXPECT_EQ(Next().fetch_state().timeout_ms(), 0u);
  Begin(1, 2 * kStagingBytes);
  SayChunk(1, 0, std::string(kStagingBytes, 'x'));
  EXPECT_TRUE(Next().has_state_read());
  Cancel(1);
  SendImage(2, "new");
  const auto image = fetched.get();
  ASSERT_TRUE(image.ok()) << image.status();
  EXPECT_EQ(std::memcmp(image->items[0].data.data(), "new", 3), 0);
}

TEST_F(StateFetchTest, AnInterruptedConfirmationFetchesAgain) {
  ASSERT_TRUE(session_->ServeState(std::make_shared<Weight>()).ok());
  FetchValue(1, "abc");
  auto confirmed = Confirm();
  EXPECT_TRUE(Next().has_state_digests());
  Cancel(1);
  ExpectError(confirmed.get(), absl::StatusCode::kAborted, "STATE_INTERRUPTED");
  // Before it is fetched again there is nothing to confirm.
  ExpectError(session_->ConfirmState(), absl::StatusCode::kAborted, "STATE_INTERRUPTED");
  auto fetched = Fetch(absl::InfiniteDuration());
  SendImage(2, "abc");  // the daemon was asked before
  EXPECT_TRUE(fetched.get().ok());
  confirmed = Confirm();
  EXPECT_EQ(Next().state_digests().transfer(), 2u);
  Admit(1);  // of an earlier transfer: nothing
  Admit(2);
  EXPECT_TRUE(confirmed.get().ok());
}

TEST_F(StateFetchTest, AConfirmationThatTimesOutCanBeRepeated) {
  ASSERT_TRUE(session_->ServeState(std::make_shared<Weight>()).ok());
  FetchValue(1, "abc");
  auto confirmed = Confirm(absl::Milliseconds(300));
  const absl::Status late = confirmed.get();
  ExpectError(late, absl::StatusCode::kDeadlineExceeded, "WAIT_TIMEOUT");
  confirmed = Confirm();
  EXPECT_TRUE(Next().has_state_digests());
  Admit(1);
  EXPECT_TRUE(confirmed.get().ok());
  EXPECT_TRUE(daemon_.Silent());
}

// The trainer has left its call by Ctrl-C, and a helper thread still makes it.
TEST_F(StateFetchTest, AConfirmationThatWasLeftDoesNotStopTheNextOne) {
  const auto weight = std::make_shared<Weight>();
  ASSERT_TRUE(session_->ServeState(weight).ok());
  FetchValue(1, "abc");
  std::promise<void> reads;
  std::promise<void> ends;
  weight->on_read = [&, first = true]() mutable {
    if (!std::exchange(first, false)) return;
    reads.set_value();
    ends.get_future().wait();
  };
  auto left = Confirm();
  reads.get_future().wait();
  auto pause = std::async(std::launch::async, [this] { return session_->PauseState(); });
  while (session_->StatePauses() == 0) std::this_thread::yield();
  ends.set_value();
  EXPECT_TRUE(pause.get().ok());
  EXPECT_TRUE(daemon_.Silent());
  ExpectError(session_->ConfirmState(absl::ZeroDuration()), absl::StatusCode::kDeadlineExceeded,
              "WAIT_TIMEOUT");
  auto confirmed = Confirm();
  EXPECT_EQ(Next().state_digests().transfer(), 1u);
  Admit(1);
  EXPECT_TRUE(left.get().ok());
  EXPECT_TRUE(confirmed.get().ok());
}

TEST_F(StateFetchTest, AFetchThatWasLeftDoesNotStopTheNextOne) {
  auto left = Fetch(absl::InfiniteDuration());
  EXPECT_TRUE(Next().has_fetch_state());
  ExpectError(session_->FetchState(absl::ZeroDuration()).status(),
              absl::StatusCode::kDeadlineExceeded, "STATE_UNAVAILABLE");
  std::promise<pid_t> thread;
  auto fetched = std::async(std::launch::async, [&] {
    thread.set_value(ThisThread());
    return session_->FetchState();
  });
  AwaitSleep(thread.get_future().get());
  SendImage(1, "abc");
  EXPECT_TRUE(left.get().ok());
  // Nobody has loaded that one.
  EXPECT_TRUE(Next().has_fetch_state());
  SendImage(2, "abc");
  EXPECT_TRUE(fetched.get().ok());
}

TEST_F(StateFetchTest, AnOperationThatIsRefusedLeavesTheChunkAsItIs) {
  auto fetched = Fetch(absl::InfiniteDuration());
  EXPECT_TRUE(Next().has_fetch_state());
  // The chunk comes from the daemon, which has not announced it yet.
  const std::string chunk(kStagingBytes, 'x');
  std::memcpy(daemon_.staging(), chunk.data(), chunk.size());
  std::string data(kStagingBytes, '.');
  ExpectError(session_->AllReduce(data.data(), data.size(), DataType::kUint8, ReduceOp::kSum),
              absl::StatusCode::kFailedPrecondition, "PROTOCOL_VIOLATION");
  EXPECT_EQ(std::memcmp(daemon_.staging(), chunk.data(), chunk.size()), 0);
  SendImage(1, "abc");
  EXPECT_TRUE(fetched.get().ok());
}

// The daemon asks a replacement for its state before that has any, which is wrong.
TEST_F(StateFetchTest, AFetchWaitsForTheStagingMemory) {
  EXPECT_TRUE(session_->ServeState(std::make_shared<Weight>()).ok());
  // A wait in which the state is read.
  auto left = std::async(std::launch::async, [this] { return session_->Leave(); });
  EXPECT_TRUE(Next().has_leave());
  v1::SessionResponse question;
  question.mutable_state_question()->set_transfer(5);
  question.mutable_state_question()->set_offer(true);
  daemon_.Say(question);
  EXPECT_TRUE(Next().has_state_offer());  // the reader has the memory until transfer 5 ends
  EXPECT_TRUE(Next().has_state_digests());
  ExpectError(session_->FetchState(absl::Milliseconds(1)).status(),
              absl::StatusCode::kDeadlineExceeded, "STATE_UNAVAILABLE");
  Cancel(5);
  auto fetched = Fetch(absl::InfiniteDuration());
  const auto asked = Next();
  EXPECT_TRUE(asked.has_fetch_state());
  EXPECT_EQ(asked.fetch_state().timeout_ms(), 0u) << "the first call has asked";
  SendImage(1, "abc");
  EXPECT_TRUE(fetched.get().ok());
  daemon_.Die();
  ExpectError(left.get(), absl::StatusCode::kUnavailable, "DAEMON_LOST");
}

TEST_F(StateFetchTest, MessagesOfAnotherTransferAreIgnored) {
  ASSERT_TRUE(session_->ServeState(std::make_shared<Weight>()).ok());
  auto fetched = Fetch(absl::InfiniteDuration());
  EXPECT_TRUE(Next().has_fetch_state());
  Begin(1, 64);
  Begin(2, 2 * kStagingBytes);
  SayChunk(2, 0, std::string(kStagingBytes, 'x'));
  SayChunk(1, 9, std::string(64, 'x'));
  EXPECT_EQ(Next().state_read().transfer(), 2u);
  Cancel(1);
  SayChunk(2, 1, std::string(kStagingBytes, 'x'));
  EXPECT_EQ(Next().state_read().transfer(), 2u);
  EXPECT_THAT(Next().state_refused().reason(), HasSubstr("malformed"));
  ExpectError(fetched.get().status(), absl::StatusCode::kFailedPrecondition, "STATE_REFUSED");
}

TEST_F(StateFetchTest, AdmissionOfAnotherTransferIsIgnored) {
  ASSERT_TRUE(session_->ServeState(std::make_shared<Weight>()).ok());
  FetchValue(2, "abc");
  auto confirmed = Confirm();
  EXPECT_TRUE(Next().has_state_digests());
  Admit(1);
  Cancel(2);
  ExpectError(confirmed.get(), absl::StatusCode::kAborted, "STATE_INTERRUPTED");
}

TEST_F(StateFetchTest, TheDaemonsFailureIsReturned) {
  auto fetched = Fetch(absl::InfiniteDuration());
  EXPECT_TRUE(Next().has_fetch_state());
  Fail(absl::StatusCode::kUnavailable, "rank 1 refused");
  EXPECT_EQ(fetched.get().status().code(), absl::StatusCode::kUnavailable);
  FetchValue(1, "abc");  // asks again
  ASSERT_TRUE(session_->ServeState(std::make_shared<Weight>()).ok());
  Fail(absl::StatusCode::kDeadlineExceeded, "not in time");
  auto confirmed = Confirm();
  const absl::Status status = confirmed.get();
  EXPECT_EQ(status.code(), absl::StatusCode::kDeadlineExceeded) << status;
}

TEST_F(StateFetchTest, AFetchTimesOut) {
  const auto image = session_->FetchState(absl::Milliseconds(1));
  ExpectError(image.status(), absl::StatusCode::kDeadlineExceeded, "STATE_UNAVAILABLE");
}

TEST_F(StateFetchTest, AMalformedImageIsRefused) {
  auto fetched = Fetch(absl::InfiniteDuration());
  EXPECT_TRUE(Next().has_fetch_state());
  Begin(1, 64);
  SayChunk(1, 0, std::string(64, 'x'));
  EXPECT_TRUE(Next().has_state_read());
  EXPECT_THAT(Next().state_refused().reason(), HasSubstr("malformed"));
  ExpectError(fetched.get().status(), absl::StatusCode::kFailedPrecondition, "STATE_REFUSED");
}

TEST_F(StateFetchTest, AStateTooLargeForThisMachineIsRefused) {
  auto fetched = Fetch(absl::InfiniteDuration());
  EXPECT_TRUE(Next().has_fetch_state());
  Begin(1, std::uint64_t{1} << 60);
  SayChunk(1, 0, "x");
  EXPECT_THAT(Next().state_refused().reason(), HasSubstr("memory"));
  ExpectError(fetched.get().status(), absl::StatusCode::kResourceExhausted, "MEMORY");
}

struct ImpossibleChunk {
  const char* name;
  std::uint64_t state_bytes;
  std::uint64_t number;
  std::size_t bytes;
};
constexpr ImpossibleChunk kImpossibleChunks[] = {
    {"beyond_the_state", 64, 0, 128},
    {"out_of_order", 64, 1, 64},
    {"empty", 64, 0, 0},
    {"beyond_the_staging_memory", 4 * kStagingBytes, 0, kStagingBytes + 1}};

class ImpossibleChunkTest : public StateFetchTest,
                            public testing::WithParamInterface<ImpossibleChunk> {};

TEST_P(ImpossibleChunkTest, IsRefused) {
  auto fetched = Fetch(absl::ZeroDuration());
  EXPECT_TRUE(Next().has_fetch_state());
  Begin(1, GetParam().state_bytes);
  SayChunk(1, GetParam().number, std::string(GetParam().bytes, 'x'));
  ExpectError(fetched.get().status(), absl::StatusCode::kInternal, "PROTOCOL_VIOLATION");
}

INSTANTIATE_TEST_SUITE_P(Each, ImpossibleChunkTest, testing::ValuesIn(kImpossibleChunks),
                         [](const auto& chunk) { return std::string(chunk.param.name); });

TEST_F(StateFetchTest, AStateThatCannotBeReadIsRefused) {
  const auto weight = std::make_shared<Weight>();
  weight->failure = absl::InternalError("nothing is loaded");
  ASSERT_TRUE(session_->ServeState(weight).ok());
  FetchValue(1, "abc");
  auto confirmed = Confirm();
  EXPECT_THAT(Next().state_refused().reason(), HasSubstr("nothing is loaded"));
  daemon_.Die();
  ExpectError(confirmed.get(), absl::StatusCode::kUnavailable, "DAEMON_LOST");
}

TEST_F(StateFetchTest, TheEndOfTheSessionEndsTheWait) {
  auto fetched = Fetch(absl::InfiniteDuration());
  EXPECT_TRUE(Next().has_fetch_state());
  daemon_.Die();
  ExpectError(fetched.get().status(), absl::StatusCode::kUnavailable, "DAEMON_LOST");
}

class SurvivorTest : public StateFetchTest {
 protected:
  static v1::SessionOpened Opened() {
    v1::SessionOpened opened;
    opened.set_staging_bytes(kStagingBytes);
    return opened;
  }
  SurvivorTest() : StateFetchTest(Opened()) {}
};

TEST_F(SurvivorTest, OnlyAReplacementFetches) {
  EXPECT_TRUE(session_->CurrentLayouts().empty());
  ExpectError(session_->FetchState().status(), absl::StatusCode::kFailedPrecondition,
              "PROTOCOL_VIOLATION");
  ASSERT_TRUE(session_->ServeState(std::make_shared<Weight>()).ok());
  ExpectError(session_->ConfirmState(), absl::StatusCode::kFailedPrecondition,
              "PROTOCOL_VIOLATION");
  EXPECT_TRUE(daemon_.Silent());
}

}  // namespace
}  // namespace gradsync
