#include "tests/kit/flood.h"

#include <poll.h>

#include <deque>
#include <utility>

#include "tests/kit/child_process.h"
#include "tests/kit/connect.h"

namespace gradsync {

Flood::Flood(std::string to) : to_(std::move(to)), thread_([this] { Run(); }) {}

Flood::~Flood() {
  stop_ = true;
  thread_.join();
}

void Flood::Run() {
  std::deque<Descriptor> connections;
  while (!stop_) {
    if (connections.size() < kConnections) {
      Descriptor one = ConnectTcp(to_, kAddress);
      if (one.get() < 0) return;
      connections.push_back(std::move(one));
      ++made_;
      continue;
    }
    // The oldest one is closed first. It looks at `stop_` in between.
    pollfd oldest = {connections.front().get(), POLLIN, 0};
    if (poll(&oldest, 1, /*timeout=*/10) > 0) connections.pop_front();
  }
}

}  // namespace gradsync
