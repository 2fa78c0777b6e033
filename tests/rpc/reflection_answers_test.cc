#include "daemon/rpc/reflection_answers.h"

#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include <string>
#include <vector>

#include "absl/status/status.h"

namespace gradsync::daemon {
namespace {

using grpc::reflection::v1alpha::ServerReflectionRequest;
using grpc::reflection::v1alpha::ServerReflectionResponse;
using testing::HasSubstr;

constexpr int kNotFound = static_cast<int>(absl::StatusCode::kNotFound);
constexpr int kInvalidArgument = static_cast<int>(absl::StatusCode::kInvalidArgument);
constexpr char kSymbol[] = "grpc.reflection.v1alpha.ServerReflectionRequest";

ServerReflectionResponse Ask(const ServerReflectionRequest& request) {
  return AnswerReflection(request, {"a.Service"});
}

// One request of each kind that has a name, for this name.
std::vector<ServerReflectionRequest> RequestsFor(const std::string& name) {
  std::vector<ServerReflectionRequest> requests(4);
  requests[0].set_file_by_filename(name);
  requests[1].set_file_containing_symbol(name);
  requests[2].mutable_file_containing_extension()->set_containing_type(name);
  requests[3].set_all_extension_numbers_of_type(name);
  return requests;
}

TEST(ReflectionAnswersTest, FindTheFileOfASymbol) {
  ServerReflectionRequest request;
  request.set_file_containing_symbol(kSymbol);
  const ServerReflectionResponse response = Ask(request);
  EXPECT_GE(response.file_descriptor_response().file_descriptor_proto_size(), 1);
  EXPECT_EQ(response.original_request().file_containing_symbol(), kSymbol);
}

TEST(ReflectionAnswersTest, SayThatANameIsUnknown) {
  for (const ServerReflectionRequest& request : RequestsFor(std::string(512, 'n'))) {
    EXPECT_EQ(Ask(request).error_response().error_code(), kNotFound) << request.DebugString();
  }
}

// The pool of descriptors would need seconds for a long name of dots.
TEST(ReflectionAnswersTest, RefuseALongName) {
  for (const ServerReflectionRequest& request : RequestsFor(std::string(513, '.'))) {
    const ServerReflectionResponse response = Ask(request);
    EXPECT_EQ(response.error_response().error_code(), kInvalidArgument) << request.DebugString();
    EXPECT_THAT(response.error_response().error_message(), HasSubstr("513 bytes; 512 allowed"));
  }
}

TEST(ReflectionAnswersTest, ListTheServicesWhateverTheValue) {
  ServerReflectionRequest request;
  request.set_list_services(std::string(513, '*'));
  const ServerReflectionResponse response = Ask(request);
  ASSERT_EQ(response.list_services_response().service_size(), 1);
  EXPECT_EQ(response.list_services_response().service(0).name(), "a.Service");
}

}  // namespace
}  // namespace gradsync::daemon
