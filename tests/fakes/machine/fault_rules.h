// Injected faults. A rule is one line:
//
//   FUNCTION CALL ACTION [CODE] [pid=PID]
//
// FUNCTION  the exported name, e.g. cuMemCreate or cuStreamWaitValue64_v2
// CALL      3            the process's third call after it has read the rule
//           3+           that call and all later ones
// ACTION    error CODE   the call does nothing and returns CODE (a CUresult or ncclResult_t)
//           sticky CODE  CUDA: as error; every later call of the process returns CODE too
//           async CODE   NCCL: the call is made; the communicator's asynchronous error is CODE
//           hang         the call does not return while the rule exists
//           kill         the process gets SIGKILL before the call does anything
//           stop         the process gets SIGSTOP, and makes the call after SIGCONT
//
// Rules come from the environment variable GRADSYNC_FAKE_CUDA_FAULTS (separated by ';') and from
// the file `faults` of the state folder, which may change at any time. Each rule met is noted in
// the journal. Thread-safe.

#ifndef TESTS_FAKES_MACHINE_FAULT_RULES_H_
#define TESTS_FAKES_MACHINE_FAULT_RULES_H_

#include <cstdint>
#include <string>
#include <vector>

#include "daemon/base/mutex.h"
#include "tests/fakes/machine/state_folder.h"

namespace gradsync::fakes {

inline constexpr char kFaultsVariable[] = "GRADSYNC_FAKE_CUDA_FAULTS";

struct Fault {
  enum class Kind { kNone, kError, kSticky, kAsync };
  Kind kind = Kind::kNone;
  int code = 0;
};

class FaultRules {
 public:
  explicit FaultRules(const StateFolder& folder);

  // Every call of a fake calls this first. It does the actions hang, kill and stop itself.
  Fault Meet(const char* function);

 private:
  struct Rule {
    std::string line;
    std::string function;
    std::uint64_t first = 0;
    bool open_ended = false;
    std::string action;
    int code = 0;
    std::uint64_t calls = 0;  // so far
  };
  // A malformed rule matches nothing. Nor does a rule for another process.
  static Rule Parse(const std::string& line);
  void ReloadLocked() ABSL_EXCLUSIVE_LOCKS_REQUIRED(mutex_);
  bool Stands(const std::string& line) const;

  const StateFolder& folder_;
  daemon::Mutex mutex_;
  std::uint32_t generation_ ABSL_GUARDED_BY(mutex_) = 0;
  std::vector<Rule> from_environment_ ABSL_GUARDED_BY(mutex_);
  std::vector<Rule> from_file_ ABSL_GUARDED_BY(mutex_);
};

}  // namespace gradsync::fakes

#endif  // TESTS_FAKES_MACHINE_FAULT_RULES_H_
