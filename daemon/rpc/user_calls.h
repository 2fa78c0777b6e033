// The calls of one user's gRPC server: ends connections when too many are open.

#ifndef DAEMON_RPC_USER_CALLS_H_
#define DAEMON_RPC_USER_CALLS_H_

#include <atomic>
#include <cstdint>
#include <string>
#include <vector>

#include "absl/status/status.h"
#include "daemon/base/borrowed_socket.h"
#include "daemon/base/mutex.h"
#include "daemon/rpc/call_counts.h"
#include "daemon/rpc/call_limit.h"

namespace gradsync::daemon {

// Knows the connections of the server. Expect() is thread-safe, Watch() is called by one thread.
class UserCalls {
 public:
  // `user`: for log lines. `most`: open calls that the user may have.
  UserCalls(std::string user, std::uint64_t most);

  // gRPC gets a connection. Called right before AddInsecureChannelFromFd(). RESOURCE_EXHAUSTED:
  // there may be no new one, because the user's calls have to end first.
  absl::Status Expect(int descriptor);
  // Ends connections if there are too many calls. False: there is nothing to watch before the next
  // Expect().
  bool Watch(const CountedServer& server, std::uint64_t now_ns);

 private:
  struct Connection {
    // True if it has hardly a part in too many calls, as a trainer's.
    bool IsModest() const;

    CountedConnection counted;
    BorrowedSocket socket;
    CallCounts before = {};  // at the last look but one
    CallCounts now = {};     // at the last look
    bool ended = false;      // by us
  };

  // Looks at each connection. True: there are too many calls.
  bool EndTooMany(const CallCounts& counted);

  const std::string user_;
  std::atomic<bool> refuses_{false};
  Mutex mutex_;
  std::vector<Connection> expected_ ABSL_GUARDED_BY(mutex_);  // since the last Watch()
  // Used by Watch() alone.
  std::vector<Connection> connections_;
  CallLimit limit_;
  std::uint64_t looked_ns_ = 0;
  std::uint64_t exceeded_ns_ = 0;  // 0: never
};

}  // namespace gradsync::daemon

#endif  // DAEMON_RPC_USER_CALLS_H_
