// How much memory a message will take, found before it is parsed.

#ifndef DAEMON_PEER_PARSED_BYTES_H_
#define DAEMON_PEER_PARSED_BYTES_H_

#include <google/protobuf/descriptor.h>
#include <google/protobuf/io/zero_copy_stream.h>

#include <cstddef>

namespace gradsync::daemon {

// A message may take some 50 times as much memory as it has bytes: two bytes can be an empty part,
// which is an object of its own. Reads the bytes of a message of this type, and adds up the
// objects, text and numbers that the parser would make: an estimate that is never too low. Stops
// when the sum exceeds `most`. False: it does, or the bytes are no message.
bool ParsesWithin(std::size_t most, const google::protobuf::Descriptor* type,
                  google::protobuf::io::ZeroCopyInputStream* bytes);

}  // namespace gradsync::daemon

#endif  // DAEMON_PEER_PARSED_BYTES_H_
