#include "daemon/config/option_table.h"

#include <algorithm>
#include <cstddef>
#include <cstdint>
#include <utility>

#include "absl/status/statusor.h"
#include "absl/strings/ascii.h"
#include "absl/strings/match.h"
#include "absl/strings/str_cat.h"
#include "absl/strings/str_join.h"
#include "absl/time/time.h"
#include "daemon/config/option_value.h"
#include "daemon/peer/coordinator_list.h"
#include "daemon/peer/node_name.h"
#include "daemon/peer/peer_address.h"
#include "proto/gradsync/limits.h"

namespace gradsync::daemon {
namespace {

using Literal = OptionEntry::Literal;

// The part of --help that an option's type does not determine.
struct Text {
  std::string_view name;
  std::string_view group;
  std::string_view help;
  std::string example;
};

absl::Status Invalid(const std::string& what) { return absl::InvalidArgumentError(what); }

OptionEntry Entry(const Text& text, std::string_view placeholder, std::string allowed,
                  Literal literal) {
  OptionEntry entry;
  entry.name = text.name;
  entry.group = text.group;
  entry.placeholder = placeholder;
  entry.help = text.help;
  entry.allowed = std::move(allowed);
  entry.example = text.example;
  entry.literal = literal;
  return entry;
}

OptionEntry Bool(bool Options::*member, const Text& text) {
  OptionEntry entry = Entry(text, "true|false", "true or false", Literal::kBool);
  entry.parse = [member](std::string_view value, Options* options) {
    auto parsed = ParseBool(value);
    if (parsed.ok()) options->*member = *parsed;
    return parsed.status();
  };
  entry.check = [](const Options&) { return absl::OkStatus(); };
  entry.format = [member](const Options& options) {
    return std::string(options.*member ? "true" : "false");
  };
  return entry;
}

OptionEntry Count(std::uint32_t Options::*member, std::uint32_t min, std::uint32_t max,
                  const Text& text) {
  OptionEntry entry = Entry(text, "N", absl::StrCat(min, " to ", max), Literal::kInteger);
  entry.parse = [member](std::string_view value, Options* options) {
    auto parsed = ParseCount(value);
    if (!parsed.ok()) return parsed.status();
    if (*parsed > UINT32_MAX) return Invalid(absl::StrCat(*parsed, " is too large"));
    options->*member = static_cast<std::uint32_t>(*parsed);
    return absl::OkStatus();
  };
  entry.check = [member, min, max](const Options& options) {
    const std::uint32_t value = options.*member;
    if (value >= min && value <= max) return absl::OkStatus();
    return Invalid(absl::StrCat(value, " is out of range"));
  };
  entry.format = [member](const Options& options) { return absl::StrCat(options.*member); };
  return entry;
}

OptionEntry Bytes(std::uint64_t Options::*member, std::uint64_t min, std::uint64_t max,
                  std::uint64_t multiple, const Text& text) {
  std::string allowed = absl::StrCat(FormatBytes(min), " to ", FormatBytes(max));
  if (multiple > 1) absl::StrAppend(&allowed, ", a multiple of ", FormatBytes(multiple));
  OptionEntry entry = Entry(text, "SIZE", std::move(allowed), Literal::kString);
  entry.parse = [member](std::string_view value, Options* options) {
    auto parsed = ParseBytes(value);
    if (parsed.ok()) options->*member = *parsed;
    return parsed.status();
  };
  entry.check = [member, min, max, multiple](const Options& options) {
    const std::uint64_t value = options.*member;
    if (value < min || value > max) {
      return Invalid(absl::StrCat(FormatBytes(value), " is out of range"));
    }
    if (value % multiple != 0) {
      return Invalid(
          absl::StrCat(FormatBytes(value), " is not a multiple of ", FormatBytes(multiple)));
    }
    return absl::OkStatus();
  };
  entry.format = [member](const Options& options) { return FormatBytes(options.*member); };
  return entry;
}

OptionEntry Time(absl::Duration Options::*member, absl::Duration min, absl::Duration max,
                 const Text& text) {
  OptionEntry entry =
      Entry(text, "TIME", absl::StrCat(FormatTime(min), " to ", FormatTime(max)), Literal::kString);
  entry.parse = [member](std::string_view value, Options* options) {
    auto parsed = ParseTime(value);
    if (parsed.ok()) options->*member = *parsed;
    return parsed.status();
  };
  entry.check = [member, min, max](const Options& options) {
    const absl::Duration value = options.*member;
    if (value >= min && value <= max) return absl::OkStatus();
    return Invalid(absl::StrCat(FormatTime(value), " is out of range"));
  };
  entry.format = [member](const Options& options) { return FormatTime(options.*member); };
  return entry;
}

template <typename T>
OptionEntry Choice(T Options::*member, const std::vector<std::pair<std::string, T>>& choices,
                   const Text& text) {
  std::vector<std::string> names;
  for (const auto& [name, value] : choices) names.push_back(name);
  OptionEntry entry = Entry(text, "CHOICE", absl::StrJoin(names, ", "), Literal::kString);
  entry.parse = [member, choices](std::string_view value, Options* options) {
    for (const auto& [name, choice] : choices) {
      if (name != value) continue;
      options->*member = choice;
      return absl::OkStatus();
    }
    return Invalid(absl::StrCat(Quoted(value), " is not one of the choices"));
  };
  entry.format = [member, choices](const Options& options) {
    for (const auto& [name, choice] : choices) {
      if (options.*member == choice) return name;
    }
    return absl::StrCat(static_cast<std::uint64_t>(options.*member));
  };
  entry.check = [member, choices, format = entry.format](const Options& options) {
    for (const auto& [name, choice] : choices) {
      if (options.*member == choice) return absl::OkStatus();
    }
    return Invalid(absl::StrCat(format(options), " is not one of the choices"));
  };
  return entry;
}

OptionEntry String(std::string Options::*member, std::string_view placeholder, std::string allowed,
                   std::function<absl::Status(const std::string&)> check, const Text& text) {
  OptionEntry entry = Entry(text, placeholder, std::move(allowed), Literal::kString);
  entry.parse = [member](std::string_view value, Options* options) {
    options->*member = std::string(value);
    return absl::OkStatus();
  };
  entry.check = [member, check = std::move(check)](const Options& options) {
    const std::string& value = options.*member;
    if (std::any_of(value.begin(), value.end(), absl::ascii_iscntrl)) {
      return Invalid(absl::StrCat(Quoted(value), " contains a control character"));
    }
    return check(value);
  };
  entry.format = [member](const Options& options) { return options.*member; };
  return entry;
}

OptionEntry Path(std::string Options::*member, std::string allowed,
                 std::function<absl::Status(const std::string&)> check, const Text& text) {
  return String(member, "PATH", std::move(allowed), std::move(check), text);
}

absl::Status CheckSocket(const std::string& path) {
  if (!absl::StartsWith(path, "/")) {
    return Invalid(absl::StrCat(Quoted(path), " is not an absolute path"));
  }
  if (!absl::EndsWith(path, ".sock") || absl::EndsWith(path, "/.sock")) {
    return Invalid(absl::StrCat(Quoted(path), " does not end in a name with .sock"));
  }
  if (path.size() > kMaxSocketPathBytes) {
    return Invalid(absl::StrCat(Quoted(path), " has ", path.size(), " bytes"));
  }
  return absl::OkStatus();
}

absl::Status CheckPeerListen(const std::string& text) {
  return text.empty() ? absl::OkStatus() : ParsePeerAddress(text, kPeerPort).status();
}

absl::Status CheckCoordinators(const std::string& text) {
  return CoordinatorList::Parse(text, kPeerPort).status();
}

absl::Status CheckNodeName(const std::string& name) {
  if (name.empty() || (IsNodeName(name) && !absl::StrContains(name, ','))) return absl::OkStatus();
  return Invalid(absl::StrCat(Quoted(name), " has more than ", kMaxNodeNameBytes,
                              " bytes, a comma, or a character that is not printable ASCII"));
}

absl::Status CheckLogFile(const std::string& path) {
  if (path.empty() || (absl::StartsWith(path, "/") && !absl::EndsWith(path, "/"))) {
    return absl::OkStatus();
  }
  return Invalid(absl::StrCat(Quoted(path), " is not the absolute path of a file"));
}

absl::Status CheckLibrary(const std::string& path) {
  const bool is_name = !absl::StrContains(path, '/');
  if (!path.empty() && (is_name || (absl::StartsWith(path, "/") && !absl::EndsWith(path, "/")))) {
    return absl::OkStatus();
  }
  return Invalid(
      absl::StrCat(Quoted(path), " is neither the name nor the absolute path of a library"));
}

absl::Status CheckProgram(const std::string& path) {
  if (path.empty() || CheckLibrary(path).ok()) return absl::OkStatus();
  return Invalid(
      absl::StrCat(Quoted(path), " is neither the name nor the absolute path of a program"));
}

std::vector<OptionEntry> MakeTable() {
  constexpr std::uint64_t kKiB = 1 << 10, kMiB = 1 << 20, kGiB = 1 << 30;
  constexpr std::uint64_t kTiB = std::uint64_t{1} << 40;
  constexpr std::uint64_t kPage = 4 * kKiB;
  constexpr std::string_view kSockets = "Sockets", kIdentity = "Identity", kReduction = "Reduction",
                             kTime = "Time", kQuotas = "Quotas", kPeers = "Other nodes",
                             kGpus = "GPUs", kLog = "Log";
  return {
      Path(&Options::socket,
           absl::StrCat("an absolute path that ends in .sock, at most ", kMaxSocketPathBytes,
                        " bytes"),
           CheckSocket,
           {"socket", kSockets,
            "Unix socket for gRPC. File descriptors travel over a second socket beside it: "
            "X-fd.sock for X.sock. Not used if the service manager passes the sockets.",
            "/tmp/mine.sock"}),
      Choice<std::uint32_t>(
          &Options::socket_mode, {{"0600", 0600}, {"0660", 0660}, {"0666", 0666}},
          {"socket_mode", kSockets,
           "Permission bits of both sockets. With 0660 the members of the sockets' group may train "
           "on this node, with 0666 everybody who can enter the directory.",
           "0600"}),

      Bool(&Options::require_token,
           {"require_token", kIdentity,
            "Refuse jobs without a token. Set this where pods of several people share user ids: "
            "there only the token separates their jobs.",
            "true"}),
      Bool(&Options::allow_overflow_uid,
           {"allow_overflow_uid", kIdentity,
            "Serve user id 65534. All users of a foreign user namespace appear under this id and "
            "cannot be distinguished, so set require_token too.",
            "true"}),
      Bool(&Options::pod_root_sees_all,
           {"pod_root_sees_all", kIdentity,
            "In any pod of Kubernetes, show root and the daemon's own user every job and user of "
            "the node. Otherwise root sees only those of its pod. On the node itself both see all.",
            "true"}),

      Count(&Options::reduce_threads, 0, 256,
            {"reduce_threads", kReduction,
             "Threads that add gradients. They use the trainers' cores. 0: one per 8 CPUs of the "
             "daemon's affinity and cgroup quota, at least 1, at most 4. Lanes of jobs that span "
             "nodes add too: at most the same number at a time, or engine_lanes if that is more.",
             "2"}),
      Bytes(&Options::staging_bytes, kPage, kGiB, kPage,
            {"staging_bytes", kReduction,
             "Staging memory of each session. Broadcasts move through it in chunks; a small "
             "all-reduce must fit into it.",
             "8MiB"}),

      Time(&Options::lease, absl::Milliseconds(100), absl::Hours(1),
           {"lease", kTime,
            "How long a trainer may stay silent before it counts as lost. A process that is "
            "stopped or swapped out is silent.",
            "1m"}),
      Time(&Options::step_timeout, absl::Milliseconds(100), absl::Hours(24),
           {"step_timeout", kTime,
            "Time that a step may take from the first mark of any rank to its commit. A step that "
            "takes longer is void. A job can set its own limit. Compilation and checkpoints happen "
            "inside steps.",
            "10m"}),
      Time(&Options::drain_timeout, absl::Milliseconds(100), absl::Hours(1),
           {"drain_timeout", kTime,
            "How long running steps may take to finish after SIGTERM. A step that takes longer is "
            "void. Then the daemon stops. If its stop hangs, it logs where, and exits after 15 s. "
            "So keep drain_timeout at least 20 s below the time that the service manager waits "
            "before SIGKILL.",
            "10s"}),

      Count(&Options::quota_sessions_per_user, 1, 65536,
            {"quota_sessions_per_user", kQuotas,
             "Trainers (ranks) of one user at a time. In Kubernetes a user has the quotas in each "
             "pod.",
             "64"}),
      Count(&Options::quota_jobs_per_user, 1, 65536,
            {"quota_jobs_per_user", kQuotas, "Jobs of one user at a time.", "8"}),
      Bytes(&Options::quota_arena_bytes_per_user, kMiB, 64 * kTiB, 1,
            {"quota_arena_bytes_per_user", kQuotas,
             "Memory of all arenas and staging memory of one user. A rank's arena is as large as "
             "its gradients.",
             "256GiB"}),
      Count(&Options::quota_layouts_per_session, 1, 256,
            {"quota_layouts_per_session", kQuotas,
             "Layouts (wrapped modules) that one trainer may register.", "8"}),
      Count(&Options::quota_buckets_per_layout, 1, 65536,
            {"quota_buckets_per_layout", kQuotas,
             "Buckets of one layout. 4096 buckets of 25 MiB hold 100 GiB.", "8192"}),
      Count(
          &Options::quota_parameters_per_layout, 1, kMaxParameters,
          {"quota_parameters_per_layout", kQuotas, "Parameters (tensors) of one layout.", "20000"}),
      Bytes(&Options::quota_control_bytes_per_user, kMiB, 64 * kGiB, 1,
            {"quota_control_bytes_per_user", kQuotas,
             "Memory that the daemon itself keeps for one user: names and plans of layouts, steps, "
             "timelines, jobs, broadcasts that only pass through here, and messages that trainers "
             "do not read.",
             "1GiB"}),
      Bytes(&Options::quota_engine_bytes_per_user, kMiB, 64 * kTiB, 1,
            {"quota_engine_bytes_per_user", kQuotas,
             "Memory of one user's engines. Each job that spans nodes has an engine on each node, "
             "which takes 8 MiB, and five times engine_chunk_bytes for each lane: 28 MiB with the "
             "defaults, so that 146 engines fit. An engine counts until its process has ended.",
             "8GiB"}),

      String(
          &Options::peer_listen, "ADDRESS",
          absl::StrCat("host:port, host (port ", kPeerPort, "), or empty"), CheckPeerListen,
          {"peer_listen", kPeers,
           "Address on which this daemon listens for daemons of other nodes. Jobs that span nodes "
           "need it. Empty: the daemon does not listen. An address that other machines reach needs "
           "peer_tls_certificate, or peer_plain_text. Only the cluster's own network should reach "
           "this port and the ephemeral ports of the engines.",
           "10.0.0.1:7417"}),
      Bool(&Options::peer_plain_text,
           {"peer_plain_text", kPeers,
            "Lets peer_listen be an address that other machines reach, without TLS. Then everyone "
            "who reaches the port can join any user's jobs that have no token.",
            "true"}),
      String(
          &Options::peer_coordinators, "LIST",
          "hosts, *.domains or networks, separated by commas; or empty", CheckCoordinators,
          {"peer_coordinators", kPeers,
           "Daemons that may coordinate jobs of this node's trainers: hosts, domains and networks, "
           "each with a port if it is not that of peer_listen. Empty: this daemon connects to any "
           "host and port that a trainer names.",
           "10.0.0.0/8, *.cluster.example"}),
      String(&Options::node_name, "NAME",
             "at most 64 printable characters without a comma, or empty", CheckNodeName,
             {"node_name", kPeers,
              "Name of this node in messages and status. Empty: the host's name.", "node7"}),
      Path(&Options::peer_tls_certificate, "an absolute path of a file, or empty", CheckLogFile,
           {"peer_tls_certificate", kPeers,
            "PEM file with this daemon's certificate. With it, peer_tls_key and peer_tls_ca, "
            "daemons authenticate each other, and gradients in host memory are encrypted.",
            "/etc/gradsync/peer.crt"}),
      Path(&Options::peer_tls_key, "an absolute path of a file, or empty", CheckLogFile,
           {"peer_tls_key", kPeers, "PEM file with the certificate's private key.",
            "/etc/gradsync/peer.key"}),
      Path(&Options::peer_tls_ca, "an absolute path of a file, or empty", CheckLogFile,
           {"peer_tls_ca", kPeers,
            "PEM file with the authority that signed the other nodes' certificates.",
            "/etc/gradsync/ca.crt"}),
      String(
          &Options::peer_tls_name, "NAME",
          "at most 64 printable characters without a comma, or empty", CheckNodeName,
          {"peer_tls_name", kPeers,
           "DNS name that the other nodes' certificates must have. Set it if all nodes share one "
           "certificate. Empty: each certificate must have its node's address.",
           "gradsyncd"}),
      Count(&Options::engine_lanes, 1, EngineSettings::kMaxLanes,
            {"engine_lanes", kPeers,
             "Connections between each two nodes of a job. Each has a thread on both nodes. This "
             "option and the next three apply to jobs whose rank 0 is on this node; the other "
             "nodes of such a job use them too. But no node uses more lanes or larger chunks than "
             "its own options say: a job has the least of its nodes.",
             "4"}),
      Bytes(&Options::engine_chunk_bytes, EngineSettings::kMinChunkBytes,
            EngineSettings::kMaxChunkBytes, EngineSettings::kMinChunkBytes,
            {"engine_chunk_bytes", kPeers,
             "Size of the pieces in which gradients travel between nodes. A lane uses up to five "
             "times as much memory. engine_lanes times this is at most 64MiB.",
             "1MiB"}),
      Choice<WireType>(&Options::engine_wire_type,
                       {{"same", WireType::kSame},
                        {"bfloat16", WireType::kBfloat16},
                        {"float16", WireType::kFloat16}},
                       {"engine_wire_type", kPeers,
                        "Type in which float32 gradients travel between nodes. A 16-bit type "
                        "halves the bytes: each node's sum is rounded once, the sums are added in "
                        "float32, and the result is rounded once. float16 holds sums over all "
                        "ranks up to 65504. All other data travels unchanged.",
                        "bfloat16"}),
      Time(&Options::engine_timeout, EngineSettings::kMinSilence, EngineSettings::kMaxSilence,
           {"engine_timeout", kPeers,
            "A node is lost if, for this long, another node hears nothing from it or its data "
            "does not arrive. Slow trainers do not count: step_timeout bounds them. Other users' "
            "sums on that node do count: see reduce_threads. Whatever this option says, a node is "
            "also lost if its daemon does not answer the other daemon for 5 s (15 s if bytes of it "
            "wait to be read).",
            "30s"}),

      Path(&Options::cuda_library, "a library's name or absolute path", CheckLibrary,
           {"cuda_library", kGpus,
            "CUDA driver library. Workers open it at run time. none: this daemon uses no GPUs, and "
            "starts no worker to look for them.",
            "/usr/local/nvidia/lib64/libcuda.so.1"}),
      Path(&Options::nccl_library, "a library's name or absolute path", CheckLibrary,
           {"nccl_library", kGpus, "NCCL library, 2.19 or newer. Workers open it at run time.",
            "/opt/nccl/lib/libnccl.so.2"}),
      Path(&Options::nvml_library, "a library's name or absolute path", CheckLibrary,
           {"nvml_library", kGpus,
            "NVIDIA's management library. Workers open it at run time to measure the GPU memory of "
            "their contexts. Without it status does not show that memory.",
            "/usr/local/nvidia/lib64/libnvidia-ml.so.1"}),
      Bytes(&Options::quota_gpu_bytes_per_user, kMiB, 64 * kTiB, 1,
            {"quota_gpu_bytes_per_user", kGpus,
             "Memory of all arenas of one user on GPUs. A rank's arena is as large as its "
             "gradients. A worker's own memory, four buckets and its CUDA context, does not count.",
             "64GiB"}),
      Time(&Options::worker_idle_limit, absl::ZeroDuration(), absl::Hours(24),
           {"worker_idle_limit", kGpus,
            "How long a job's worker on a GPU stays after the job's last trainer there has ended. "
            "The next trainers then find it running.",
            "10m"}),
      Choice<CollectiveGate>(
          &Options::gate,
          {{"auto", CollectiveGate::kAuto},
           {"all_nodes", CollectiveGate::kAllNodes},
           {"none", CollectiveGate::kNone}},
          {"gate", kGpus,
           "When an all-reduce between GPUs begins. all_nodes: on all GPUs together, once every "
           "rank's gradients are ready; then no NCCL kernel waits on a GPU that trainers need. "
           "none: on each GPU once its own ranks' gradients are ready; this saves a message and "
           "its answer. auto: none if every GPU of the job is shared through MPS, else all_nodes.",
           "all_nodes"}),
      Bool(&Options::mps_multiuser,
           {"mps_multiuser", kGpus,
            "True if MPS runs with -multiuser-server. Otherwise MPS serves one user at a time, and "
            "the daemon refuses trainers of users other than its own on GPUs that MPS shares.",
            "true"}),
      Path(&Options::mps_control, "a program's name or absolute path, or empty", CheckProgram,
           {"mps_control", kGpus,
            "Control program of MPS. The daemon uses it to end the MPS client (terminate_client) "
            "of a lost trainer whose process still lives. Empty: never.",
            "/usr/bin/nvidia-cuda-mps-control"}),

      Choice<LogLevel>(&Options::log_level,
                       {{"debug", LogLevel::kDebug},
                        {"info", LogLevel::kInfo},
                        {"warning", LogLevel::kWarning},
                        {"error", LogLevel::kError}},
                       {"log_level", kLog, "Lowest level of the lines that are written.", "debug"}),
      Choice<LogFormat>(&Options::log_format,
                        {{"text", LogFormat::kText}, {"json", LogFormat::kJson}},
                        {"log_format", kLog,
                         "text: key=value after the message. json: one object per line.", "json"}),
      Path(&Options::log_file, "an absolute path of a file, or empty", CheckLogFile,
           {"log_file", kLog, "File to which lines are appended. Empty: stderr.",
            "/var/log/gradsyncd.log"}),
  };
}

// The edit distance of `a` and `b`, or any number from `limit` on if it is not below `limit`.
std::size_t EditDistance(std::string_view a, std::string_view b, std::size_t limit) {
  std::vector<std::size_t> row(b.size() + 1);
  for (std::size_t j = 0; j <= b.size(); ++j) row[j] = j;
  for (std::size_t i = 1; i <= a.size(); ++i) {
    std::size_t diagonal = row[0];
    std::size_t least = i;
    row[0] = i;
    for (std::size_t j = 1; j <= b.size(); ++j) {
      const std::size_t replaced = diagonal + (a[i - 1] == b[j - 1] ? 0 : 1);
      diagonal = row[j];
      row[j] = std::min({replaced, row[j] + 1, row[j - 1] + 1});
      least = std::min(least, row[j]);
    }
    if (least >= limit) return least;  // no later row has less
  }
  return row[b.size()];
}

}  // namespace

const std::vector<OptionEntry>& OptionTable() {
  static const auto* const table = new std::vector<OptionEntry>(MakeTable());
  return *table;
}

const OptionEntry* FindOption(std::string_view name) {
  for (const OptionEntry& option : OptionTable()) {
    if (option.name == name) return &option;
  }
  return nullptr;
}

std::string NearestName(std::string_view unknown, const std::vector<std::string_view>& names) {
  std::string spelled(unknown);
  std::replace(spelled.begin(), spelled.end(), '-', '_');
  std::string_view nearest;
  std::size_t least = std::max<std::size_t>(1, std::min<std::size_t>(3, spelled.size() / 3)) + 1;
  for (std::string_view name : names) {
    // Cheap, and exact: two names differ in at least as many letters as their lengths do.
    const auto [shorter, longer] = std::minmax({spelled.size(), name.size()});
    if (longer - shorter >= least) continue;
    const std::size_t distance = EditDistance(spelled, name, least);
    if (distance < least) {
      least = distance;
      nearest = name;
    }
  }
  return std::string(nearest);
}

std::string ToLiteral(const OptionEntry& option, std::string_view text) {
  return option.literal == Literal::kString ? Quoted(text) : std::string(text);
}

}  // namespace gradsync::daemon
