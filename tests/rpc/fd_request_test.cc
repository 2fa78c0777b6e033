#include "daemon/rpc/fd_request.h"

#include <cstring>
#include <string>
#include <vector>

#include "gtest/gtest.h"

namespace gradsync::daemon {
namespace {

std::string BytesOf(const FdRequest& request) {
  return std::string(reinterpret_cast<const char*>(&request), sizeof(request));
}

TEST(FdRequest, NonceIsRead) {
  FdRequest request;
  for (std::size_t i = 0; i < kNonceBytes; ++i)
    request.nonce[i] = static_cast<std::uint8_t>(250 + i);
  const auto nonce = DecodeFdRequest(BytesOf(request));
  ASSERT_TRUE(nonce.ok()) << nonce.status();
  EXPECT_EQ(*nonce, std::string(reinterpret_cast<const char*>(request.nonce), kNonceBytes));
}

TEST(FdRequest, OtherMessagesAreRefused) {
  FdRequest other_magic, other_abi;
  other_magic.magic = kFdMagic + 1;
  other_abi.abi = kSharedMemoryAbi + 1;
  const std::string good = BytesOf(FdRequest{});
  struct Case {
    const char* what;
    std::string message;
    absl::StatusCode code;
  };
  const std::vector<Case> cases = {
      {"nothing", "", absl::StatusCode::kInvalidArgument},
      {"a part", good.substr(1), absl::StatusCode::kInvalidArgument},
      {"too long", good + "x", absl::StatusCode::kInvalidArgument},
      {"another magic", BytesOf(other_magic), absl::StatusCode::kInvalidArgument},
      {"another ABI", BytesOf(other_abi), absl::StatusCode::kFailedPrecondition},
  };
  for (const Case& one : cases) {
    EXPECT_EQ(DecodeFdRequest(one.message).status().code(), one.code) << one.what;
  }
}

TEST(FdReply, TextIsCutAndEndsWithNul) {
  const FdReply good = EncodeFdReply(absl::OkStatus(), 2);
  EXPECT_EQ(good.magic, kFdMagic);
  EXPECT_EQ(good.status, 0u);
  EXPECT_EQ(good.fd_count, 2u);
  EXPECT_STREQ(good.message, "");
  const FdReply refusal = EncodeFdReply(absl::NotFoundError(std::string(1000, 'x')), 0);
  EXPECT_EQ(refusal.status, static_cast<std::uint32_t>(absl::StatusCode::kNotFound));
  EXPECT_EQ(refusal.fd_count, 0u);
  EXPECT_EQ(std::string(refusal.message), std::string(sizeof(refusal.message) - 1, 'x'));
}

}  // namespace
}  // namespace gradsync::daemon
