#include "daemon/rpc/status_mapping.h"

#include <gtest/gtest.h>

#include <string>

#include "daemon/base/error.h"
#include "google/rpc/error_details.pb.h"

namespace gradsync::daemon {
namespace {

absl::Status Lost() {
  return MakeError(absl::StatusCode::kAborted, reason::kRankLost, "rank 1 was lost",
                   {{field::kJob, "run"},
                    {field::kRank, "1"},
                    {field::kChannel, "2"},
                    {field::kStep, "7"},
                    {field::kBucket, ""}});
}

google::rpc::ErrorInfo InfoOf(const google::rpc::Status& status) {
  google::rpc::ErrorInfo info;
  EXPECT_EQ(status.details_size(), 1);
  if (status.details_size() == 1) {
    EXPECT_TRUE(status.details(0).UnpackTo(&info));
  }
  return info;
}

TEST(StatusMappingTest, KeepsCodeMessageReasonAndFields) {
  const google::rpc::Status status = ToProto(Lost());
  EXPECT_EQ(status.code(), 10);  // ABORTED
  EXPECT_EQ(status.message(), "rank 1 was lost");
  const google::rpc::ErrorInfo info = InfoOf(status);
  EXPECT_EQ(info.reason(), "RANK_LOST");
  EXPECT_EQ(info.domain(), "gradsync");
  EXPECT_EQ(info.metadata().at("job"), "run");
  EXPECT_EQ(info.metadata().at("rank"), "1");
  EXPECT_EQ(info.metadata().at("channel"), "2");
  EXPECT_EQ(info.metadata().at("step"), "7");
}

TEST(StatusMappingTest, OmitsEmptyFields) {
  EXPECT_EQ(InfoOf(ToProto(Lost())).metadata().count("bucket"), 0u);
  EXPECT_EQ(InfoOf(ToProto(Lost())).metadata_size(), 4);
}

TEST(StatusMappingTest, ErrorWithoutReasonHasNoDetails) {
  const google::rpc::Status status = ToProto(absl::NotFoundError("nothing"));
  EXPECT_EQ(status.code(), 5);
  EXPECT_EQ(status.message(), "nothing");
  EXPECT_EQ(status.details_size(), 0);
}

TEST(StatusMappingTest, GrpcStatusHasTheSameDetails) {
  const grpc::Status status = ToGrpc(Lost());
  EXPECT_EQ(status.error_code(), grpc::StatusCode::ABORTED);
  EXPECT_EQ(status.error_message(), "rank 1 was lost");
  google::rpc::Status details;
  ASSERT_TRUE(details.ParseFromString(status.error_details()));
  EXPECT_EQ(details.code(), 10);
  EXPECT_EQ(InfoOf(details).reason(), "RANK_LOST");
}

TEST(StatusMappingTest, KeepsEveryCode) {
  for (int code = 1; code <= 16; ++code) {
    const absl::Status status(static_cast<absl::StatusCode>(code), "");
    EXPECT_EQ(ToProto(status).code(), code);
    EXPECT_EQ(static_cast<int>(ToGrpc(status).error_code()), code);
  }
}

TEST(StatusMappingTest, OkHasNoMessageAndNoDetails) {
  EXPECT_TRUE(ToGrpc(absl::OkStatus()).ok());
  EXPECT_EQ(ToGrpc(absl::OkStatus()).error_details(), "");
  EXPECT_EQ(ToProto(absl::OkStatus()).code(), 0);
}

}  // namespace
}  // namespace gradsync::daemon
