// Sends random messages through thousands of raw sessions. The daemon must not crash or hang, must
// free everything afterwards, and must serve a correct job all the while.

#include <cstdio>
#include <iterator>
#include <memory>
#include <random>
#include <string>
#include <utility>
#include <vector>

#include "gtest/gtest.h"
#include "tests/fault/raw_session.h"
#include "tests/fault/trainer.h"
#include "tests/fuzz/edge_numbers.h"
#include "tests/kit/deadline.h"

namespace gradsync::fault {
namespace {

constexpr int kSequences = 2000;
// A slow machine runs fewer sequences within the budget, but at least kFewest.
constexpr int kFewest = 200;
constexpr std::uint64_t kBudgetNs = 5'000'000'000ull * kScale;
constexpr std::uint32_t kSeed = 20'261'121;

class Fuzzer {
 public:
  Fuzzer() : random_(kSeed) {}

  std::uint64_t Below(std::uint64_t bound) { return random_() % bound; }

  // Returns mostly small numbers, sometimes one at the end of a range.
  std::uint64_t Number() {
    return Below(3) == 0 ? fuzz::kEdgeNumbers[Below(std::size(fuzz::kEdgeNumbers))] : Below(4);
  }

  std::string Text(std::size_t most) {
    std::string text(Below(most + 1), '\0');
    for (char& byte : text) byte = static_cast<char>('a' + Below(26));
    return text;
  }

  v1::SessionRequest Request() {
    v1::SessionRequest request;
    const auto small = [this] { return static_cast<std::uint32_t>(Number()); };
    switch (Below(20)) {
      case 0:
        request = RawSession::OpenRequest(small(), small(), Text(3));
        break;
      case 1: {
        request = RawSession::LayoutRequest(Below(4), Number(), Text(2));
        v1::RegisterLayout& layout = *request.mutable_register_layout();
        layout.set_request_id(Number());
        layout.set_bucket_cap_bytes(Number());
        layout.set_timeout_ms(Number());
        layout.set_bucket_done_messages(Below(2) == 0);
        if (Below(2) == 0) layout.set_replaces(small());
        layout.set_op(static_cast<v1::ReduceOp>(Below(6)));
        if (Below(4) == 0) layout.set_buffer_bytes(Number());
        for (std::uint64_t i = Below(4); i > 0; --i) {
          v1::Parameter& parameter = *layout.add_parameters();
          parameter.set_name(Text(3));
          parameter.add_shape(Number());
          parameter.add_shape(Number());
          parameter.set_dtype(static_cast<v1::DataType>(Below(6)));
        }
        break;
      }
      case 2:
        request.mutable_arena_mapped()->set_channel(small());
        break;
      case 3:
        request.mutable_bucket_ready()->set_channel(small());
        request.mutable_bucket_ready()->set_step(Number());
        for (std::uint64_t i = Below(5); i > 0; --i) {
          request.mutable_bucket_ready()->add_buckets(small());
        }
        break;
      case 4:
        request.mutable_end_step()->set_channel(small());
        request.mutable_end_step()->set_step(Number());
        request.mutable_end_step()->set_used_map(Text(3));
        request.mutable_end_step()->set_ready_rest(Below(2) == 0);
        if (Below(2) == 0) request.mutable_end_step()->mutable_position()->set_batch(Number());
        break;
      case 5:
        request.mutable_abandon_step()->set_channel(small());
        request.mutable_abandon_step()->set_step(Number());
        request.mutable_abandon_step()->set_reason(Text(2000));
        break;
      case 6:
        request.mutable_broadcast()->set_sequence(Number());
        request.mutable_broadcast()->set_root(small());
        request.mutable_broadcast()->set_bytes(Number());
        request.mutable_broadcast()->set_timeout_ms(Number());
        break;
      case 7:
        request.mutable_chunk_written()->set_sequence(Number());
        request.mutable_chunk_written()->set_chunk(Number());
        request.mutable_chunk_written()->set_bytes(Number());
        break;
      case 8:
        request.mutable_chunk_read()->set_sequence(Number());
        request.mutable_chunk_read()->set_chunk(Number());
        break;
      case 9:
        request.mutable_barrier()->set_sequence(Number());
        request.mutable_barrier()->set_timeout_ms(Number());
        break;
      case 10:
        request.mutable_all_reduce()->set_sequence(Number());
        request.mutable_all_reduce()->set_dtype(static_cast<v1::DataType>(Below(11)));
        request.mutable_all_reduce()->set_count(Number());
        request.mutable_all_reduce()->set_op(static_cast<v1::ReduceOp>(Below(6)));
        break;
      case 11:
        request.mutable_leave()->set_exit(Below(2) == 0);
        break;
      case 12:
        request.mutable_query_step()->set_channel(small());
        request.mutable_query_step()->set_step(Number());
        break;
      case 13:
        request.mutable_fetch_state()->set_timeout_ms(Number());
        break;
      case 14:
        request.mutable_state_offer()->set_transfer(Number());
        request.mutable_state_offer()->set_bytes(Number());
        break;
      case 15:
        request.mutable_state_written()->set_transfer(Number());
        request.mutable_state_written()->set_chunk(Number());
        break;
      case 16:
        request.mutable_state_read()->set_transfer(Number());
        request.mutable_state_read()->set_chunk(Number());
        break;
      case 17:
        request.mutable_state_digests()->set_transfer(Number());
        for (std::uint64_t i = Below(4); i > 0; --i) {
          request.mutable_state_digests()->add_items()->set_name(Text(3));
        }
        break;
      case 18:
        request.mutable_state_refused()->set_transfer(Number());
        request.mutable_state_refused()->set_reason(Text(2000));
        break;
      default:
        request.mutable_lease_answer()->set_number(Number());
    }
    if (Below(8) == 0) Mutate(&request);
    return request;
  }

  // Flips bytes of the serialized message. If the result does not parse, the message stays as it
  // was.
  void Mutate(v1::SessionRequest* request) {
    std::string bytes = request->SerializeAsString();
    for (std::uint64_t i = 1 + Below(3); i > 0 && !bytes.empty(); --i) {
      bytes[Below(bytes.size())] = static_cast<char>(random_());
    }
    v1::SessionRequest mutated;
    if (mutated.ParseFromString(bytes)) *request = std::move(mutated);
  }

 private:
  std::mt19937_64 random_;
};

// Opens a session with a layout of its own and runs steps, so that mutations reach later states.
bool OpenDeep(RawSession* rank, const TestDaemon& daemon, std::uint64_t number,
              std::shared_ptr<RawMemory>* arena) {
  if (!rank->Open(0, 1, "deep" + std::to_string(number)).has_value()) return false;
  const auto assigned = rank->Register(RawSession::LayoutRequest(3, 100));
  if (!assigned.has_value()) return false;
  *arena = rank->Map(*assigned, daemon.side_socket());
  return *arena != nullptr && rank->Mapped(assigned->channel()) &&
         rank->Await(v1::SessionResponse::kLayoutReady).has_value() &&
         rank->Ready(1, 1, {0, 1, 2}) && rank->EndStep(1, 1);
}

TEST(RandomMessages, DoNotDisturbOtherJobs) {
  TestDaemon daemon({"--staging_bytes=64KiB", "--log_level=error"});
  // This job runs during the whole test.
  const auto bystanders = JoinedTrainers(daemon, 2, "bystander");
  ExpectAll(bystanders, "register");
  Fuzzer fuzzer;
  const std::uint64_t start_ns = NowNs();
  int sequences = 0, deep = 0;
  for (; sequences < kSequences; ++sequences) {
    if (sequences >= kFewest && NowNs() - start_ns > kBudgetNs) break;
    RawSession rank(daemon.socket());
    std::shared_ptr<RawMemory> arena;
    switch (fuzzer.Below(4)) {
      case 0:
        break;
      case 1:
        ASSERT_TRUE(OpenDeep(&rank, daemon, sequences, &arena)) << "sequence " << sequences;
        ++deep;
        break;
      default:
        ASSERT_TRUE(
            rank.Send(RawSession::OpenRequest(static_cast<std::uint32_t>(fuzzer.Below(2)),
                                              1 + static_cast<std::uint32_t>(fuzzer.Below(2)),
                                              "fuzz" + std::to_string(fuzzer.Below(3)))));
    }
    for (std::uint64_t i = 1 + fuzzer.Below(12); i > 0; --i) {
      if (!rank.Send(fuzzer.Request())) break;
    }
    if (fuzzer.Below(4) > 0) {
      // An empty message breaks the protocol in every state. The stream ends after the daemon has
      // handled all earlier messages. Without it the stream is cancelled in the middle.
      rank.Send({});
      ASSERT_NE(rank.End().code, grpc::StatusCode::DEADLINE_EXCEEDED) << "sequence " << sequences;
    }
    if (sequences % 200 == 0) ExpectAll(bystanders, "step");
  }
  std::printf("%d sequences, %d of them with steps, in %.1f s\n", sequences, deep,
              static_cast<double>(NowNs() - start_ns) / 1e9);
  ExpectAll(bystanders, "step times=3");
  ExpectAll(bystanders, "leave");
  EXPECT_TRUE(daemon.AwaitStatus([](const auto& status) { return status.arena_bytes() == 0; }));
  EXPECT_EQ(daemon.CountDescriptors("memfd:gradsync"), 0);
  const auto trainers = JoinedTrainers(daemon, 2, "good");
  ExpectAll(trainers, "register");
  ExpectAll(trainers, "step times=3");
  ExpectAll(trainers, "leave");
}

}  // namespace
}  // namespace gradsync::fault
