#include "daemon/engine/caller.h"

#include <unistd.h>

#include "daemon/engine/local_address.h"
#include "daemon/engine/socket_owner.h"

namespace gradsync::daemon {

CallerPlace CallerPlaceOf(int connection, const sockaddr_storage& peer) {
  CallerPlace place;
  place.local = IsOwnAddress(peer);
  sockaddr_storage own{};
  socklen_t size = sizeof(own);
  if (place.local && CanFindOwners() &&
      getsockname(connection, reinterpret_cast<sockaddr*>(&own), &size) == 0) {
    place.user = OwnerOf(TcpEnd::Of(peer), TcpEnd::Of(own));
  }
  return place;
}

CallerKey CallerKeyOf(const std::array<std::uint8_t, 16>& ip, const CallerPlace& place) {
  if (!place.local) return {ip, std::nullopt};
  const bool may_be_daemon = place.user == 0u || place.user == geteuid();
  return {may_be_daemon ? ip : std::array<std::uint8_t, 16>{}, place.user};
}

}  // namespace gradsync::daemon
