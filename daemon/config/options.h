// The options of gradsyncd. Each field is a flag of the same name and a field of the config file
// (config.proto). This file has defaults, units and reasons; option_table.cc has names, help texts
// and limits.

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
#include "proto/gradsync/limits.h"

namespace gradsync::daemon {

// With "-fd" the path must still fit sockaddr_un: 108 bytes with the NUL.
inline constexpr std::size_t kMaxSocketPathBytes = 103;

struct Options {
  // ---- Sockets ----
  // Unix socket for gRPC. File descriptors travel over "X-fd.sock" beside "X.sock". Not used if the
  // service manager passes the sockets. An absolute path that ends in ".sock" and has at most
  // kMaxSocketPathBytes.
  std::string socket = "/run/gradsync/gradsyncd.sock";
  // Permission bits of both sockets. By default the members of the sockets' group may train on this
  // node, and nobody else.
  std::uint32_t socket_mode = 0660;

  // ---- Identity ----
  // Refuse jobs without a token. Off by default, because user ids separate the jobs of different
  // users. Pods share user ids and need tokens.
  bool require_token = false;
  // Serve user id 65534. All users of a foreign user namespace appear under this id and cannot be
  // distinguished.
  bool allow_overflow_uid = false;
  // Show every job and user of the node to root in any pod of Kubernetes. Off by default, because
  // root in a pod does not administer the node.
  bool pod_root_sees_all = false;

  // ---- Reduction ----
  // Threads that add gradients. 0: min(4, max(1, cpus/8)), because the trainers need the cores.
  std::uint32_t reduce_threads = 0;
  // Bytes of each session's staging memory. Broadcast moves tensors through it in chunks, and a
  // small all-reduce must fit into it. A multiple of a page, 4096.
  std::uint64_t staging_bytes = std::uint64_t{32} << 20;

  // ---- Time ----
  // A trainer that answers no lease question for this long is lost: its process lives, but is
  // stopped or swapped out.
  absl::Duration lease = absl::Seconds(30);
  // Time from a step's first MarkReady to its commit. A step that takes longer is void. A job can
  // set its own limit. The default is long, because compilation and checkpoints happen inside
  // steps.
  absl::Duration step_timeout = absl::Minutes(30);
  // Time that running steps have to finish after SIGTERM. Afterwards the daemon needs up to
  // kStopLimit (stop_guard.h), 15 s. The files in deploy/ allow 45 s in all before SIGKILL.
  absl::Duration drain_timeout = absl::Seconds(25);

  // ---- Quotas of a user (uid and pod), a session or a layout ----
  // Enough for 16 jobs of 16 local ranks.
  std::uint32_t quota_sessions_per_user = 256;
  std::uint32_t quota_jobs_per_user = 64;
  // Bytes of all arenas and staging memory. Enough for 8 local ranks of a model of 2 billion
  // float32 parameters.
  std::uint64_t quota_arena_bytes_per_user = std::uint64_t{64} << 30;
  // One per wrapped module; a GAN has two.
  std::uint32_t quota_layouts_per_session = 64;
  // Enough for 100 GiB of gradients in buckets of 25 MiB.
  std::uint32_t quota_buckets_per_layout = kDefaultMaxBuckets;
  std::uint32_t quota_parameters_per_layout = 100'000;
  // Bytes that the daemon itself keeps for a user: names and plans of layouts, the state of steps,
  // timelines, jobs, and messages that trainers do not read. Enough for a layout of 100,000
  // parameters in each of 10 jobs.
  std::uint64_t quota_control_bytes_per_user = std::uint64_t{256} << 20;
  // Bytes of engines between nodes: memory that the daemon shares with their processes, and an
  // estimate of what each process has for itself. Enough for the engines of 64 jobs with the
  // default lanes and chunks, 28 MiB each, while all of them end and start again.
  std::uint64_t quota_engine_bytes_per_user = std::uint64_t{4} << 30;

  // ---- Other nodes ----
  // Address on which this daemon listens for daemons of other nodes, for jobs that span nodes:
  // "host:port" or "host" (port kPeerPort). If it is numeric, this node's engines listen there too.
  // Empty: there are no such jobs, and the trainers' `coordinator` is ignored.
  std::string peer_listen;
  // Lets peer_listen be an address that other machines reach although there is no TLS.
  bool peer_plain_text = false;
  // Hosts, domains and networks whose daemons may coordinate jobs of this node's trainers: see
  // CoordinatorList. Empty: all.
  std::string peer_coordinators;
  // Name of this node in messages and status. Empty: the host's name.
  std::string node_name;
  // PEM files; all three or none. With them, both sides of every connection between daemons must
  // have a certificate that `ca` has signed. Gradients in host memory are then encrypted.
  std::string peer_tls_certificate;
  std::string peer_tls_key;
  std::string peer_tls_ca;
  // Name in every node's certificate, for a certificate that all nodes share. Empty: a certificate
  // must have the address of its node.
  std::string peer_tls_name;
  // How nodes exchange the gradients of jobs that this daemon coordinates; the other nodes use the
  // same settings. The first two are also the most that an engine may have on this node, whatever
  // node coordinates the job. engine_settings.h has units and reasons.
  std::uint32_t engine_lanes = static_cast<std::uint32_t>(EngineSettings().lanes);
  std::uint64_t engine_chunk_bytes = EngineSettings().chunk_bytes;
  WireType engine_wire_type = EngineSettings().wire;
  absl::Duration engine_timeout = EngineSettings().silence_limit;

  // ---- GPUs ----
  // The driver and NCCL, as arguments of dlopen: names that the loader searches for, or paths.
  // Only workers open them, never the daemon itself.
  std::string cuda_library = "libcuda.so.1";
  std::string nccl_library = "libnccl.so.2";
  // NVML, which shows GPU memory to a process without a CUDA context. Used for status only.
  std::string nvml_library = "libnvidia-ml.so.1";
  // Bytes of all arenas on GPUs. Enough for 8 GPUs that each hold the gradients of a model of
  // 8 billion float32 parameters.
  std::uint64_t quota_gpu_bytes_per_user = std::uint64_t{256} << 30;
  // Time for which a worker without trainers is kept for the next ones, because its context and its
  // communicators take seconds to make.
  absl::Duration worker_idle_limit = absl::Minutes(1);
  // When an all-reduce between GPUs begins. collective_gate.h has reasons.
  CollectiveGate gate = CollectiveGate::kAuto;
  // True if MPS runs with -multiuser-server, which a process cannot find out. If false, the daemon
  // refuses a GPU's second user, whose contexts would hang until the first user's have ended.
  bool mps_multiuser = false;
  // Control program of MPS, a name in PATH or a path. If a trainer is lost but its process lives,
  // the daemon uses this program to keep that process off a shared GPU. Empty: the daemon does not
  // do so.
  std::string mps_control = "nvidia-cuda-mps-control";

  // ---- Log ----
  LogLevel log_level = LogLevel::kInfo;
  LogFormat log_format = LogFormat::kText;
  // Absolute path of a file to which lines are appended. Empty: stderr.
  std::string log_file;
};

// Reads the options from the command line. Reads --config=FILE first; other flags override its
// fields. Without --config no file is read. INVALID_ARGUMENT lists every fault of the file and the
// flags, one per line, with FILE:LINE or the flag's name, and with the allowed values; main prints
// it and exits with 2.
absl::StatusOr<Options> LoadOptions(int argc, const char* const* argv);

// Returns the output of --help or --version if one of them is among the arguments; main prints it
// and exits with 0.
std::optional<std::string> HelpOrVersion(int argc, const char* const* argv);

// True if --check is among the arguments: main validates the options and starts nothing.
bool ChecksOnly(int argc, const char* const* argv);

// Checks options that did not come from LoadOptions(). INVALID_ARGUMENT lists every fault, one per
// line, with its field's name.
absl::Status Validate(const Options& options);

}  // namespace gradsync::daemon

#endif  // DAEMON_CONFIG_OPTIONS_H_
