// File descriptors that other processes pass over Unix sockets (SCM_RIGHTS). Closing one can take
// as long as its sender likes: a TCP socket with SO_LINGER waits for the other end of its
// connection, and a file of FUSE or NFS waits for its server.

#ifndef DAEMON_BASE_PASSED_DESCRIPTORS_H_
#define DAEMON_BASE_PASSED_DESCRIPTORS_H_

#include <vector>

#include "daemon/base/unique_fd.h"

namespace gradsync::daemon {

// Lets the kernel refuse the descriptors that others pass to this socket, or to a socket that is
// accepted from it: their message fails with EPERM. False before Linux 6.16: nothing is refused.
bool RefuseDescriptors(int socket);

// Closes descriptors that nobody expects. Does not block, whatever a socket's SO_LINGER. Two kinds
// of descriptors are exceptions. One is a Unix socket that holds unread descriptors: the kernel
// closes those with their own SO_LINGER. The other is a file whose file system asks a server at
// each close().
void CloseAtOnce(std::vector<UniqueFd> passed);

}  // namespace gradsync::daemon

#endif  // DAEMON_BASE_PASSED_DESCRIPTORS_H_
