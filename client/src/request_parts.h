// Cuts requests that are longer than one message (kMaxRequestBytes) into parts.

#ifndef CLIENT_SRC_REQUEST_PARTS_H_
#define CLIENT_SRC_REQUEST_PARTS_H_

#include <vector>

namespace gradsync::v1 {
class SessionRequest;
}

namespace gradsync::client {

// `request` is a RegisterLayout. Returns it alone if it fits into one message. Otherwise returns
// LayoutParts with its parameters and buckets before it.
std::vector<v1::SessionRequest> LayoutMessages(v1::SessionRequest request);

// `request` is a StateDigests. Returns it as one or more StateDigests, all but the last with `more`
// set.
std::vector<v1::SessionRequest> DigestMessages(v1::SessionRequest request);

}  // namespace gradsync::client

#endif  // CLIENT_SRC_REQUEST_PARTS_H_
