#include "daemon/rpc/decode.h"

#include <gtest/gtest.h>

#include <cstdint>
#include <limits>
#include <string>
#include <vector>

#include "absl/strings/match.h"
#include "absl/strings/str_cat.h"
#include "daemon/base/error.h"
#include "google/protobuf/text_format.h"
#include "proto/gradsync/limits.h"
#include "proto/gradsync/shared_memory.h"

namespace gradsync::daemon {
namespace {

constexpr std::uint64_t kNowNs = 1'000'000;
constexpr std::uint64_t kNsPerMs = 1'000'000;
constexpr std::uint64_t kMax = std::numeric_limits<std::uint64_t>::max();
constexpr std::uint64_t kWeekMs = 7ull * 24 * 3600 * 1000;
constexpr std::uint64_t kStaging = 1024;

template <typename Message>
Message Parse(const std::string& text) {
  Message message;
  EXPECT_TRUE(google::protobuf::TextFormat::ParseFromString(text, &message)) << text;
  return message;
}

void ExpectRefused(const absl::Status& status, absl::StatusCode code, const std::string& reason,
                   const std::vector<std::string>& says) {
  EXPECT_EQ(status.code(), code) << status;
  EXPECT_EQ(DetailsOf(status).reason, reason) << status;
  for (const std::string& part : says) {
    EXPECT_TRUE(absl::StrContains(status.message(), part)) << part << " in: " << status;
  }
}

// ---- OpenSession

v1::OpenSession GoodOpen() {
  return Parse<v1::OpenSession>(absl::StrCat(R"(
      protocol { oldest: 1 newest: 1 } shared_memory_abi: )",
                                             kSharedMemoryAbi, R"(
      job_id: "run-7" token: "secret" rank: 1 world_size: 2 client: "gradsync-cpp/0.1"
      options { on_rank_loss: LOSS_POLICY_ABORT divisor: DIVISOR_WORLD step_timeout_ms: 5
        nccl {
          max_ctas: 8
          algorithm: NCCL_ALGORITHM_NVLS_TREE
          protocol: NCCL_PROTOCOL_LL128
          wire_type: NCCL_WIRE_TYPE_SAME
        }
      })"));
}

absl::StatusOr<OpenRequest> Open(const v1::OpenSession& message) {
  std::uint32_t protocol = 0;
  return DecodeOpen(message, &protocol);
}

TEST(DecodeOpenTest, ReadsEveryField) {
  std::uint32_t protocol = 0;
  const auto request = DecodeOpen(GoodOpen(), &protocol);
  ASSERT_TRUE(request.ok()) << request.status();
  EXPECT_EQ(protocol, 1u);
  EXPECT_EQ(request->job_id, "run-7");
  EXPECT_EQ(request->token, "secret");
  EXPECT_EQ(request->rank, 1u);
  EXPECT_EQ(request->world_size, 2u);
  EXPECT_TRUE(request->options.divide_by_world);
  EXPECT_EQ(request->options.step_timeout_ns, 5 * kNsPerMs);
  EXPECT_EQ(request->options.nccl.max_ctas, 8u);
  EXPECT_EQ(request->options.nccl.algorithm, NcclAlgorithm::kNvlsTree);
  EXPECT_EQ(request->options.nccl.protocol, NcclProtocol::kLl128);
  EXPECT_EQ(request->options.nccl.wire_type, NcclWireType::kSame);
  EXPECT_EQ(request->client, "gradsync-cpp/0.1");
}

TEST(DecodeOpenTest, OptionsHaveDefaults) {
  v1::OpenSession message = GoodOpen();
  message.clear_options();
  message.clear_token();
  message.clear_client();
  const auto request = Open(message);
  ASSERT_TRUE(request.ok()) << request.status();
  EXPECT_FALSE(request->options.divide_by_world);
  EXPECT_EQ(request->options.step_timeout_ns, 0u);  // the daemon's default
  EXPECT_EQ(request->options.nccl.max_ctas, 0u);    // NCCL's choice, as the rest
  EXPECT_EQ(request->options.nccl.algorithm, NcclAlgorithm::kAuto);
  EXPECT_EQ(request->options.nccl.protocol, NcclProtocol::kAuto);
  EXPECT_EQ(request->options.nccl.wire_type, NcclWireType::kAuto);
  EXPECT_EQ(request->token, "");
}

TEST(DecodeOpenTest, HoldNamesTheSourceOfTheState) {
  v1::OpenSession message = GoodOpen();
  message.mutable_options()->set_on_rank_loss(v1::LOSS_POLICY_HOLD);
  message.mutable_options()->set_state_source(v1::STATE_SOURCE_TRAINER);
  EXPECT_EQ(Open(message)->options.on_rank_loss, OnRankLoss::kHold);
  EXPECT_EQ(Open(message)->options.hold_timeout_ns, 600'000 * kNsPerMs);
  EXPECT_EQ(Open(message)->options.state_source, StateSource::kTrainer);
  message.mutable_options()->set_state_source(v1::STATE_SOURCE_SURVIVOR);
  EXPECT_EQ(Open(message)->options.state_source, StateSource::kSurvivor);
  message.mutable_options()->set_hold_timeout_ms(7);
  EXPECT_EQ(Open(message)->options.hold_timeout_ns, 7 * kNsPerMs);
  message.mutable_options()->set_hold_timeout_ms(kMax);
  EXPECT_EQ(Open(message)->options.hold_timeout_ns, kWeekMs * kNsPerMs);
  message.mutable_options()->set_on_rank_loss(v1::LOSS_POLICY_ABORT);
  EXPECT_EQ(Open(message)->options.on_rank_loss, OnRankLoss::kAbort);
}

TEST(DecodeOpenTest, NewestCommonProtocolIsChosen) {
  v1::OpenSession message = GoodOpen();
  message.mutable_protocol()->set_newest(99);
  std::uint32_t protocol = 0;
  EXPECT_TRUE(DecodeOpen(message, &protocol).ok());
  EXPECT_EQ(protocol, kProtocolNewest);
}

TEST(DecodeOpenTest, BoundsTimeouts) {
  v1::OpenSession message = GoodOpen();
  message.mutable_options()->set_step_timeout_ms(kMax);
  EXPECT_EQ(Open(message)->options.step_timeout_ns, kWeekMs * kNsPerMs);
}

// It lives as long as the session. What the client has added takes no memory there.
TEST(DecodeOpenTest, AMessageKeptForACoordinatorHasNoUnknownFieldsAndNoToken) {
  v1::OpenSession message = GoodOpen();
  message.set_token("secret");
  message.set_coordinator("10.0.0.1");
  const std::size_t known = message.ByteSizeLong();
  ASSERT_TRUE(message.MergeFromString(std::string("\x5A\x00\x5A\x00", 4)));
  ASSERT_GT(message.ByteSizeLong(), known);
  const auto request = Open(message);
  ASSERT_TRUE(request.ok()) << request.status();
  EXPECT_EQ(request->token, "secret");
  ASSERT_NE(request->message, nullptr);
  v1::OpenSession kept = GoodOpen();
  kept.clear_token();
  kept.clear_coordinator();
  EXPECT_EQ(request->message->SerializeAsString(), kept.SerializeAsString());
}

struct OpenFault {
  const char* name;
  void (*spoil)(v1::OpenSession*);
  absl::StatusCode code;
  const char* reason;
  std::vector<std::string> says;
};

class OpenFaultTest : public testing::TestWithParam<OpenFault> {};

TEST_P(OpenFaultTest, IsRefusedByName) {
  v1::OpenSession message = GoodOpen();
  GetParam().spoil(&message);
  ExpectRefused(Open(message).status(), GetParam().code, GetParam().reason, GetParam().says);
}

constexpr auto kInvalid = absl::StatusCode::kInvalidArgument;
constexpr auto kPrecondition = absl::StatusCode::kFailedPrecondition;
constexpr auto kExhausted = absl::StatusCode::kResourceExhausted;

const OpenFault kOpenFaults[] = {
    {"NoProtocol",
     [](auto* m) { m->clear_protocol(); },
     kPrecondition,
     "VERSION",
     {"protocol 1.0 to 1.0", "this daemon 1.1 to 1.1", "upgrade"}},
    {"ProtocolTooNew",
     [](auto* m) {
       m->mutable_protocol()->set_oldest(kProtocolNewest + 1);
       m->mutable_protocol()->set_newest(kProtocolNewest + 1);
     },
     kPrecondition,
     "VERSION",
     {"upgrade"}},
    {"ProtocolBackwards",
     [](auto* m) {
       m->mutable_protocol()->set_oldest(5);
       m->mutable_protocol()->set_newest(3);
     },
     kPrecondition,
     "VERSION",
     {"1.5 to 1.3"}},
    {"OtherAbi",
     [](auto* m) { m->set_shared_memory_abi(77); },
     kPrecondition,
     "VERSION",
     {"shared-memory ABI 77"}},
    {"NoJob", [](auto* m) { m->clear_job_id(); }, kInvalid, "MALFORMED", {"job_id", "0 bytes"}},
    {"LongJob",
     [](auto* m) { m->set_job_id(std::string(129, 'j')); },
     kInvalid,
     "MALFORMED",
     {"job_id", "129 bytes", "128"}},
    {"UnprintableJob",
     [](auto* m) { m->set_job_id("run\n7"); },
     kInvalid,
     "MALFORMED",
     {"job_id", "printable"}},
    {"JobOfLetters",
     [](auto* m) { m->set_job_id("l\xc3\xa4uft"); },
     kInvalid,
     "MALFORMED",
     {"job_id", "ASCII"}},
    {"LongToken",
     [](auto* m) { m->set_token(std::string(4097, 't')); },
     kInvalid,
     "MALFORMED",
     {"token", "4096"}},
    {"LongClient",
     [](auto* m) { m->set_client(std::string(129, 'c')); },
     kInvalid,
     "MALFORMED",
     {"client", "128"}},
    {"NoWorld", [](auto* m) { m->set_world_size(0); }, kInvalid, "MALFORMED", {"world_size 0"}},
    {"HugeWorld",
     [](auto* m) { m->set_world_size(65537); },
     kInvalid,
     "MALFORMED",
     {"world_size 65537", "65536"}},
    {"RankBeyondTheWorld",
     [](auto* m) { m->set_rank(2); },
     kInvalid,
     "MALFORMED",
     {"rank 2", "world of 2", "count from 0"}},
    {"UnknownPolicy",
     [](auto* m) { m->mutable_options()->set_on_rank_loss(static_cast<v1::LossPolicy>(9)); },
     kInvalid,
     "MALFORMED",
     {"on_rank_loss"}},
    {"Hold",
     [](auto* m) { m->mutable_options()->set_on_rank_loss(v1::LOSS_POLICY_HOLD); },
     kInvalid,
     "MALFORMED",
     {"on_rank_loss=hold", "state_source"}},
    {"Continue",
     [](auto* m) { m->mutable_options()->set_on_rank_loss(v1::LOSS_POLICY_CONTINUE); },
     absl::StatusCode::kUnimplemented,
     "LOSS_POLICY",
     {"on_rank_loss=continue", "not built"}},
    {"UnknownStateSource",
     [](auto* m) { m->mutable_options()->set_state_source(static_cast<v1::StateSource>(3)); },
     kInvalid,
     "MALFORMED",
     {"state_source"}},
    {"UnknownDivisor",
     [](auto* m) { m->mutable_options()->set_divisor(static_cast<v1::Divisor>(-1)); },
     kInvalid,
     "MALFORMED",
     {"divisor"}},
};

INSTANTIATE_TEST_SUITE_P(OpenSession, OpenFaultTest, testing::ValuesIn(kOpenFaults),
                         [](const auto& info) { return std::string(info.param.name); });

// ---- RegisterLayout

v1::RegisterLayout GoodLayout() {
  return Parse<v1::RegisterLayout>(R"(
      request_id: 3 name: "model" op: REDUCE_OP_SUM timeout_ms: 7 bucket_done_messages: true
      bucket_cap_bytes: 100 first_bucket_cap_bytes: 10 last_bucket_cap_bytes: 20
      parameters { name: "w" shape: 10 shape: 64 dtype: DATA_TYPE_FLOAT32 }
      parameters { name: "b" shape: 10 dtype: DATA_TYPE_BFLOAT16 })");
}

absl::StatusOr<LayoutRequest> Layout(const v1::RegisterLayout& message,
                                     const DecodeLimits& limits = {}) {
  return DecodeLayout(message, {}, limits, kNowNs);
}

TEST(DecodeLayoutTest, ReadsEveryField) {
  const auto request = Layout(GoodLayout());
  ASSERT_TRUE(request.ok()) << request.status();
  EXPECT_EQ(request->request_id, 3u);
  EXPECT_EQ(request->deadline_ns, kNowNs + 7 * kNsPerMs);
  EXPECT_TRUE(request->bucket_done_messages);
  const LayoutSpec& spec = request->spec;
  EXPECT_EQ(spec.name, "model");
  EXPECT_EQ(spec.op, ReduceOp::kSum);
  EXPECT_EQ(spec.bucket_cap_bytes, 100u);
  EXPECT_EQ(spec.first_bucket_cap_bytes, 10u);
  EXPECT_EQ(spec.last_bucket_cap_bytes, 20u);
  ASSERT_EQ(spec.parameters.size(), 2u);
  EXPECT_EQ(spec.parameters[0].name, "w");
  EXPECT_EQ(spec.parameters[0].shape, (std::vector<std::uint64_t>{10, 64}));
  EXPECT_EQ(spec.parameters[1].dtype, DataType::kBfloat16);
  EXPECT_TRUE(spec.explicit_buckets.empty());
}

TEST(DecodeLayoutTest, BucketSizesHaveThePapersDefaults) {
  const auto request = Layout(Parse<v1::RegisterLayout>(
      R"(name: "m" parameters { name: "scalar" dtype: DATA_TYPE_FLOAT64 })"));
  ASSERT_TRUE(request.ok()) << request.status();
  EXPECT_EQ(request->spec.bucket_cap_bytes, 25u << 20);
  EXPECT_EQ(request->spec.first_bucket_cap_bytes, 1u << 20);
  EXPECT_EQ(request->spec.last_bucket_cap_bytes, 0u);
  EXPECT_EQ(request->spec.op, ReduceOp::kAverage);
  EXPECT_EQ(request->deadline_ns, kNowNs + 300'000 * kNsPerMs);
  EXPECT_FALSE(request->bucket_done_messages);
}

TEST(DecodeLayoutTest, DevicePutsTheLayoutOnAGpu) {
  v1::RegisterLayout message = GoodLayout();
  EXPECT_FALSE(Layout(message)->spec.on_gpu);
  message.set_device("GPU-0123");
  const auto request = Layout(message);
  ASSERT_TRUE(request.ok()) << request.status();
  EXPECT_EQ(request->device, "GPU-0123");
  EXPECT_TRUE(request->spec.on_gpu);
  message.set_device(std::string(65, 'G'));
  EXPECT_EQ(Layout(message).status().code(), absl::StatusCode::kInvalidArgument);
  message.set_device("GPU\n");
  EXPECT_EQ(Layout(message).status().code(), absl::StatusCode::kInvalidArgument);
}

TEST(DecodeLayoutTest, ReadsExplicitBuckets) {
  const auto request = Layout(Parse<v1::RegisterLayout>(R"(
      name: "m" explicit_buckets { dtype: DATA_TYPE_FLOAT16 count: 5 }
      explicit_buckets { dtype: DATA_TYPE_FLOAT64 count: 0 })"));
  ASSERT_TRUE(request.ok()) << request.status();
  ASSERT_EQ(request->spec.explicit_buckets.size(), 2u);
  EXPECT_EQ(request->spec.explicit_buckets[0].first, DataType::kFloat16);
  EXPECT_EQ(request->spec.explicit_buckets[0].second, 5u);
}

TEST(DecodeLayoutTest, ReadsEveryOrderFreeReduction) {
  for (const auto op : {v1::REDUCE_OP_SUM, v1::REDUCE_OP_MIN, v1::REDUCE_OP_MAX}) {
    for (int dtype = v1::DATA_TYPE_INT8; dtype <= v1::DATA_TYPE_INT64; ++dtype) {
      v1::RegisterLayout message;
      message.set_name("m");
      message.set_op(op);
      message.add_explicit_buckets()->set_dtype(static_cast<v1::DataType>(dtype));
      const auto request = Layout(message);
      ASSERT_TRUE(request.ok()) << request.status();
      EXPECT_EQ(request->spec.op, static_cast<ReduceOp>(op));
      EXPECT_EQ(request->spec.explicit_buckets[0].first, static_cast<DataType>(dtype));
    }
  }
}

TEST(DecodeLayoutTest, BoundsTheDeadlineToAWeek) {
  v1::RegisterLayout message = GoodLayout();
  message.set_timeout_ms(kMax);
  EXPECT_EQ(Layout(message)->deadline_ns, kNowNs + kWeekMs * kNsPerMs);
}

TEST(DecodeLayoutTest, BoundsParametersToSixteenTebibytes) {
  v1::RegisterLayout message = GoodLayout();
  v1::Parameter* const parameter = message.mutable_parameters(0);
  message.mutable_parameters()->DeleteSubrange(1, 1);
  parameter->clear_shape();
  for (int i = 0; i < 42; ++i) {
    if (i % 2 == 0) parameter->add_shape(4);  // 2^42 float32 in 21 dimensions
  }
  EXPECT_TRUE(Layout(message).ok()) << Layout(message).status();
  parameter->add_shape(2);
  EXPECT_FALSE(Layout(message).ok());
}

TEST(DecodeLayoutTest, EmptyParameterMayHaveLargeExtents) {
  v1::RegisterLayout message = GoodLayout();
  message.mutable_parameters(0)->clear_shape();
  message.mutable_parameters(0)->add_shape(0);
  message.mutable_parameters(0)->add_shape(kMax);
  message.mutable_parameters(0)->add_shape(kMax);
  const auto request = Layout(message);
  ASSERT_TRUE(request.ok()) << request.status();
  const auto plan = PlanLayout(request->spec, 10);
  ASSERT_TRUE(plan.ok());
  EXPECT_EQ(plan->arena_bytes, 4096u);
}

struct LayoutFault {
  const char* name;
  void (*spoil)(v1::RegisterLayout*);
  absl::StatusCode code;
  const char* reason;
  std::vector<std::string> says;
};

class LayoutFaultTest : public testing::TestWithParam<LayoutFault> {};

TEST_P(LayoutFaultTest, IsRefusedByName) {
  v1::RegisterLayout message = GoodLayout();
  GetParam().spoil(&message);
  DecodeLimits limits;
  limits.parameters = 3;
  limits.buckets = 3;
  ExpectRefused(Layout(message, limits).status(), GetParam().code, GetParam().reason,
                GetParam().says);
}

void AddShape(v1::RegisterLayout* message, std::initializer_list<std::uint64_t> extents) {
  message->mutable_parameters(1)->clear_shape();
  for (const std::uint64_t extent : extents) message->mutable_parameters(1)->add_shape(extent);
}

const LayoutFault kLayoutFaults[] = {
    {"NoName", [](auto* m) { m->clear_name(); }, kInvalid, "MALFORMED", {"name", "0 bytes"}},
    {"LongName",
     [](auto* m) { m->set_name(std::string(129, 'm')); },
     kInvalid,
     "MALFORMED",
     {"name", "129 bytes"}},
    {"UnprintableName",
     [](auto* m) { m->set_name("a\x01"); },
     kInvalid,
     "MALFORMED",
     {"name", "printable"}},
    {"UnknownOperation",
     [](auto* m) { m->set_op(static_cast<v1::ReduceOp>(7)); },
     kInvalid,
     "MALFORMED",
     {"op 7"}},
    {"MinimumOfParameters",
     [](auto* m) { m->set_op(v1::REDUCE_OP_MIN); },
     kInvalid,
     "MALFORMED",
     {"parameter 'w', min of float32", "explicit_buckets"}},
    {"IntegerParameter",
     [](auto* m) { m->mutable_parameters(1)->set_dtype(v1::DATA_TYPE_INT32); },
     kInvalid,
     "MALFORMED",
     {"parameter 'b', sum of int32", "explicit_buckets"}},
    {"AverageOfIntegers",
     [](auto* m) {
       m->clear_parameters();
       m->clear_op();
       m->add_explicit_buckets()->set_dtype(v1::DATA_TYPE_INT64);
     },
     kInvalid,
     "MALFORMED",
     {"bucket 0, average of int64", "divide"}},
    {"IntegersOnAGpu",
     [](auto* m) {
       m->clear_parameters();
       m->set_device("GPU-0123");
       m->add_explicit_buckets()->set_dtype(v1::DATA_TYPE_INT16);
     },
     kInvalid,
     "MALFORMED",
     {"bucket 0, sum of int16", "not on a GPU"}},
    {"MaximumOnAGpu",
     [](auto* m) {
       m->clear_parameters();
       m->set_device("GPU-0123");
       m->set_op(v1::REDUCE_OP_MAX);
       m->add_explicit_buckets()->set_dtype(v1::DATA_TYPE_FLOAT32);
     },
     kInvalid,
     "MALFORMED",
     {"bucket 0, max of float32", "not on a GPU"}},
    {"Nothing",
     [](auto* m) { m->clear_parameters(); },
     kInvalid,
     "MALFORMED",
     {"parameters", "explicit_buckets"}},
    {"Both",
     [](auto* m) { m->add_explicit_buckets()->set_dtype(v1::DATA_TYPE_FLOAT32); },
     kInvalid,
     "MALFORMED",
     {"parameters", "explicit_buckets"}},
    {"TooManyParameters",
     [](auto* m) {
       for (int i = 0; i < 2; ++i) m->add_parameters();
     },
     kExhausted,
     "QUOTA",
     {"4 parameters", "3", "quota_parameters_per_layout"}},
    {"TooManyBuckets",
     [](auto* m) {
       m->clear_parameters();
       for (int i = 0; i < 4; ++i) m->add_explicit_buckets();
     },
     kExhausted,
     "QUOTA",
     {"4 buckets", "3", "quota_buckets_per_layout"}},
    {"NamelessParameter",
     [](auto* m) { m->mutable_parameters(1)->clear_name(); },
     kInvalid,
     "MALFORMED",
     {"parameter 1", "name", "512"}},
    {"LongParameterName",
     [](auto* m) { m->mutable_parameters(1)->set_name(std::string(513, 'p')); },
     kInvalid,
     "MALFORMED",
     {"parameter 1", "name", "513", "512"}},
    {"SameNameTwice",
     [](auto* m) { m->mutable_parameters(1)->set_name("w"); },
     kInvalid,
     "MALFORMED",
     {"parameter 'w'", "twice"}},
    {"TooManyDimensions",
     [](auto* m) {
       for (int i = 0; i < 32; ++i) m->mutable_parameters(1)->add_shape(1);
     },
     kInvalid,
     "MALFORMED",
     {"parameter 'b'", "33 dimensions"}},
    {"NoType",
     [](auto* m) { m->mutable_parameters(1)->clear_dtype(); },
     kInvalid,
     "MALFORMED",
     {"parameter 'b'", "dtype 0", "float32"}},
    {"UnknownType",
     [](auto* m) { m->mutable_parameters(1)->set_dtype(static_cast<v1::DataType>(42)); },
     kInvalid,
     "MALFORMED",
     {"parameter 'b'", "dtype 42"}},
    {"HugeExtent",
     [](auto* m) { AddShape(m, {kMax}); },
     kInvalid,
     "MALFORMED",
     {"parameter 'b'", "16 TiB"}},
    // Its product is 2^64, which wraps around to 0.
    {"ProductThatWrapsToZero",
     [](auto* m) {
       AddShape(m, {1ull << 32, 1ull << 32});
     },
     kInvalid,
     "MALFORMED",
     {"parameter 'b'", "16 TiB"}},
    // Its product is 2^64 + 2^33, which wraps around to 2^33.
    {"ProductThatWrapsToSomething",
     [](auto* m) {
       AddShape(m, {(1ull << 31) + 1, 1ull << 33});
     },
     kInvalid,
     "MALFORMED",
     {"parameter 'b'", "16 TiB"}},
    {"BytesThatAreTooManyWhereElementsAreNot",
     [](auto* m) {
       AddShape(m, {1ull << 44});
       m->mutable_parameters(1)->set_dtype(v1::DATA_TYPE_FLOAT64);
     },
     kInvalid,
     "MALFORMED",
     {"parameter 'b'", "16 TiB"}},
    {"SumThatIsTooLarge",
     [](auto* m) {
       AddShape(m, {1ull << 42});
       m->mutable_parameters(0)->clear_shape();
       m->mutable_parameters(0)->add_shape(1ull << 42);
     },
     kInvalid,
     "MALFORMED",
     {"16 TiB"}},
    {"UnknownBucketType",
     [](auto* m) {
       m->clear_parameters();
       m->add_explicit_buckets()->set_dtype(v1::DATA_TYPE_FLOAT32);
       m->add_explicit_buckets();
     },
     kInvalid,
     "MALFORMED",
     {"bucket 1", "dtype 0"}},
    {"HugeBucket",
     [](auto* m) {
       m->clear_parameters();
       m->add_explicit_buckets()->set_dtype(v1::DATA_TYPE_FLOAT32);
       m->mutable_explicit_buckets(0)->set_count(kMax);
     },
     kInvalid,
     "MALFORMED",
     {"bucket 0", "16 TiB"}},
};

INSTANTIATE_TEST_SUITE_P(RegisterLayout, LayoutFaultTest, testing::ValuesIn(kLayoutFaults),
                         [](const auto& info) { return std::string(info.param.name); });

// ---- Operations

TEST(DecodeOperationTest, BroadcastNeedsStagingMemoryForItsBytes) {
  const auto small = DecodeBroadcast(
      Parse<v1::Broadcast>("sequence: 4 root: 1 bytes: 1000 timeout_ms: 2"), kNowNs);
  ASSERT_TRUE(small.ok());
  EXPECT_EQ(small->sequence, 4u);
  EXPECT_EQ(small->spec.kind, OperationKind::kBroadcast);
  EXPECT_EQ(small->spec.root, 1u);
  EXPECT_EQ(small->spec.bytes, 1000u);
  EXPECT_TRUE(small->uses_staging);
  EXPECT_EQ(small->deadline_ns, kNowNs + 2 * kNsPerMs);
  const auto empty = DecodeBroadcast(Parse<v1::Broadcast>("sequence: 1"), kNowNs);
  ASSERT_TRUE(empty.ok());
  EXPECT_FALSE(empty->uses_staging);
  EXPECT_EQ(empty->deadline_ns, kNowNs + 1'800'000 * kNsPerMs);
}

TEST(DecodeOperationTest, BoundsBroadcasts) {
  v1::Broadcast message;
  message.set_bytes(1ull << 44);
  EXPECT_TRUE(DecodeBroadcast(message, kNowNs).ok());
  for (const std::uint64_t bytes : {std::uint64_t{(1ull << 44) + 1}, kMax}) {
    message.set_bytes(bytes);
    ExpectRefused(DecodeBroadcast(message, kNowNs).status(), kInvalid, "MALFORMED",
                  {"broadcast", "16 TiB"});
  }
}

TEST(DecodeLayoutTest, BuffersAreBytesInHostMemory) {
  v1::RegisterLayout message = GoodLayout();
  EXPECT_EQ(Layout(message)->spec.buffer_bytes, 0u);
  message.set_buffer_bytes(5);
  EXPECT_EQ(Layout(message)->spec.buffer_bytes, 5u);
  message.set_buffer_bytes(kMax);
  ExpectRefused(Layout(message).status(), kInvalid, "MALFORMED", {"buffer_bytes", "16 TiB"});
  message.set_buffer_bytes(5);
  message.set_device("GPU-1");
  ExpectRefused(Layout(message).status(), kInvalid, "MALFORMED", {"buffer_bytes", "host memory"});
}

TEST(DecodeStateTest, ReadsDigests) {
  v1::StateDigests message;
  std::vector<StateDigest> items;
  EXPECT_TRUE(DecodeStateDigests(message, &items).ok());
  EXPECT_TRUE(items.empty());
  v1::StateDigest* const item = message.add_items();
  item->set_name(std::string(1024, 'n'));
  item->set_sha256(std::string(32, '\xff'));
  ASSERT_TRUE(DecodeStateDigests(message, &items).ok());
  ASSERT_EQ(items.size(), 1u);
  EXPECT_EQ(items[0].name, item->name());
  EXPECT_EQ(items[0].sha256, item->sha256());
}

TEST(DecodeStateTest, RefusesDigestsOfAnotherForm) {
  for (const std::string& name : {std::string(), std::string(1025, 'n')}) {
    v1::StateDigests message;
    message.add_items()->set_name(name);
    message.mutable_items(0)->set_sha256(std::string(32, 'x'));
    std::vector<StateDigest> items;
    ExpectRefused(DecodeStateDigests(message, &items), kInvalid, "MALFORMED",
                  {"items[0]", "1 to 1024"});
  }
  for (const std::size_t bytes : {0, 31, 33}) {
    v1::StateDigests message;
    message.add_items()->set_name("w");
    message.mutable_items(0)->set_sha256(std::string(bytes, 'x'));
    std::vector<StateDigest> items;
    ExpectRefused(DecodeStateDigests(message, &items), kInvalid, "MALFORMED",
                  {"'w'", "32 expected"});
  }
}

TEST(DecodeStateTest, BoundsOffersAndTimeouts) {
  v1::StateOffer offer;
  for (const std::uint64_t bytes : {std::uint64_t{1}, std::uint64_t{1} << 44}) {
    offer.set_bytes(bytes);
    EXPECT_TRUE(CheckStateOffer(offer).ok());
  }
  for (const std::uint64_t bytes : {std::uint64_t{0}, (std::uint64_t{1} << 44) + 1, kMax}) {
    offer.set_bytes(bytes);
    ExpectRefused(CheckStateOffer(offer), kInvalid, "MALFORMED", {"StateOffer", "16 TiB"});
  }
  v1::FetchState fetch;
  EXPECT_EQ(DecodeStateTimeoutNs(fetch), 0u);  // no deadline
  fetch.set_timeout_ms(kMax);
  EXPECT_EQ(DecodeStateTimeoutNs(fetch), kWeekMs * kNsPerMs);
}

TEST(DecodeStateTest, PositionIsOptional) {
  v1::BucketReady ready;
  EXPECT_EQ(DecodePosition(ready), std::nullopt);
  ready.mutable_position();
  EXPECT_EQ(DecodePosition(ready), Position());
  v1::EndStep end;
  EXPECT_EQ(DecodePosition(end), std::nullopt);
  end.mutable_position()->set_epoch(3);
  end.mutable_position()->set_batch(4);
  EXPECT_EQ(DecodePosition(end), (Position{3, 4}));
}

TEST(DecodeOperationTest, BarrierNeedsNoMemory) {
  const auto barrier = DecodeBarrier(Parse<v1::Barrier>("sequence: 9 timeout_ms: 3"), kNowNs);
  ASSERT_TRUE(barrier.ok());
  EXPECT_EQ(barrier->sequence, 9u);
  EXPECT_EQ(barrier->spec.kind, OperationKind::kBarrier);
  EXPECT_FALSE(barrier->uses_staging);
  EXPECT_EQ(barrier->deadline_ns, kNowNs + 3 * kNsPerMs);
}

TEST(DecodeOperationTest, AllReduceMustFitTheStagingMemory) {
  v1::AllReduce message =
      Parse<v1::AllReduce>("sequence: 2 dtype: DATA_TYPE_FLOAT64 count: 128 op: REDUCE_OP_SUM");
  const auto request = DecodeAllReduce(message, kStaging, kNowNs);
  ASSERT_TRUE(request.ok()) << request.status();
  EXPECT_EQ(request->spec.kind, OperationKind::kAllReduce);
  EXPECT_EQ(request->spec.dtype, DataType::kFloat64);
  EXPECT_EQ(request->spec.count, 128u);
  EXPECT_EQ(request->spec.op, ReduceOp::kSum);
  EXPECT_TRUE(request->uses_staging);
  for (const std::uint64_t count : {std::uint64_t{129}, std::uint64_t{1} << 61, kMax}) {
    message.set_count(count);
    ExpectRefused(DecodeAllReduce(message, kStaging, kNowNs).status(), kInvalid, "MALFORMED",
                  {absl::StrCat(count, " float64"), "1024 bytes", "staging_bytes"});
  }
}

TEST(DecodeOperationTest, AllReduceOfUnknownTypeOrOperationIsRefused) {
  v1::AllReduce message = Parse<v1::AllReduce>("dtype: DATA_TYPE_FLOAT32 count: 1");
  EXPECT_EQ(DecodeAllReduce(message, kStaging, kNowNs)->spec.op, ReduceOp::kAverage);
  message.set_op(static_cast<v1::ReduceOp>(5));
  ExpectRefused(DecodeAllReduce(message, kStaging, kNowNs).status(), kInvalid, "MALFORMED",
                {"op 5"});
  message.set_op(v1::REDUCE_OP_AVERAGE);
  message.set_dtype(v1::DATA_TYPE_UINT8);
  ExpectRefused(DecodeAllReduce(message, kStaging, kNowNs).status(), kInvalid, "MALFORMED",
                {"all-reduce, average of uint8", "divide"});
  message.clear_op();
  message.set_dtype(static_cast<v1::DataType>(10));
  ExpectRefused(DecodeAllReduce(message, kStaging, kNowNs).status(), kInvalid, "MALFORMED",
                {"all-reduce", "dtype 10"});
}

}  // namespace
}  // namespace gradsync::daemon
