#include "daemon/peer/peer_status.h"

#include <string>

#include "daemon/base/error.h"
#include "daemon/rpc/status_mapping.h"
#include "gtest/gtest.h"

namespace gradsync::daemon {
namespace {

TEST(PeerStatusTest, IsBounded) {
  const absl::Status error =
      MakeError(absl::StatusCode::kAborted, reason::kRankLost, "rank 1", {{field::kRank, "1"}});
  EXPECT_EQ(StatusFromPeer(ToProto(error)), error);
  google::rpc::Status endless = ToProto(error);
  endless.set_code(4711);
  endless.set_message(std::string(1 << 20, 'x'));
  endless.mutable_details(0)->set_value(std::string(1 << 20, 'x'));
  const absl::Status clipped = StatusFromPeer(endless);
  EXPECT_EQ(clipped.code(), absl::StatusCode::kUnknown);
  EXPECT_EQ(clipped.message().size(), 4096u);
  EXPECT_EQ(DetailsOf(clipped).reason, "");
}

// Trainers decode the error. Protocol Buffers refuses a part of a character.
TEST(PeerStatusTest, CutsNoCharacterInTwo) {
  google::rpc::Status proto;
  proto.set_code(10);
  proto.set_message(std::string(4095, 'x') + "\u00e4 and more");
  EXPECT_EQ(StatusFromPeer(proto).message(), std::string(4095, 'x'));
  proto.set_message(std::string(4094, 'x') + "\u00e4 and more");
  EXPECT_EQ(StatusFromPeer(proto).message(), std::string(4094, 'x') + "\u00e4");
}

// A stream's status may have any bytes, and so may the details of a message.
TEST(PeerStatusTest, IsUtf8) {
  google::rpc::Status proto =
      ToProto(MakeError(absl::StatusCode::kAborted, Reason("A"), "", {{field::kRank, "1"}}));
  proto.set_message("lost \xff");
  EXPECT_EQ(StatusFromPeer(proto).message(), "lost ?");
  EXPECT_EQ(DetailsOf(StatusFromPeer(proto)).reason, "A");
  std::string* const details = proto.mutable_details(0)->mutable_value();
  details->replace(details->find('A'), 1, "\xff");
  EXPECT_EQ(DetailsOf(StatusFromPeer(proto)).reason, "");
}

}  // namespace
}  // namespace gradsync::daemon
