// An experiment on a real machine tests an assumption of gradsync that no document confirms. Each
// experiment is a small program. The comment at its top states the question and what each answer
// means.
//
// The first process of the program finds the answer. It starts the program again for each role that
// it needs. It prints facts as it finds them, and ends with one line of JSON and an exit status:
//
//   {"answer": "holds", "why": "", "facts": {...}}
//   0: holds. 1: does not hold. 77: not available on this machine. Else: the experiment failed.

#ifndef TESTS_GPU_EXPERIMENT_H_
#define TESTS_GPU_EXPERIMENT_H_

#include <functional>
#include <map>
#include <optional>
#include <string>

#include "nlohmann/json.hpp"
#include "tests/kit/child_process.h"

namespace gradsync::gpu {

// The longest time that an experiment waits for anything.
inline constexpr int kPatienceMs = 15'000;

struct Message {
  std::string text;
  Descriptor descriptor;
};

// Carries messages between two processes. A message may have a descriptor.
class Line {
 public:
  explicit Line(Descriptor socket) : socket_(std::move(socket)) {}
  void Send(const std::string& text, int descriptor = -1) const;
  // Nullopt if the other side has ended, or if no message arrives within `patience_ms`.
  std::optional<Message> Receive(int patience_ms = kPatienceMs) const;
  // Receives the message `text`. If anything else or nothing arrives, prints that and exits with
  // status 2.
  Message Expect(const std::string& text) const;

 private:
  const Descriptor socket_;
};

// A process that plays a role. The destructor kills it.
class OtherProcess {
 public:
  explicit OtherProcess(const std::string& role);
  const Line& line() const { return *line_; }
  void Kill() { process_->Kill(); }

 private:
  std::optional<Line> line_;
  std::optional<ChildProcess> process_;
};

struct Answer {
  enum class Kind { kHolds, kDoesNotHold, kNotAvailable };
  Kind kind = Kind::kHolds;
  std::string why;
};

// Prints a fact, and keeps it for the line of JSON.
void Fact(const std::string& name, const nlohmann::json& value);

using Role = void (*)(const Line& first);
// The main function of an experiment. `ask` runs in the first process.
int RunExperiment(int argc, char** argv, const std::map<std::string, Role>& roles, Answer (*ask)());

// Milliseconds on the monotonic clock.
double NowMs();
// True once `condition` holds; false after `patience_ms`.
bool Await(const std::function<bool()>& condition, int patience_ms = kPatienceMs);

}  // namespace gradsync::gpu

#endif  // TESTS_GPU_EXPERIMENT_H_
