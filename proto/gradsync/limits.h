// Numbers of the protocol that several programs must agree on, and defaults that several rooms of
// the daemon use. The client, the daemon and the tools share this file.

#ifndef PROTO_GRADSYNC_LIMITS_H_
#define PROTO_GRADSYNC_LIMITS_H_

#include <cstddef>
#include <cstdint>

namespace gradsync {

// Minor versions of protocol major 1 that this release speaks. If a version has a change that
// neither side may leave out, kProtocolOldest becomes that version.
inline constexpr std::uint32_t kProtocolOldest = 1;
inline constexpr std::uint32_t kProtocolNewest = 1;

// TCP port of a daemon for other nodes' daemons, wherever an address names none.
inline constexpr std::uint16_t kPeerPort = 7417;

// The largest message of a client, in bytes. Layouts and digests that are longer come in parts.
inline constexpr std::size_t kMaxRequestBytes = 64 << 10;
// The most parameters of a layout: EndStep.used_map, a bit for each, fits one message.
inline constexpr std::uint32_t kMaxParameters = 500'000;
inline constexpr std::size_t kMaxDimensions = 32;  // Parameter.shape
// The most buckets of a layout, unless quota_buckets_per_layout says otherwise.
inline constexpr std::uint32_t kDefaultMaxBuckets = 4096;

// Longest texts, in bytes.
inline constexpr std::size_t kMaxJobIdBytes = 128;
inline constexpr std::size_t kMaxTokenBytes = 4096;
inline constexpr std::size_t kMaxClientNameBytes = 128;  // OpenSession.client
inline constexpr std::size_t kMaxLayoutNameBytes = 128;
inline constexpr std::size_t kMaxParameterNameBytes = 512;
inline constexpr std::size_t kMaxReasonBytes = 1024;     // AbandonStep.reason
inline constexpr std::size_t kMaxCollectiveBytes = 256;  // BeginCollective.description
inline constexpr std::size_t kMaxDeviceBytes = 64;       // RegisterLayout.device
inline constexpr std::size_t kMaxNodeNameBytes = 64;     // Hello.node_name
inline constexpr std::size_t kMaxStateNameBytes = 1024;  // StateDigest.name
// The longest unique id of NCCL that daemons send each other. NCCL's own are shorter.
inline constexpr std::size_t kMaxNcclIdBytes = 1024;

// The root of a broadcast from the lowest rank that has not left.
inline constexpr std::uint32_t kRootIsLowestLive = 0xFFFFFFFF;
// The most steps of a timeline, GetTimelineRequest.steps.
inline constexpr std::uint32_t kMaxTimelineSteps = 64;

// The longest answer of Introspection that our tools take, in bytes: the most that the daemon sends
// with its default quota_control_bytes_per_user.
inline constexpr std::size_t kMaxAnswerBytes = 256 << 20;

}  // namespace gradsync

#endif  // PROTO_GRADSYNC_LIMITS_H_
