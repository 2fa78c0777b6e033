// What gradsyncd can be told: each field is a flag of the same name and a field of the config file
// (config.proto). Defaults, units and reasons stand here; names, help and limits in
// option_table.cc.

#ifndef DAEMON_CONFIG_OPTIONS_H_
#define DAEMON_CONFIG_OPTIONS_H_

#include <cstddef>
#include <cstdint>
#include <optional>
#include <string>

#include "absl/status/status.h"
#include "absl/status/statusor.h"
#include "absl/time/time.h"
#include "daemon/base/logging.h"
#include "daemon/engine/engine_settings.h"
#include "daemon/worker/collective_gate.h"

namespace gradsync {

inline constexpr std::size_t kMaxSocketPathBytes = 103;

// Where daemons listen for each other by default.
inline constexpr std::uint16_t kPeerPort = 7417;

struct Options {
  // ---- Sockets ----
  // gRPC socket; file descriptors go over "X-fd.sock" beside "X.sock". Unused if the service
  // manager passes the sockets. Absolute, ends in ".sock", at most kMaxSocketPathBytes: with "-fd"
  // it must still fit sockaddr_un (108 with the NUL).
  std::string socket = "/run/gradsync/gradsyncd.sock";
  // Permission bits of both sockets. The group is the list of who may train on this node; others
  // may not.
  std::uint32_t socket_mode = 0660;

  // ---- Identity ----
  // Refuse jobs without a token. Off: on a node of one's own the user id separates jobs; pods share
  // user ids and need it.
  bool require_token = false;
  // Serve user id 65534, as which every user of a foreign user namespace appears: they cannot be
  // told apart.
  bool allow_overflow_uid = false;

  // ---- Reduction ----
  // Threads that add gradients; 0: min(4, max(1, cpus/8)), since the trainer's cores are the
  // trainer's.
  std::uint32_t reduce_threads = 0;
  // Bytes of each session's staging memory: Broadcast moves tensors through it in chunks, and a
  // small all-reduce must fit into it. A multiple of 4096 (a page).
  std::uint64_t staging_bytes = std::uint64_t{32} << 20;

  // ---- Time ----
  // A trainer that answers no lease question for this long is lost: it is stopped or swapped out,
  // but not dead.
  absl::Duration lease = absl::Seconds(30);
  // A step that is not committed this long after its first MarkReady is void, unless the job asked
  // for another limit. Long, because compilation and checkpoints happen inside steps.
  absl::Duration step_timeout = absl::Minutes(30);
  // On SIGTERM running steps may finish for this long. With 5 s of teardown it stays below the 30 s
  // that Kubernetes gives.
  absl::Duration drain_timeout = absl::Seconds(25);

  // ---- Quotas: what one user (uid), session or message may take ----
  // 16 jobs of 16 local ranks.
  std::uint32_t quota_sessions_per_user = 256;
  std::uint32_t quota_jobs_per_user = 64;
  // Arenas and staging memory together, in bytes. 64 GiB: 8 local ranks of a model of 2 G float32
  // parameters.
  std::uint64_t quota_arena_bytes_per_user = std::uint64_t{64} << 30;
  // One per wrapped module; a GAN has two.
  std::uint32_t quota_layouts_per_session = 64;
  // 100 GiB of gradients in buckets of 25 MiB.
  std::uint32_t quota_buckets_per_layout = 4096;
  std::uint32_t quota_parameters_per_layout = 100'000;
  // Bytes of one gRPC message. 16 MiB holds a layout of 100 000 parameters with names of 120 bytes.
  std::uint64_t max_message_bytes = std::uint64_t{16} << 20;

  // ---- Other nodes ----
  // "host:port" or "host" (port kPeerPort) on which the daemons of other nodes are heard, for jobs
  // that span nodes; a numeric address is also where this node's engines listen. Empty: no such
  // jobs, and trainers' `coordinator` is not looked at.
  std::string peer_listen;
  // In other nodes' messages. Empty: the host's name.
  std::string node_name;
  // PEM files; all three or none. With them both sides of every connection between daemons show a
  // certificate that `ca` has signed. Gradients travel in clear text in any case.
  std::string peer_tls_certificate;
  std::string peer_tls_key;
  std::string peer_tls_ca;
  // Name in every node's certificate. Empty: each must have the address under which it is called,
  // which a certificate that all nodes share cannot.
  std::string peer_tls_name;
  // How jobs that are coordinated here exchange gradients between their nodes; the other nodes
  // follow (engine_settings.h has units and reasons).
  std::uint32_t engine_lanes = static_cast<std::uint32_t>(EngineSettings().lanes);
  std::uint64_t engine_chunk_bytes = EngineSettings().chunk_bytes;
  WireType engine_wire_type = EngineSettings().wire;
  absl::Duration engine_timeout = EngineSettings().silence_limit;

  // ---- GPUs ----
  // The driver and NCCL, as dlopen takes them: names that the loader looks for, or paths. Opened by
  // workers, never by the daemon itself.
  std::string cuda_library = "libcuda.so.1";
  std::string nccl_library = "libnccl.so.2";
  // NVML tells how much of a GPU is used to a process without a context there. For status alone.
  std::string nvml_library = "libnvidia-ml.so.1";
  // Arenas on all GPUs together, in bytes. 256 GiB: 8 GPUs with the gradients of a model of 8 G
  // float32 parameters each.
  std::uint64_t quota_gpu_bytes_per_user = std::uint64_t{256} << 30;
  // A worker whose trainers have gone is kept for so long for those that come next: its context and
  // its communicators are dear.
  absl::Duration worker_idle_limit = absl::Minutes(1);
  // When a job's all-reduce between GPUs begins (collective_gate.h has reasons).
  CollectiveGate gate = CollectiveGate::kAuto;
  // MPS was started with -multiuser-server. Nothing tells a process so; without it a second user's
  // contexts hang until the first one's are gone, and are refused instead.
  bool mps_multiuser = false;
  // MPS's control program, by which a lost trainer whose process lives is kept from a shared GPU. A
  // name that PATH has, or a path. Empty: never.
  std::string mps_control = "nvidia-cuda-mps-control";

  // ---- Log ----
  LogLevel log_level = LogLevel::kInfo;
  LogFormat log_format = LogFormat::kText;
  // Absolute path, appended to. Empty: stderr.
  std::string log_file;
};

// Options from the command line: --config=FILE is read first, other flags override its fields.
// Nothing is read that was not named. INVALID_ARGUMENT lists every fault of the file and of the
// flags, one per line, each with FILE:LINE or the flag's name and with what is allowed; main prints
// it and exits with 2.
absl::StatusOr<Options> LoadOptions(int argc, const char* const* argv);

// What --help or --version print, if either is among the arguments; main prints it and exits with
// 0.
std::optional<std::string> HelpOrVersion(int argc, const char* const* argv);

// OK, or INVALID_ARGUMENT with every fault, one per line, each with its field's name. LoadOptions()
// has called it; for Options that were filled in by hand.
absl::Status Validate(const Options& options);

}  // namespace gradsync

#endif  // DAEMON_CONFIG_OPTIONS_H_
