// Makes the trainer's text valid for a proto3 string. Protobuf refuses other bytes and prints to
// stderr.

#ifndef CLIENT_SRC_UTF8_H_
#define CLIENT_SRC_UTF8_H_

#include <string>

#include "absl/strings/string_view.h"

namespace gradsync::client {

// `text` with '?' for every byte that is not part of valid UTF-8.
std::string ValidUtf8(absl::string_view text);

}  // namespace gradsync::client

#endif  // CLIENT_SRC_UTF8_H_
