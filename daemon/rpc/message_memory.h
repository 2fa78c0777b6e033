// The memory of a parsed message, which can be many times its size on the wire: an empty message in
// a list, or an empty group that is unknown, has 2 bytes there, and takes 50 or more here.

#ifndef DAEMON_RPC_MESSAGE_MEMORY_H_
#define DAEMON_RPC_MESSAGE_MEMORY_H_

#include <google/protobuf/message.h>

#include <algorithm>
#include <cstddef>

namespace gradsync::daemon {

// The most that malloc adds to an object: its header, and what it rounds up.
inline constexpr std::size_t kMallocBytes = 16;

// Estimates, in bytes, the memory of any message. Visits each of its parts by reflection, so it is
// not for messages of steps.
inline std::size_t MemoryOf(const google::protobuf::Message& message) {
  const std::size_t space = message.SpaceUsedLong();
  // It leaves out what malloc adds: half as much again for small objects, but little for a long
  // text. A text takes about its size on the wire: nothing is added for these bytes.
  return space + (space - std::min(space, message.ByteSizeLong())) / 2;
}

// Returns a copy without the fields that the daemon does not know, for messages that are kept.
// Protobuf does not free the list of the fields that it discards. A second copy leaves it out.
template <class Message>
Message WithoutUnknownFields(const Message& message) {
  Message cleared = message;
  cleared.DiscardUnknownFields();
  return Message(cleared);
}

// The memory of a list of messages, beside the field itself. They own nothing but plain numbers.
// Takes constant time.
template <class List>
std::size_t MemoryOfPlain(const List& list) {
  return static_cast<std::size_t>(list.Capacity()) * sizeof(void*) +
         static_cast<std::size_t>(list.size()) * (sizeof(typename List::value_type) + kMallocBytes);
}

}  // namespace gradsync::daemon

#endif  // DAEMON_RPC_MESSAGE_MEMORY_H_
