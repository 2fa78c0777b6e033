#include "daemon/base/passed_descriptors.h"

#include <sys/socket.h>

// Since Linux 6.16. Debian 12's headers lack it.
#ifndef SO_PASSRIGHTS
#define SO_PASSRIGHTS 83
#endif

namespace gradsync::daemon {

bool RefuseDescriptors(int socket) {
  const int no = 0;
  return setsockopt(socket, SOL_SOCKET, SO_PASSRIGHTS, &no, sizeof(no)) == 0;
}

void CloseAtOnce(std::vector<UniqueFd> passed) {
  // A close() that lingers for zero seconds resets the connection, and does not wait. Without
  // SO_LINGER some sockets (SMC) would wait. Files that are no sockets refuse the option.
  const linger zero{1, 0};
  for (const UniqueFd& descriptor : passed) {
    setsockopt(descriptor.get(), SOL_SOCKET, SO_LINGER, &zero, sizeof(zero));
  }
  passed.clear();
}

}  // namespace gradsync::daemon
