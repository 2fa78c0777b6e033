// Takes the place of Gloo's Address::fromPeerName. Gloo asks for a connection's peer on its own
// thread, for the text of an error. Its version throws if the peer has reset the connection, and an
// exception on that thread ends the process. So any process that can reach a listener of Gloo's,
// and a node that is killed while nodes connect, could end the daemon.
//
// The dynamic linker takes a symbol of the program before that of libgloo.so.

#include <arpa/inet.h>
#include <sys/socket.h>

#include "gloo/transport/tcp/address.h"

namespace gloo::transport::tcp {

// 0.0.0.0:0 if the peer has gone.
Address Address::fromPeerName(int fd) {
  sockaddr_storage name = {};
  socklen_t size = sizeof(name);
  if (getpeername(fd, reinterpret_cast<sockaddr*>(&name), &size) != 0) {
    name = {};
    name.ss_family = AF_INET;
  }
  return Address(name);
}

}  // namespace gloo::transport::tcp
