#include "tests/attack/neighbours.h"

#include <sys/stat.h>
#include <unistd.h>

#include <cstdio>
#include <cstdlib>
#include <utility>

#include "gtest/gtest.h"
#include "tests/kit/pipe.h"

namespace gradsync::attack {
namespace {

// A program that reads commands and answers with lines.
struct Program {
  explicit Program(std::vector<std::string> arguments) {
    Pipe in, out;
    ChildOptions options;
    options.arguments = std::move(arguments);
    options.input = in.read.get();
    options.output = out.write.get();
    process = std::make_unique<ChildProcess>(options);
    commands = std::move(in.write);
    answers = std::make_unique<LineReader>(std::move(out.read));
  }
  Descriptor commands;
  std::unique_ptr<LineReader> answers;
  std::unique_ptr<ChildProcess> process;
};

InnocentJob NeighboursJob(const TestDaemon& daemon, const std::string& name) {
  LetEveryoneIn(daemon);
  return InnocentJob(daemon, {"--job=" + name}, geteuid() == 0 ? kInnocent : geteuid());
}

void ExpectSteps(InnocentJob* job) {
  EXPECT_TRUE(job->ready());
  const StepTimes times = job->Run(/*steps=*/20);
  EXPECT_EQ(times.error, "") << "the neighbour's job";
  EXPECT_EQ(times.wrong, 0u) << "the neighbour's job";
}

}  // namespace

void LetEveryoneIn(const TestDaemon& daemon) {
  EXPECT_EQ(chmod(daemon.directory().path().c_str(), 0755), 0);
  for (const std::string& socket : {daemon.socket(), daemon.side_socket()}) {
    EXPECT_EQ(chmod(socket.c_str(), 0666), 0);
  }
}

std::unique_ptr<TestDaemon> AnotherDaemonToAttack(const std::vector<std::string>& flags) {
  if (std::getenv("ATTACK_ANOTHER_DAEMON") == nullptr) return nullptr;
  auto daemon = std::make_unique<TestDaemon>(flags);
  LetEveryoneIn(*daemon);
  return daemon;
}

Attacker::Attacker(const TestDaemon& daemon, const std::string& attack, uid_t user,
                   const std::string& peer, const std::string& other_socket,
                   const std::vector<std::string>& command_prefix) {
  std::vector<std::string> arguments = command_prefix;
  arguments.insert(
      arguments.end(),
      {"tests/attack/attacker", "--attack=" + attack, "--socket=" + daemon.socket(),
       "--uid=" + std::to_string(user), "--peer=" + peer, "--other_socket=" + other_socket,
       "--victim_user=" + std::to_string(kInnocent), "--victim_job=another", "--victim_ranks=2"});
  Program program(std::move(arguments));
  ready_ = program.answers->Next(kPatienceMs) == "READY";
  lifeline_ = std::move(program.commands);
  process_ = std::move(program.process);
}

std::string Ask(const TestDaemon& daemon, uid_t user, std::uint64_t patience_ns) {
  const std::uint64_t patience_ms = patience_ns / 1'000'000;
  std::vector<std::string> arguments = {"tests/attack/asker", "--socket=" + daemon.socket(),
                                        "--patience_ms=" + std::to_string(patience_ms)};
  if (user != geteuid()) arguments.push_back("--uid=" + std::to_string(user));
  const Program program(std::move(arguments));
  // It asks ten times, and ends when one time takes too long.
  return program.answers->Next(kPatienceMs + 10 * static_cast<int>(patience_ms))
      .value_or("no answer");
}

InnocentJob::InnocentJob(const TestDaemon& daemon, const std::vector<std::string>& options,
                         uid_t user) {
  std::vector<std::string> arguments = {"tests/attack/innocent", "--socket=" + daemon.socket()};
  if (user != geteuid()) arguments.push_back("--uid=" + std::to_string(user));
  arguments.insert(arguments.end(), options.begin(), options.end());
  Program program(std::move(arguments));
  commands_ = std::move(program.commands);
  answers_ = std::move(program.answers);
  process_ = std::move(program.process);
  ready_ = answers_->Next(kPatienceMs) == "READY";
}

StepTimes InnocentJob::Run(int steps) {
  StepTimes times;
  const std::string line = std::to_string(steps) + "\n";
  if (write(commands_.get(), line.data(), line.size()) != static_cast<ssize_t>(line.size())) {
    times.error = "the job has ended";
    return times;
  }
  const auto answer = answers_->Next(kPatienceMs);
  times.error = answer.value_or("no answer");
  if (!answer.has_value()) return times;
  unsigned long p50 = 0, p99 = 0, max = 0, wrong = 0;
  if (std::sscanf(answer->c_str(), "p50_us=%lu p99_us=%lu max_us=%lu wrong=%lu", &p50, &p99, &max,
                  &wrong) == 4) {
    times = {p50, p99, max, wrong, ""};
  }
  return times;
}

Neighbour::Neighbour(const TestDaemon& daemon)
    : daemon_(daemon), job_(NeighboursJob(daemon, "neighbour")) {
  ExpectSteps(&job_);
}

void Neighbour::ExpectUnharmed() {
  ExpectSteps(&job_);
  InnocentJob another = NeighboursJob(daemon_, "another");
  ExpectSteps(&another);
}

std::ostream& operator<<(std::ostream& out, const StepTimes& times) {
  if (!times.error.empty()) return out << times.error;
  return out << "p50 " << times.p50_us << " us, p99 " << times.p99_us << " us, longest "
             << times.max_us << " us, wrong sums " << times.wrong;
}

}  // namespace gradsync::attack
