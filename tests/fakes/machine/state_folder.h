// The fake machine: a folder in shared memory, one per test. The environment variable
// GRADSYNC_FAKE_CUDA names it. Every process that loads a fake uses it, and so does the test.
//
//   machine     MachineDescription
//   faults      rules of fault injection (fault_rules.h)
//   journal     events, one line each: pid, kind, text
//   board       Board, mapped by every process
//   calls.PID   a process's calls of each function (call_counts.h)
//   gpu0/       the memory of a GPU, one file per allocation (device_memory.h)
//   nccl.ID     a communicator's rendezvous
//
// Thread-safe; constant after construction.

#ifndef TESTS_FAKES_MACHINE_STATE_FOLDER_H_
#define TESTS_FAKES_MACHINE_STATE_FOLDER_H_

#include <memory>
#include <string>
#include <string_view>
#include <vector>

#include "tests/fakes/machine/board.h"
#include "tests/fakes/machine/machine_description.h"

namespace gradsync::fakes {

inline constexpr char kStateVariable[] = "GRADSYNC_FAKE_CUDA";

// Kinds of journal lines.
inline constexpr char kBlocked[] = "blocked";            // a call waits, perhaps for ever
inline constexpr char kViolation[] = "violation";        // undefined behaviour on a real machine
inline constexpr char kFault[] = "fault";                // an injected fault was met
inline constexpr char kCommunicator[] = "communicator";  // settings of a new NCCL communicator

struct JournalLine {
  int pid = 0;
  std::string kind;
  std::string text;
};

class StateFolder {
 public:
  // Makes the files of a new machine in an empty folder. nullptr if that fails.
  static std::unique_ptr<StateFolder> Create(const std::string& path,
                                             const MachineDescription& machine);
  // nullptr if there is no machine at `path`.
  static std::unique_ptr<StateFolder> Open(const std::string& path);
  // The folder that the environment names, never destroyed. nullptr if it names none.
  static const StateFolder* OfThisProcess();

  const MachineDescription& machine() const { return machine_; }
  Board& board() const { return *board_; }
  std::string PathOf(std::string_view name) const { return path_ + "/" + std::string(name); }

  // Appends a line and wakes waiting tests.
  void Note(const char* kind, const std::string& text) const;
  std::vector<JournalLine> Journal() const;
  std::string ReadFile(std::string_view name) const;                      // "" without such a file
  bool WriteFile(std::string_view name, std::string_view content) const;  // replaces atomically

  ~StateFolder();
  StateFolder(const StateFolder&) = delete;
  StateFolder& operator=(const StateFolder&) = delete;

 private:
  StateFolder(std::string path, MachineDescription machine, Board* board)
      : path_(std::move(path)), machine_(std::move(machine)), board_(board) {}

  const std::string path_;
  const MachineDescription machine_;
  Board* const board_;
};

}  // namespace gradsync::fakes

#endif  // TESTS_FAKES_MACHINE_STATE_FOLDER_H_
