// One node of an engine that all-reduces buckets; engine_bench.sh runs two of them on a slow
// network. Prints one line: the times, and how busy the interface was.

#include <unistd.h>

#include <algorithm>
#include <cstdint>
#include <cstdio>
#include <cstdlib>
#include <cstring>
#include <fstream>
#include <iostream>
#include <iterator>
#include <map>
#include <memory>
#include <string>
#include <vector>

#include "absl/strings/numbers.h"
#include "absl/strings/str_split.h"
#include "absl/strings/strip.h"
#include "daemon/base/clock.h"
#include "daemon/engine/local_address.h"
#include "daemon/engine/tcp_engine.h"
#include "daemon/worker/engine_process.h"
#include "tests/engine/directory_store.h"
#include "tests/engine/event.h"

namespace gradsync::daemon {
namespace {

constexpr char kUsage[] =
    "Usage: engine_bench --store=DIR --node=N --interface=NAME [--nodes=2] [--lanes=2]\n"
    "  [--chunk=BYTES] [--wire=same|bfloat16|float16] [--bytes=BYTES] [--buckets=N] [--warmup=N]\n"
    "  [--pending=N] [--ranks=2] [--rate=BITS_PER_SECOND] [--process=GRADSYNCD] [--keys=DIR]\n"
    "float32 buckets of --bytes of --ranks local ranks, --pending of them at a time. Utilisation "
    "is bytes sent on\n"
    "--interface, headers and acknowledgements included, against --rate.\n"
    "--process: the engine is a process, as in the daemon. --keys: TLS, with the files of "
    "deploy/peer-keys.\n";

// The number of bytes that `interface` has sent.
std::uint64_t BytesSent(const std::string& interface) {
  std::ifstream file("/proc/net/dev");
  std::string line;
  while (std::getline(file, line)) {
    const std::vector<std::string> halves = absl::StrSplit(line, ':');
    if (halves.size() != 2 || absl::StripAsciiWhitespace(halves[0]) != interface) continue;
    const std::vector<std::string> words = absl::StrSplit(halves[1], ' ', absl::SkipEmpty());
    std::uint64_t bytes = 0;
    if (words.size() > 8 && absl::SimpleAtoi(words[8], &bytes)) return bytes;
  }
  return 0;
}

class Options {
 public:
  Options(int argc, char** argv) {
    for (int i = 1; i < argc; ++i) {
      const std::pair<std::string, std::string> option =
          absl::StrSplit(argv[i], absl::MaxSplits('=', 1));
      values_[option.first] = option.second;
    }
  }
  std::string Text(const std::string& name, const std::string& otherwise = "") const {
    const auto found = values_.find("--" + name);
    return found == values_.end() ? otherwise : found->second;
  }
  std::uint64_t Number(const std::string& name, std::uint64_t otherwise) const {
    std::uint64_t value = 0;
    return absl::SimpleAtoi(Text(name), &value) ? value : otherwise;
  }

 private:
  std::map<std::string, std::string> values_;
};

struct Bucket {
  std::vector<std::vector<float>> ranks;  // the local ranks' arenas
  Exchange exchange;
  std::unique_ptr<Event> done = std::make_unique<Event>();
};

std::string Contents(const std::string& path) {
  std::ifstream file(path);
  return {std::istreambuf_iterator<char>(file), std::istreambuf_iterator<char>()};
}

std::shared_ptr<const PeerTlsKeys> KeysIn(const std::string& folder) {
  if (folder.empty()) return nullptr;
  return std::make_shared<const PeerTlsKeys>(PeerTlsKeys{Contents(folder + "/peer.crt"),
                                                         Contents(folder + "/peer.key"),
                                                         Contents(folder + "/ca.crt")});
}

// In a process of its own if `program` is not empty.
absl::StatusOr<std::unique_ptr<Engine>> MakeEngine(TcpOptions settings,
                                                   const std::string& program) {
  if (program.empty()) {
    auto engine = TcpEngine::Connect(settings);
    if (!engine.ok()) return engine.status();
    return *std::move(engine);
  }
  const auto address = LocalAddress("", settings.interface);
  if (!address.ok()) return address.status();
  settings.address = *address;
  for (std::uint32_t node = 0; node < settings.nodes; ++node) {
    settings.node_names.push_back(std::to_string(node));
  }
  WorkerProcessOptions process;
  process.program = program;
  auto engine = EngineProcess::Connect(settings, process);
  if (!engine.ok()) return engine.status();
  return *std::move(engine);
}

double Median(std::vector<double> values) {
  std::sort(values.begin(), values.end());
  return values[values.size() / 2];
}

int Run(const Options& options) {
  DirectoryStore store(options.Text("store"));
  TcpOptions settings;
  settings.node = static_cast<std::uint32_t>(options.Number("node", 0));
  settings.nodes = static_cast<std::uint32_t>(options.Number("nodes", 2));
  settings.interface = options.Text("interface");
  settings.lanes =
      static_cast<int>(options.Number("lanes", static_cast<std::uint64_t>(settings.lanes)));
  settings.chunk_bytes = options.Number("chunk", settings.chunk_bytes);
  settings.wire = options.Text("wire") == "bfloat16"  ? WireType::kBfloat16
                  : options.Text("wire") == "float16" ? WireType::kFloat16
                                                      : WireType::kSame;
  settings.store = &store;
  settings.keys = KeysIn(options.Text("keys"));
  absl::StatusOr<std::unique_ptr<Engine>> engine = MakeEngine(settings, options.Text("process"));
  if (!engine.ok()) {
    std::cerr << engine.status() << "\n";
    return 1;
  }

  const std::size_t count = options.Number("bytes", 25 << 20) / sizeof(float);
  std::vector<std::unique_ptr<Bucket>> buckets;
  for (std::uint64_t b = 0; b < options.Number("pending", 1); ++b) {
    buckets.push_back(std::make_unique<Bucket>());
    Bucket* const bucket = buckets.back().get();
    bucket->ranks.assign(options.Number("ranks", 2), std::vector<float>(count, 1.0F));
    bucket->exchange.dtype = DataType::kFloat32;
    bucket->exchange.count = count;
    bucket->exchange.gather = [bucket](std::size_t first, std::size_t n, std::byte* sum) {
      auto* const sums = reinterpret_cast<float*>(sum);
      std::memcpy(sum, bucket->ranks[0].data() + first, n * sizeof(float));
      for (std::size_t rank = 1; rank < bucket->ranks.size(); ++rank) {
        const float* const addends = bucket->ranks[rank].data() + first;
        for (std::size_t i = 0; i < n; ++i) sums[i] += addends[i];
      }
    };
    bucket->exchange.scatter = [bucket](std::size_t first, std::size_t n, const std::byte* sum) {
      for (auto& rank : bucket->ranks) {
        std::memcpy(rank.data() + first, sum, n * sizeof(float));
      }
    };
    bucket->exchange.done = [bucket](const absl::Status& status) { bucket->done->Set(status); };
  }

  const std::uint64_t warmup = options.Number("warmup", 4);
  const std::uint64_t rounds = options.Number("buckets", 12) / buckets.size();
  std::uint64_t start_ns = 0, start_bytes = 0;
  clock_t start_cpu = 0;
  std::vector<double> ms;
  for (std::uint64_t round = 0; round < warmup + rounds; ++round) {
    if (round == warmup) {
      start_ns = MonotonicNowNs();
      start_bytes = BytesSent(settings.interface);
      start_cpu = std::clock();
    }
    const std::uint64_t round_ns = MonotonicNowNs();
    for (auto& bucket : buckets) {
      bucket->done = std::make_unique<Event>();
      (*engine)->Submit(&bucket->exchange);
    }
    for (auto& bucket : buckets) {
      const auto status = bucket->done->Wait();
      if (!status.has_value() || !status->ok()) {
        std::cerr << (status.has_value() ? status->ToString() : "no end") << "\n";
        return 1;
      }
    }
    if (round >= warmup) ms.push_back(static_cast<double>(MonotonicNowNs() - round_ns) * 1e-6);
  }
  const double seconds = static_cast<double>(MonotonicNowNs() - start_ns) * 1e-9;
  const double cpu = static_cast<double>(std::clock() - start_cpu) / CLOCKS_PER_SEC;
  const auto sent = static_cast<double>(BytesSent(settings.interface) - start_bytes);
  const double rate = static_cast<double>(options.Number("rate", 1'000'000'000));
  std::printf(
      "lanes %2d  chunk %5zu KiB  wire %-8s  %4zu MiB x %zu  p50 %8.2f ms  %7.1f MB/s  "
      "wire %5.1f %%  CPU %.2f\n",
      settings.lanes, settings.chunk_bytes >> 10, WireTypeName(settings.wire),
      count * sizeof(float) >> 20, buckets.size(), Median(ms),
      static_cast<double>(rounds * buckets.size() * count * sizeof(float)) / seconds * 1e-6,
      100 * sent * 8 / rate / seconds, cpu / seconds);
  return 0;
}

}  // namespace
}  // namespace gradsync::daemon

int main(int argc, char** argv) {
  const gradsync::daemon::Options options(argc, argv);
  if (options.Text("store").empty() || options.Text("interface").empty()) {
    std::cerr << gradsync::daemon::kUsage;
    return 2;
  }
  return gradsync::daemon::Run(options);
}
