// A node as a process of its own, for tests that kill it:
//   engine_node STORE NODE NODES ADDRESS SILENCE_MS BUCKET_BYTES
// Connects and prints "connected". "go" on standard input starts endless exchanges, two at a time.
// Prints "moving" when the first two have finished. When an exchange fails, or if an argument is
// wrong, prints
//   failed CODE REASON NODE NANOSECONDS MESSAGE
// Ends at the end of its standard input.

#include <cstdint>
#include <cstdio>
#include <iostream>
#include <memory>
#include <string>
#include <vector>

#include "absl/strings/numbers.h"
#include "absl/strings/str_cat.h"
#include "daemon/base/clock.h"
#include "daemon/base/error.h"
#include "daemon/engine/tcp_engine.h"
#include "tests/engine/directory_store.h"
#include "tests/engine/engine_bucket.h"

namespace gradsync::daemon {
namespace {

void Report(const absl::Status& status) {
  const ErrorDetails details = DetailsOf(status);
  std::string node = "-";
  for (const auto& [key, value] : details.fields) {
    if (key == "node") node = value;
  }
  std::printf("failed %s %s %s %llu %s\n", absl::StatusCodeToString(status.code()).c_str(),
              details.reason.empty() ? "-" : details.reason.c_str(), node.c_str(),
              static_cast<unsigned long long>(MonotonicNowNs()),
              std::string(status.message()).c_str());
  std::fflush(stdout);
}

void Say(const char* word) {
  std::puts(word);
  std::fflush(stdout);
}

absl::Status Run(char** arguments) {
  std::uint64_t numbers[5] = {};
  for (const int i : {2, 3, 5, 6}) {
    if (!absl::SimpleAtoi(arguments[i], &numbers[i - 2])) return absl::InvalidArgumentError("?");
  }
  DirectoryStore store(arguments[1]);
  TcpOptions options;
  options.node = static_cast<std::uint32_t>(numbers[0]);
  options.nodes = static_cast<std::uint32_t>(numbers[1]);
  for (std::uint32_t node = 0; node < options.nodes; ++node) {
    options.node_names.push_back(absl::StrCat("node-", node));
  }
  options.address = arguments[4];
  options.silence_limit = absl::Milliseconds(numbers[3]);
  options.chunk_bytes = 256 * 1024;
  options.store = &store;
  std::vector<std::unique_ptr<EngineBucket>> buckets;  // outlive the engine
  auto engine = TcpEngine::Connect(options);
  if (!engine.ok()) return engine.status();
  Say("connected");
  std::string line;
  std::getline(std::cin, line);
  if (line != "go") return absl::OkStatus();

  for (int b = 0; b < 2; ++b) {
    buckets.push_back(
        std::make_unique<EngineBucket>(DataType::kFloat32, numbers[4] / 4, options.node));
    (*engine)->Submit(buckets.back()->exchange());
  }
  for (std::size_t step = 0;; ++step) {
    EngineBucket& bucket = *buckets[step % 2];
    const auto status = bucket.Wait();
    if (!status.has_value()) return absl::InternalError("no done()");
    if (!status->ok()) return *status;
    if (step == 2) Say("moving");
    bucket.Reset();
    (*engine)->Submit(bucket.exchange());
  }
}

}  // namespace
}  // namespace gradsync::daemon

int main(int argc, char** argv) {
  if (argc != 7) return 2;
  gradsync::daemon::Report(gradsync::daemon::Run(argv));
  std::string line;
  while (std::getline(std::cin, line)) {
  }
  return 0;
}
