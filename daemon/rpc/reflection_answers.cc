#include "daemon/rpc/reflection_answers.h"

#include <google/protobuf/descriptor.h>
#include <google/protobuf/descriptor.pb.h>

#include <cstddef>
#include <set>

#include "absl/status/status.h"
#include "absl/strings/str_cat.h"

namespace gradsync::daemon {
namespace {

using google::protobuf::Descriptor;
using google::protobuf::DescriptorPool;
using google::protobuf::FieldDescriptor;
using google::protobuf::FileDescriptor;
using grpc::reflection::v1alpha::ExtensionNumberResponse;
using grpc::reflection::v1alpha::FileDescriptorResponse;
using grpc::reflection::v1alpha::ServerReflectionRequest;
using grpc::reflection::v1alpha::ServerReflectionResponse;

// The longest name, in bytes, that is looked up. The pool takes a time that grows with the square
// of the dots in a name, and holds a lock that all users share.
constexpr std::size_t kMaxNameBytes = 512;

// The name that is to be looked up. Empty: none is.
const std::string& NameIn(const ServerReflectionRequest& request) {
  switch (request.message_request_case()) {
    case ServerReflectionRequest::kFileByFilename:
      return request.file_by_filename();
    case ServerReflectionRequest::kFileContainingSymbol:
      return request.file_containing_symbol();
    case ServerReflectionRequest::kFileContainingExtension:
      return request.file_containing_extension().containing_type();
    case ServerReflectionRequest::kAllExtensionNumbersOfType:
      return request.all_extension_numbers_of_type();
    case ServerReflectionRequest::kListServices:
    case ServerReflectionRequest::MESSAGE_REQUEST_NOT_SET:
      break;
  }
  static const auto* const none = new std::string();
  return *none;
}

// Adds a file and all that it imports, each once.
void AddFile(const FileDescriptor& file, std::set<const FileDescriptor*>* added,
             FileDescriptorResponse* out) {
  if (!added->insert(&file).second) return;
  google::protobuf::FileDescriptorProto proto;
  file.CopyTo(&proto);
  out->add_file_descriptor_proto(proto.SerializeAsString());
  for (int i = 0; i < file.dependency_count(); ++i) AddFile(*file.dependency(i), added, out);
}

// False if there is no such file.
bool Answer(const FileDescriptor* file, ServerReflectionResponse* response) {
  if (file == nullptr) return false;
  std::set<const FileDescriptor*> added;
  AddFile(*file, &added, response->mutable_file_descriptor_response());
  return true;
}

// False if what is asked for is not there.
bool Answer(const ServerReflectionRequest& request, const std::vector<std::string>& services,
            ServerReflectionResponse* response) {
  const DescriptorPool& pool = *DescriptorPool::generated_pool();
  switch (request.message_request_case()) {
    case ServerReflectionRequest::kFileByFilename:
      return Answer(pool.FindFileByName(request.file_by_filename()), response);
    case ServerReflectionRequest::kFileContainingSymbol:
      return Answer(pool.FindFileContainingSymbol(request.file_containing_symbol()), response);
    case ServerReflectionRequest::kFileContainingExtension: {
      const auto& asked = request.file_containing_extension();
      const Descriptor* const type = pool.FindMessageTypeByName(asked.containing_type());
      if (type == nullptr) return false;
      const FieldDescriptor* const field =
          pool.FindExtensionByNumber(type, asked.extension_number());
      return field != nullptr && Answer(field->file(), response);
    }
    case ServerReflectionRequest::kAllExtensionNumbersOfType: {
      const std::string& name = request.all_extension_numbers_of_type();
      const Descriptor* const type = pool.FindMessageTypeByName(name);
      if (type == nullptr) return false;
      std::vector<const FieldDescriptor*> extensions;
      pool.FindAllExtensions(type, &extensions);
      ExtensionNumberResponse* const out = response->mutable_all_extension_numbers_response();
      out->set_base_type_name(name);
      for (const FieldDescriptor* field : extensions) out->add_extension_number(field->number());
      return true;
    }
    case ServerReflectionRequest::kListServices:
      for (const std::string& service : services) {
        response->mutable_list_services_response()->add_service()->set_name(service);
      }
      return true;
    case ServerReflectionRequest::MESSAGE_REQUEST_NOT_SET:
      break;
  }
  return false;
}

void SetError(absl::StatusCode code, const std::string& message,
              ServerReflectionResponse* response) {
  auto* const error = response->mutable_error_response();
  error->set_error_code(static_cast<int>(code));
  error->set_error_message(message);
}

}  // namespace

ServerReflectionResponse AnswerReflection(const ServerReflectionRequest& request,
                                          const std::vector<std::string>& services) {
  ServerReflectionResponse response;
  response.set_valid_host(request.host());
  *response.mutable_original_request() = request;
  if (const std::size_t bytes = NameIn(request).size(); bytes > kMaxNameBytes) {
    SetError(absl::StatusCode::kInvalidArgument,
             absl::StrCat("the name has ", bytes, " bytes; ", kMaxNameBytes, " allowed"),
             &response);
  } else if (!Answer(request, services, &response)) {
    SetError(absl::StatusCode::kNotFound, "the daemon has no such file, symbol or extension",
             &response);
  }
  return response;
}

}  // namespace gradsync::daemon
