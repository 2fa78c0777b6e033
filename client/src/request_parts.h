// Cuts requests that are longer than one message (kMaxRequestBytes) into parts.

#ifndef CLIENT_SRC_REQUEST_PARTS_H_
#define CLIENT_SRC_REQUEST_PARTS_H_

#include <vector>

namespace gradsync::v1 {
class SessionRequest;
}

namespace gradsync::client {

// `request` is a RegisterLayout. Returns it alone if it fits one message. Otherwise its parameters
// and buckets come in LayoutParts before it.
std::vector<v1::SessionRequest> LayoutMessages(v1::SessionRequest request);

// `request` is a StateDigests. Returns it as one or more, all but the last with `more`.
std::vector<v1::SessionRequest> DigestMessages(v1::SessionRequest request);

}  // namespace gradsync::client

#endif  // CLIENT_SRC_REQUEST_PARTS_H_
