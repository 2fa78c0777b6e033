#include "client/src/error.h"

#include "client/include/gradsync/client.h"
#include "google/rpc/error_details.pb.h"
#include "google/rpc/status.pb.h"
#include "gtest/gtest.h"

namespace gradsync::client {
namespace {

google::rpc::Status RankLost() {
  google::rpc::ErrorInfo info;
  info.set_reason("RANK_LOST");
  info.set_domain("gradsync");
  (*info.mutable_metadata())["rank"] = "2";
  (*info.mutable_metadata())["step"] = "7";
  google::rpc::Status status;
  status.set_code(10);
  status.set_message("rank 2 was lost");
  status.add_details()->PackFrom(info);
  return status;
}

void ExpectRankLost(const absl::Status& status) {
  EXPECT_EQ(status.code(), absl::StatusCode::kAborted);
  EXPECT_EQ(status.message(), "rank 2 was lost");
  EXPECT_EQ(ErrorReason(status), "RANK_LOST");
  EXPECT_EQ(ErrorField(status, field::kRank), "2");
  EXPECT_EQ(ErrorField(status, field::kStep), "7");
  EXPECT_EQ(ErrorField(status, field::kBucket), "");
}

TEST(ErrorTest, MakeErrorCarriesFields) {
  ErrorFields fields;
  fields.job = "j";
  fields.rank = 0;
  fields.bucket = 4;
  const absl::Status status = MakeError(absl::StatusCode::kInvalidArgument, reason::kUnknownBucket,
                                        "no such bucket", fields);
  EXPECT_EQ(status.code(), absl::StatusCode::kInvalidArgument);
  EXPECT_EQ(status.message(), "no such bucket");
  EXPECT_EQ(ErrorReason(status), "UNKNOWN_BUCKET");
  EXPECT_EQ(ErrorField(status, field::kJob), "j");
  EXPECT_EQ(ErrorField(status, field::kRank), "0");
  EXPECT_EQ(ErrorField(status, field::kBucket), "4");
  EXPECT_EQ(ErrorField(status, field::kStep), "");
  EXPECT_EQ(ErrorField(status, field::kChannel), "");
}

TEST(ErrorTest, MessageKeepsReasonAndFields) { ExpectRankLost(StatusFromProto(RankLost())); }

TEST(ErrorTest, TrailerKeepsReasonAndFields) {
  ExpectRankLost(StatusFromTrailer(10, "other words", RankLost().SerializeAsString()));
}

TEST(ErrorTest, TrailerWithoutDetailsKeepsCodeAndMessage) {
  const absl::Status status = StatusFromTrailer(14, "Socket closed", "");
  EXPECT_EQ(status, absl::UnavailableError("Socket closed"));
  EXPECT_EQ(ErrorReason(status), "");
}

TEST(ErrorTest, ContradictingDetailsAreDropped) {
  EXPECT_EQ(StatusFromTrailer(8, "too large", RankLost().SerializeAsString()).code(),
            absl::StatusCode::kResourceExhausted);
  EXPECT_EQ(ErrorReason(StatusFromTrailer(8, "too large", "\xff\xff garbage")), "");
}

TEST(ErrorTest, UnknownCodeIsUnknown) {
  google::rpc::Status proto = RankLost();
  proto.set_code(99);
  EXPECT_EQ(StatusFromProto(proto).code(), absl::StatusCode::kUnknown);
  proto.set_code(-1);
  EXPECT_EQ(StatusFromProto(proto).code(), absl::StatusCode::kUnknown);
}

TEST(ErrorTest, OtherStatusesHaveNoReason) {
  EXPECT_EQ(ErrorReason(absl::OkStatus()), "");
  EXPECT_EQ(ErrorReason(absl::AbortedError("x")), "");
  google::rpc::ErrorInfo foreign;
  foreign.set_reason("QUOTA");
  foreign.set_domain("example.com");
  absl::Status status = absl::AbortedError("x");
  status.SetPayload("type.googleapis.com/google.rpc.ErrorInfo",
                    absl::Cord(foreign.SerializeAsString()));
  EXPECT_EQ(ErrorReason(status), "");
  EXPECT_EQ(ErrorField(status, field::kRank), "");
}

}  // namespace
}  // namespace gradsync::client
