#include "tools/bench/options.h"

#include <algorithm>
#include <filesystem>
#include <functional>
#include <optional>
#include <utility>

#include "absl/status/status.h"
#include "absl/strings/match.h"
#include "absl/strings/numbers.h"
#include "absl/strings/str_cat.h"
#include "absl/strings/str_join.h"
#include "absl/strings/str_split.h"
#include "absl/strings/string_view.h"
#include "tools/bench/byte_size.h"
#include "tools/bench/control_block.h"
#include "tools/virtual_network/bit_rate.h"

namespace gradsync::bench {

const absl::string_view kHelp =
    R"(gradsync-bench: what an all-reduce costs a trainer, and how close that is to what memory allows.

  gradsync-bench allreduce [-b 64K] [-e 100M] [-f 4] [--ranks 2] [--nodes 1] [--rate RATE]
                           [--dtype float32] [--impl LIST] [--busy] [-n 40] [-w 5] [--threads N]
                           [--daemon PATH] [--json FILE]
  gradsync-bench handoff   [--ranks 2] [--nodes 1] [--rate RATE] [--busy] [-n 1000] [-w 50]
                           [--threads N] [--daemon PATH] [--json FILE]
  both, on GPUs:           --device cuda [--gpus 1] [--cuda_library LIB] [--nccl_library LIB]

allreduce averages buffers over the ranks of this machine, each rank a process, with
  roofline   a loop that reads and writes every rank's buffer once, in place, on the same number of
             threads: what no all-reduce with separate results can beat
  gradsync   gradsyncd, started by the bench in a temporary directory, and its client library
  gloo       raw Gloo by TCP: one ring of all ranks
  openmpi    MPI_Allreduce in place, where Open MPI is installed
  faulty     only if named: one element per rank is wrong, which the column #wrong must show
and prints, as nccl-tests do, a row per size and implementation:
  time       from the last rank's call (MarkReady) until that rank has the average (its wait for the
             bucket returns), in microseconds, p50 and p99
  algbw      size / p50, in GB/s (10^9 bytes);  busbw = algbw * 2(n-1)/n for n ranks
  #wrong     elements that differ from the exact average: all are checked in the first and the last
             iteration, a sample in the others; anything but 0 ends the bench with exit code 1
  ratio      the roofline's time / this time, in pairs of the same iteration: p50, p10. 0.85 means
             85 % of the bandwidth that memory has. A virtual machine's memory may be twice as slow
             from one second to the next, so only pairs tell the truth
  cpu        CPU seconds of one all-reduce, in all processes that take part
In each iteration every implementation takes one turn, in rotating order, while the processes of the
others sleep. Every rank rewrites its buffer before its turn: results of the last one in the caches
flatter nobody.

With --nodes N, N nodes of --ranks ranks each take part, each a network namespace with a link of
--rate and a gradsyncd of its own. Only gradsync and gloo, whose ring visits node by node, span
nodes. Instead of the ratio there is
  wire       the share of the time for which the wire must be busy: 2(N-1)/N times the size is what
             any all-reduce sends over each node's link, each way. Headers of Ethernet, IP and TCP
             come on top, so 0.956 is the most; but a rested link lets pass 4 ms' worth at once
  gradsync-bench allreduce --nodes 2 --ranks 2 --rate 1gbit -b 25M -e 100M -n 10
Without root or iproute2 nodes are loopback addresses: the head of the table says so, and nothing
limits their links.

handoff prints what a trainer pays for "this bucket is ready" (MarkReady, to its caller), and how
long a bucket, the empty one first, takes from the last rank's MarkReady until its wait returns: to
the daemon, in its queue, being reduced, and back to the trainer (medians).

With --device cuda buffers lie on GPUs, rank r's on GPU r % g of --gpus g. allreduce then compares
  roofline   copies by the driver within GPU 0, as many bytes as combining its k ranks' buffers and
             writing the average back moves: k+1 buffers read, k+1 written
  kernels    combine and write-back alone, on GPU 0. Their ratio is their share of the copies'
             bandwidth, both by the GPU's own clock; moved is in GB/s
  gradsync   as above, and over NCCL between GPUs, until the trainer's stream has the average
  nccl       NCCL in the trainers' own processes, if --ranks is --gpus. It adds; the division is
             not timed
and handoff what a trainer's host pays: MarkReady; until it may enqueue what needs the average
(enqueued: with WaitOnStream); the same for an all-reduce of NCCL in its own process, with world
size 1 where ranks share a GPU; added, the difference in pairs; how often the host has waited for
the GPU until then (syncs, in all iterations); and until the stream has the average.

  -b, -e SIZE      smallest and largest buffer per rank: bytes, or 64K, 25M, 1G (powers of two)
  -f FACTOR        from one size to the next, at least 2; SIZE of -e is always measured
  --ranks N        of each node; 2 to 8 in all, 1 to 8 on GPUs
  --nodes N        default 1: no network
  --rate RATE      of each node's link, each way: 1gbit, 100mbit; default: as fast as memory
  --dtype TYPE     float32, float64, float16 or bfloat16
  --impl LIST      comma-separated, from the list above; default: all that this machine has
  --busy           a thread that computes beside each rank, as a backward pass does
  -n N, -w N       iterations per size, and warm-up iterations before them
  --threads N      reduce threads of gradsyncd and threads of the roofline; default: one per core
  --device DEVICE  host (default) or cuda
  --gpus N         default 1; --ranks is a multiple of it
  --cuda_library LIB, --nccl_library LIB
                   the driver and NCCL: names or paths; default libcuda.so.1, libnccl.so.2
  --daemon PATH    gradsyncd; default: the one that was built with this bench
  --json FILE      the same figures as JSON: a list of rows (allreduce) or an object (handoff)

Progress goes to stderr. Exit codes: 0; 1 something was wrong or failed; 2 usage; 130 interrupted.
)";

namespace {

constexpr std::uint64_t kMaxBytes = std::uint64_t{2} << 30;
constexpr std::uint64_t kMaxIterations = 1'000'000;
constexpr std::uint32_t kMaxThreads = 1024;

// One flag. `set` returns what is wrong with the value, or "".
struct Flag {
  absl::string_view name;
  bool has_value;
  bool allreduce_only;
  std::function<std::string(absl::string_view)> set;
};

template <typename T>
std::string SetNumber(absl::string_view text, std::uint64_t least, std::uint64_t most, T* number) {
  std::uint64_t value = 0;
  const bool digits =
      !text.empty() && text.find_first_not_of("0123456789") == absl::string_view::npos;
  if (!digits || !absl::SimpleAtoi(text, &value) || value < least || value > most) {
    return absl::StrCat("must be a number from ", least, " to ", most);
  }
  *number = static_cast<T>(value);
  return "";
}

std::string SetSize(absl::string_view text, std::uint64_t* bytes) {
  const std::optional<std::uint64_t> value = ParseByteSize(text);
  if (!value.has_value() || *value == 0 || *value > kMaxBytes) {
    return "must be a size from 1 to 2G, like 64K or 25M";
  }
  *bytes = *value;
  return "";
}

std::string SetText(absl::string_view text, std::string* value) {
  if (text.empty()) return "must not be empty";
  *value = std::string(text);
  return "";
}

std::string SetRate(absl::string_view text, std::uint64_t* bits_per_second) {
  const std::optional<std::uint64_t> value = ParseBitRate(text);
  if (!value.has_value()) return "must be a rate like 1gbit or 100mbit";
  *bits_per_second = *value;
  return "";
}

std::string SetType(absl::string_view text, DataType* dtype) {
  for (const DataType type :
       {DataType::kFloat32, DataType::kFloat64, DataType::kFloat16, DataType::kBfloat16}) {
    if (text == DataTypeName(type)) {
      *dtype = type;
      return "";
    }
  }
  return "must be float32, float64, float16 or bfloat16";
}

std::string SetImplementations(absl::string_view text, std::vector<Implementation>* list) {
  list->clear();
  for (absl::string_view name : absl::StrSplit(text, ',')) {
    const std::optional<Implementation> implementation = ParseImplementation(name);
    if (!implementation.has_value()) {
      return absl::StrCat("must be a list of ", absl::StrJoin(kImplementationNames, ","));
    }
    if (std::count(list->begin(), list->end(), *implementation) != 0) {
      return absl::StrCat("names ", name, " twice");
    }
    list->push_back(*implementation);
  }
  return "";
}

std::string SetDevice(absl::string_view text, std::uint32_t* gpus) {
  if (text != "host" && text != "cuda") return "must be host or cuda";
  *gpus = text == "cuda" ? std::max(*gpus, 1u) : 0;
  return "";
}

// Kept absolute if it is a path: the daemon takes no other.
std::string SetLibrary(absl::string_view text, std::string* library) {
  if (text.empty()) return "must not be empty";
  *library = std::string(text);
  if (absl::StrContains(text, '/')) *library = std::filesystem::absolute(*library).string();
  return library->size() < kMaxPath ? "" : "is too long";
}

std::vector<Flag> Flags(Options* options) {
  const auto number = [](std::uint64_t least, std::uint64_t most, auto* field) {
    return [=](absl::string_view text) { return SetNumber(text, least, most, field); };
  };
  const auto size = [](std::uint64_t* field) {
    return [=](absl::string_view text) { return SetSize(text, field); };
  };
  const auto words = [](std::string* field) {
    return [=](absl::string_view text) { return SetText(text, field); };
  };
  return {
      {"-b", true, true, size(&options->begin_bytes)},
      {"-e", true, true, size(&options->end_bytes)},
      {"-f", true, true, number(2, kMaxBytes, &options->factor)},
      {"--dtype", true, true, [=](auto text) { return SetType(text, &options->dtype); }},
      {"--impl", true, true,
       [=](auto text) { return SetImplementations(text, &options->implementations); }},
      {"-n", true, false, number(1, kMaxIterations, &options->iterations)},
      {"-w", true, false, number(0, kMaxIterations, &options->warmup)},
      {"--ranks", true, false, number(1, kMaxRanks, &options->ranks)},
      {"--nodes", true, false, number(1, kMaxRanks, &options->nodes)},
      {"--rate", true, false, [=](auto text) { return SetRate(text, &options->bits_per_second); }},
      {"--device", true, false, [=](auto text) { return SetDevice(text, &options->gpus); }},
      {"--gpus", true, false, number(1, kMaxRanks, &options->gpus)},
      {"--cuda_library", true, false,
       [=](auto text) { return SetLibrary(text, &options->cuda_library); }},
      {"--nccl_library", true, false,
       [=](auto text) { return SetLibrary(text, &options->nccl_library); }},
      {"--threads", true, false, number(1, kMaxThreads, &options->threads)},
      {"--daemon", true, false, words(&options->daemon)},
      {"--json", true, false, words(&options->json)},
      {"--busy", false, false,
       [=](auto) {
         options->busy = true;
         return std::string();
       }},
  };
}

// Reads arguments[*next] and its value; advances *next. Returns the fault, or "".
std::string ReadFlag(const std::vector<Flag>& flags, Command command,
                     const std::vector<absl::string_view>& arguments, std::size_t* next,
                     std::vector<absl::string_view>* seen) {
  const absl::string_view argument = arguments[(*next)++];
  const std::size_t equals = argument.find('=');
  const absl::string_view name = argument.substr(0, equals);
  const auto flag = std::find_if(flags.begin(), flags.end(),
                                 [name](const Flag& candidate) { return candidate.name == name; });
  if (flag == flags.end()) return absl::StrCat("unknown argument: ", argument);
  if (flag->allreduce_only && command != Command::kAllReduce) {
    return absl::StrCat(name, " belongs to allreduce");
  }
  if (std::count(seen->begin(), seen->end(), name) != 0) return absl::StrCat(name, " given twice");
  seen->push_back(name);
  absl::string_view value;
  if (!flag->has_value) {
    if (equals != absl::string_view::npos) return absl::StrCat(name, " takes no value");
  } else if (equals != absl::string_view::npos) {
    value = argument.substr(equals + 1);
  } else if (*next < arguments.size()) {
    value = arguments[(*next)++];
  } else {
    return absl::StrCat(name, " needs a value");
  }
  const std::string fault = flag->set(value);
  return fault.empty() ? "" : absl::StrCat(name, " ", value, ": ", fault);
}

bool RunsOn(Implementation implementation, std::uint32_t gpus) {
  switch (implementation) {
    case Implementation::kRoofline:
    case Implementation::kGradsync:
      return true;
    case Implementation::kGloo:
    case Implementation::kOpenMpi:
    case Implementation::kFaulty:
      return gpus == 0;
    case Implementation::kKernels:
    case Implementation::kNccl:
      return gpus > 0;
  }
  return false;
}

void CheckRanks(const Options& options, std::vector<std::string>* faults) {
  const std::uint32_t ranks = options.ranks * options.nodes;
  const std::uint32_t least = options.gpus > 0 ? 1 : 2;
  if (ranks < least || ranks > kMaxRanks) {
    faults->push_back(absl::StrCat("--ranks ", options.ranks, " on --nodes ", options.nodes, ": ",
                                   ranks, " ranks in all, must be ", least, " to ", kMaxRanks));
  }
  if (options.gpus > 0 && options.nodes > 1) faults->push_back("--device cuda is of one node");
  if (options.gpus > 0 && ranks % options.gpus != 0) {
    faults->push_back(absl::StrCat("--ranks ", ranks, " is no multiple of --gpus ", options.gpus));
  }
  for (const Implementation implementation : options.implementations) {
    if (!RunsOn(implementation, options.gpus)) {
      faults->push_back(absl::StrCat("--impl ", ImplementationName(implementation), " is not of ",
                                     options.gpus > 0 ? "GPUs" : "host memory"));
    }
    if (implementation == Implementation::kNccl && ranks != options.gpus) {
      faults->push_back("--impl nccl needs a GPU for each rank: --gpus as --ranks");
    }
    const bool spans =
        implementation != Implementation::kRoofline && implementation != Implementation::kOpenMpi;
    if (options.nodes == 1 || spans) continue;
    faults->push_back(
        absl::StrCat("--impl ", ImplementationName(implementation), " is of one node alone"));
  }
  if (options.bits_per_second != 0 && options.nodes == 1) {
    faults->push_back("--rate is of the links between nodes: it needs --nodes 2 or more");
  }
}

void CheckSizes(const Options& options, std::vector<std::string>* faults) {
  if (options.begin_bytes > options.end_bytes) {
    faults->push_back(absl::StrCat("-b ", FormatByteSize(options.begin_bytes),
                                   " is larger than -e ", FormatByteSize(options.end_bytes)));
  }
  const std::size_t item_size = ItemSize(options.dtype);
  for (const std::uint64_t bytes : {options.begin_bytes, options.end_bytes}) {
    if (bytes % item_size == 0) continue;
    faults->push_back(absl::StrCat(bytes, " bytes are no whole number of ",
                                   DataTypeName(options.dtype), " (", item_size, " bytes)"));
  }
}

}  // namespace

absl::StatusOr<Options> ParseOptions(const std::vector<absl::string_view>& arguments) {
  Options options;
  if (arguments.empty()) {
    return absl::InvalidArgumentError("a command is missing: allreduce or handoff");
  }
  for (const absl::string_view argument : arguments) {
    if (argument == "--help" || argument == "-h" || argument == "help") return options;
  }
  if (arguments[0] == "allreduce") {
    options.command = Command::kAllReduce;
  } else if (arguments[0] == "handoff") {
    options.command = Command::kHandoff;
    options.iterations = 1000;
    options.warmup = 50;
  } else {
    return absl::InvalidArgumentError(
        absl::StrCat("unknown command: ", arguments[0], " (allreduce or handoff)"));
  }
  const std::vector<Flag> flags = Flags(&options);
  std::vector<std::string> faults;
  std::vector<absl::string_view> seen;
  for (std::size_t next = 1; next < arguments.size();) {
    std::string fault = ReadFlag(flags, options.command, arguments, &next, &seen);
    if (!fault.empty()) faults.push_back(std::move(fault));
  }
  if (faults.empty()) CheckRanks(options, &faults);
  if (faults.empty()) CheckSizes(options, &faults);
  if (!faults.empty()) return absl::InvalidArgumentError(absl::StrJoin(faults, "\n"));
  return options;
}

std::vector<std::uint64_t> Sizes(const Options& options) {
  std::vector<std::uint64_t> sizes;
  for (std::uint64_t bytes = options.begin_bytes; bytes < options.end_bytes;
       bytes *= options.factor) {
    sizes.push_back(bytes);
  }
  sizes.push_back(options.end_bytes);
  return sizes;
}

}  // namespace gradsync::bench
