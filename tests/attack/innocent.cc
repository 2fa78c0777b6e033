// A job that does nothing but its steps, and measures them: the neighbour of an attacker.
//
//   innocent --socket=PATH [--uid=N] [--job=NAME] [--ranks=N] [--buckets=N] [--count=N]
//            [--other_socket=PATH --coordinator=HOST:PORT]
//
// With --other_socket, the second half of the ranks is on another node, whose daemon has that
// socket.
//
// Prints READY when its layout is ready. Then each line of standard input is a number of steps: it
// runs them and prints "p50_us=N p99_us=N max_us=N wrong=N", or "error=TEXT" and ends. `count` is
// in float32 elements of a bucket. A step lasts from its first mark to its verdict. `wrong`:
// buckets with an element that is not the sum of the ranks' gradients.

#include <algorithm>
#include <csignal>
#include <cstdint>
#include <cstring>
#include <functional>
#include <iostream>
#include <memory>
#include <string>
#include <thread>
#include <vector>

#include "absl/status/status.h"
#include "gradsync/client.h"
#include "tests/kit/become_user.h"
#include "tests/kit/deadline.h"
#include "tests/kit/flags.h"

namespace gradsync::attack {
namespace {

struct Rank {
  std::unique_ptr<Session> session;
  std::unique_ptr<Layout> layout;
  absl::Status status;
  std::vector<std::uint64_t> step_ns;
  std::uint64_t wrong = 0;
};

float Written(std::uint32_t rank, std::uint64_t step, std::size_t bucket) {
  return static_cast<float>((rank + 1) * ((step + bucket) % 64 + 1));
}

// Whether every element has this value. The elements are compared with their neighbours: memcmp is
// as fast as the memory.
bool HasOnly(const BucketView& bucket, float value) {
  const auto* const data = static_cast<const float*>(bucket.data);
  return data[0] == value && std::memcmp(data, data + 1, (bucket.count - 1) * sizeof(float)) == 0;
}

void Join(const SessionOptions& options, const LayoutSpec& spec, Rank* rank) {
  auto session = Session::Join(options);
  rank->status = session.status();
  if (!session.ok()) return;
  rank->session = *std::move(session);
  auto layout = rank->session->RegisterLayout(spec);
  rank->status = layout.status();
  if (layout.ok()) rank->layout = *std::move(layout);
}

absl::Status Step(std::uint32_t ranks, std::uint32_t number, Rank* rank) {
  Layout& layout = *rank->layout;
  const std::uint64_t step = layout.next_step();
  for (std::size_t i = 0; i < layout.bucket_count(); ++i) {
    const BucketView bucket = layout.bucket(i);
    std::fill_n(static_cast<float*>(bucket.data), bucket.count, Written(number, step, i));
  }
  const std::uint64_t start_ns = NowNs();
  for (std::size_t i = 0; i < layout.bucket_count(); ++i) {
    if (absl::Status marked = layout.MarkReady(step, i); !marked.ok()) return marked;
  }
  if (absl::Status ended = layout.EndStep(step); !ended.ok()) return ended;
  const auto verdict = layout.WaitStep(step);
  if (!verdict.ok()) return verdict.status();
  rank->step_ns.push_back(NowNs() - start_ns);
  for (std::size_t i = 0; i < layout.bucket_count(); ++i) {
    float sum = 0;
    for (std::uint32_t other = 0; other < ranks; ++other) sum += Written(other, step, i);
    if (!HasOnly(layout.bucket(i), sum)) ++rank->wrong;
  }
  return absl::OkStatus();
}

absl::Status OnAll(std::vector<Rank>* ranks, const std::function<void(std::uint32_t)>& body) {
  std::vector<std::thread> threads;
  for (std::uint32_t i = 0; i < ranks->size(); ++i) threads.emplace_back([&, i] { body(i); });
  for (std::thread& thread : threads) thread.join();
  for (const Rank& rank : *ranks) {
    if (!rank.status.ok()) return rank.status;
  }
  return absl::OkStatus();
}

int Main(int argc, char** argv) {
  signal(SIGPIPE, SIG_IGN);
  auto flags =
      FlagsOf(argc, argv,
              {{"--job", "innocent"}, {"--ranks", "2"}, {"--buckets", "8"}, {"--count", "16384"}});
  const std::string& uid = flags["--uid"];
  if (!uid.empty() && !BecomeUser(static_cast<uid_t>(std::stoul(uid)))) return 1;
  const auto world_size = static_cast<std::uint32_t>(std::stoul(flags["--ranks"]));
  LayoutSpec spec;
  spec.op = ReduceOp::kSum;
  spec.explicit_buckets.assign(std::stoul(flags["--buckets"]),
                               {DataType::kFloat32, std::stoul(flags["--count"])});
  std::vector<Rank> ranks(world_size);
  const auto fail = [](const absl::Status& why) {
    std::cout << "error=" << why << std::endl;
    return 1;
  };
  const std::string coordinator = flags["--coordinator"];
  const absl::Status joined = OnAll(&ranks, [&](std::uint32_t i) {
    SessionOptions options;
    const bool elsewhere = flags.count("--other_socket") > 0 && i >= world_size / 2;
    options.socket = flags.at(elsewhere ? "--other_socket" : "--socket");
    options.coordinator = coordinator;
    options.job_id = flags["--job"];
    options.rank = i;
    options.world_size = world_size;
    Join(options, spec, &ranks[i]);
  });
  if (!joined.ok()) return fail(joined);
  std::cout << "READY" << std::endl;
  for (std::string line; std::getline(std::cin, line);) {
    const std::size_t steps = std::stoul(line);
    const absl::Status stepped = OnAll(&ranks, [&](std::uint32_t i) {
      ranks[i].step_ns.clear();
      for (std::size_t step = 0; step < steps && ranks[i].status.ok(); ++step) {
        ranks[i].status = Step(world_size, i, &ranks[i]);
      }
    });
    if (!stepped.ok()) return fail(stepped);
    std::vector<std::uint64_t>& times = ranks[0].step_ns;
    std::sort(times.begin(), times.end());
    std::uint64_t wrong = 0;
    for (const Rank& rank : ranks) wrong += rank.wrong;
    std::cout << "p50_us=" << times[times.size() / 2] / 1000
              << " p99_us=" << times[times.size() * 99 / 100] / 1000
              << " max_us=" << times.back() / 1000 << " wrong=" << wrong << std::endl;
  }
  for (const Rank& rank : ranks) rank.session->Leave().IgnoreError();
  return 0;
}

}  // namespace
}  // namespace gradsync::attack

int main(int argc, char** argv) { return gradsync::attack::Main(argc, argv); }
