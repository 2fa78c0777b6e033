#include "tests/attack/remote_coordinators.h"

#include <fcntl.h>
#include <unistd.h>

#include <cerrno>
#include <cstdio>
#include <cstdlib>
#include <deque>

namespace gradsync::attack {
namespace {

using fault::FakeCoordinator;

[[noreturn]] void Coordinate(int count, const RemoteCoordinators::Script& script, int life,
                             int streams) {
  std::string addresses;
  std::deque<FakeCoordinator> coordinators;
  for (int i = 0; i < count; ++i) {
    coordinators.emplace_back([&](FakeCoordinator::Stream* stream) {
      stream->Write(FakeCoordinator::Welcome());
      // If the pipe is full, the attack has begun long ago.
      if (write(streams, ".", 1) == 1 || errno == EAGAIN) script(stream);
    });
    addresses += coordinators.back().address() + "\n";
  }
  fcntl(streams, F_SETFL, O_NONBLOCK);
  const auto size = static_cast<ssize_t>(addresses.size());
  char byte = 0;
  if (write(streams, addresses.data(), addresses.size()) == size) {
    while (read(life, &byte, 1) > 0) {
    }
  }
  _exit(0);  // the scripts may wait for the daemon
}

}  // namespace

RemoteCoordinators::RemoteCoordinators(int count, const RemoteCoordinators::Script& script) {
  const pid_t child = fork();
  if (child < 0) {
    std::perror("fork");
    std::abort();
  }
  if (child == 0) {
    life_.write.Close();
    Coordinate(count, script, life_.read.get(), streams_.write.get());
  }
  life_.read.Close();
  streams_.write.Close();
  std::string line;
  for (char byte = 0; static_cast<int>(addresses_.size()) < count;) {
    if (read(streams_.read.get(), &byte, 1) != 1) std::abort();
    if (byte != '\n') {
      line += byte;
      continue;
    }
    addresses_.push_back(line);
    line.clear();
  }
}

bool RemoteCoordinators::AwaitStream() {
  char byte = 0;
  return read(streams_.read.get(), &byte, 1) == 1;
}

}  // namespace gradsync::attack
