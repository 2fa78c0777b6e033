#include "tests/fault/trainer.h"

#include <sys/wait.h>
#include <unistd.h>

#include <cerrno>
#include <cstdio>
#include <cstdlib>
#include <sstream>
#include <utility>

#include "gtest/gtest.h"
#include "tests/kit/deadline.h"
#include "tests/kit/pipe.h"

namespace gradsync::fault {
namespace {

std::string JoinCommand(const std::string& socket, std::uint32_t rank, std::uint32_t world_size,
                        const std::string& job, const std::string& options) {
  std::ostringstream command;
  command << "join socket=" << socket << " rank=" << rank << " world=" << world_size
          << " job=" << job << " " << options;
  return command.str();
}

}  // namespace

std::string Reply::Field(const std::string& name) const {
  const auto found = fields.find(name);
  return found == fields.end() ? "" : found->second;
}

std::ostream& operator<<(std::ostream& out, const Reply& reply) {
  out << reply.code << " " << reply.reason << ": " << reply.message;
  for (const auto& [name, value] : reply.fields) out << " [" << name << "=" << value << "]";
  return out;
}

Trainer::Trainer(const TestDaemon& daemon, std::uint32_t rank, std::uint32_t world_size,
                 const std::string& job, const std::string& options)
    : Trainer(daemon.socket(), rank, world_size, job, options, daemon.command_prefix()) {}

Trainer::Trainer(const std::string& socket, std::uint32_t rank, std::uint32_t world_size,
                 const std::string& job, const std::string& options,
                 const std::vector<std::string>& command_prefix)
    : join_(JoinCommand(socket, rank, world_size, job, options)) {
  Pipe commands, answers, lifeline;
  ChildOptions child;
  child.arguments = command_prefix;
  child.arguments.emplace_back("tests/fault/scripted_trainer");
  child.input = commands.read.get();
  child.output = answers.write.get();
  child.passed = {lifeline.read.get()};
  process_ = std::make_unique<ChildProcess>(child);
  commands_ = std::move(commands.write);
  lifeline_ = std::move(lifeline.write);
  answers_ = std::make_unique<LineReader>(std::move(answers.read));
}

void Trainer::Send(const std::string& command) {
  const std::string line = command + "\n";
  if (write(commands_.get(), line.data(), line.size()) != static_cast<ssize_t>(line.size())) {
    ADD_FAILURE() << "the trainer does not take '" << command << "'";
  }
}

Reply Trainer::Receive() {
  Reply reply;
  const auto line = answers_->Next(kPatienceMs);
  if (!line.has_value()) return reply;
  std::istringstream parts(*line);
  for (std::string part; std::getline(parts, part, '\t');) {
    const std::size_t equals = part.find('=');
    if (equals == std::string::npos) continue;
    const std::string name = part.substr(0, equals);
    std::string value = part.substr(equals + 1);
    if (name == "code") {
      reply.code = std::move(value);
    } else if (name == "reason") {
      reply.reason = std::move(value);
    } else if (name == "message") {
      reply.message = std::move(value);
    } else if (name == "start_ns") {
      reply.start_ns = std::stoull(value);
    } else if (name == "end_ns") {
      reply.end_ns = std::stoull(value);
    } else {
      reply.fields[name] = std::move(value);
    }
  }
  return reply;
}

Reply Trainer::Do(const std::string& command) {
  Send(command);
  return Receive();
}

void Trainer::Begin(const std::string& command) {
  const Reply reply = Do("async " + command);
  EXPECT_TRUE(reply.ok()) << reply;
}

int Trainer::Quit() {
  commands_.Close();
  const auto status = process_->Wait(kPatienceMs);
  if (!status.has_value() || !WIFEXITED(*status)) return -1;
  return WEXITSTATUS(*status);
}

void JoinAll(const Trainers& trainers) {
  for (const auto& trainer : trainers) trainer->Send(trainer->join());
  for (const auto& trainer : trainers) {
    const Reply reply = trainer->Receive();
    EXPECT_TRUE(reply.ok()) << reply;
  }
}

Trainers JoinedTrainers(const TestDaemon& daemon, std::uint32_t world_size, const std::string& job,
                        const std::string& options) {
  Trainers trainers;
  for (std::uint32_t rank = 0; rank < world_size; ++rank) {
    trainers.push_back(std::make_unique<Trainer>(daemon, rank, world_size, job, options));
  }
  JoinAll(trainers);
  return trainers;
}

std::vector<Reply> DoAll(const Trainers& trainers, const std::string& command) {
  for (const auto& trainer : trainers) trainer->Send(command);
  std::vector<Reply> replies;
  replies.reserve(trainers.size());
  for (const auto& trainer : trainers) replies.push_back(trainer->Receive());
  return replies;
}

void ExpectAll(const Trainers& trainers, const std::string& command) {
  for (const Reply& reply : DoAll(trainers, command)) {
    EXPECT_TRUE(reply.ok()) << command << ": " << reply;
  }
}

}  // namespace gradsync::fault
