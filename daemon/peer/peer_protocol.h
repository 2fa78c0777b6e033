// The rules that both sides of a stream between two daemons follow.

#ifndef DAEMON_PEER_PEER_PROTOCOL_H_
#define DAEMON_PEER_PEER_PROTOCOL_H_

#include <cstddef>
#include <cstdint>

#include "daemon/rpc/message_stream.h"
#include "daemon/rpc/vain_bytes.h"
#include "proto/gradsync/limits.h"

namespace gradsync::daemon {

// Both sides speak this version, and no other yet.
inline constexpr std::uint32_t kPeerProtocol = 1;

inline constexpr std::size_t kInstanceBytes = 16;  // of Hello.instance

// The most ranks that one node may have in one job. 8 GPUs per node are common.
inline constexpr std::size_t kMaxRanksPerNode = 1024;

// The largest message of an agent: a trainer's message with its envelope, or a value of the
// rendezvous.
inline constexpr int kMaxAgentMessageBytes = kMaxRequestBytes + (64 << 10);
// The largest message of a coordinator: the plan or the times of a large layout. A message that is
// passed on to a trainer may also take at most this much memory once it is parsed.
inline constexpr int kMaxCoordinatorMessageBytes = 16 << 20;

// The most that is read from a connection at a time: some 2,300 calls of the shortest kind.
inline constexpr int kPeerReadBytes = 64 << 10;

// A peer that leaves more than this unread is disconnected. The largest layouts of several ranks
// fit.
inline constexpr UnreadLimits kPeerUnread{1 << 16, std::size_t{128} << 20};
// Up to this many unread bytes are not charged to the job's user. A peer that reads leaves fewer.
inline constexpr std::size_t kFreeUnreadBytes = 256 << 10;

// The most that gRPC may read of a peer in vain. An honest peer causes less: at most 16 MiB, which
// gRPC reads ahead while a message waits for its turn. Mostly it is far less.
inline constexpr VainBytes::Most kPeerVain = {32 << 20, 128 << 20, 1 << 20};

}  // namespace gradsync::daemon

#endif  // DAEMON_PEER_PEER_PROTOCOL_H_
