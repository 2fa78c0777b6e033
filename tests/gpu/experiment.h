// A question to a real machine: what the design builds on and no document promises. One small
// program for each, whose header comment says what is asked and how the answer is read.
//
// A program asks in its first process and plays the others by roles of itself. It prints facts as
// they come, and ends with one line of JSON and an exit status:
//
//   {"answer": "holds", "why": "", "facts": {...}}
//   0 holds, 1 does not hold, 77 not available here; anything else: it could not be asked.

#ifndef TESTS_GPU_EXPERIMENT_H_
#define TESTS_GPU_EXPERIMENT_H_

#include <functional>
#include <map>
#include <optional>
#include <string>

#include "nlohmann/json.hpp"
#include "tests/fault/child_process.h"

namespace gradsync::gpu {

// Anything that has not come after this will not come.
inline constexpr int kPatienceMs = 15'000;

struct Message {
  std::string text;
  fault::Descriptor descriptor;
};

// Messages between two processes, each with a descriptor or without.
class Line {
 public:
  explicit Line(fault::Descriptor socket) : socket_(std::move(socket)) {}
  void Send(const std::string& text, int descriptor = -1) const;
  // Nothing when the other side is gone or the time is over.
  std::optional<Message> Receive(int patience_ms = kPatienceMs) const;
  // What must come; without it the experiment cannot go on, and says so.
  Message Expect(const std::string& text) const;

 private:
  const fault::Descriptor socket_;
};

// A process that plays a role. Killed with the object.
class OtherProcess {
 public:
  explicit OtherProcess(const std::string& role);
  const Line& line() const { return *line_; }
  void Kill() { process_->Kill(); }

 private:
  std::optional<Line> line_;
  std::optional<fault::ChildProcess> process_;
};

struct Answer {
  enum class Kind { kHolds, kDoesNotHold, kNotAvailable };
  Kind kind = Kind::kHolds;
  std::string why;
};

// Prints it and keeps it for the end.
void Fact(const std::string& name, const nlohmann::json& value);

using Role = void (*)(const Line& first);
// A program's main.
int RunExperiment(int argc, char** argv, const std::map<std::string, Role>& roles, Answer (*ask)());

// Milliseconds on the monotonic clock.
double NowMs();
// True once `condition` holds; false after `patience_ms`.
bool Await(const std::function<bool()>& condition, int patience_ms = kPatienceMs);

}  // namespace gradsync::gpu

#endif  // TESTS_GPU_EXPERIMENT_H_
