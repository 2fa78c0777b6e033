#include "daemon/app/room_options.h"

#include <algorithm>
#include <cstddef>
#include <cstdint>

#include "absl/time/time.h"
#include "daemon/reduce/available_cpus.h"

namespace gradsync::daemon {
namespace {

std::uint64_t ToNs(absl::Duration duration) {
  return static_cast<std::uint64_t>(absl::ToInt64Nanoseconds(duration));
}

}  // namespace

SessionPolicy SessionPolicyOf(const Options& options) {
  SessionPolicy policy;
  policy.require_token = options.require_token;
  policy.allow_overflow_uid = options.allow_overflow_uid;
  policy.lease_ns = ToNs(options.lease);
  policy.step_timeout_ns = ToNs(options.step_timeout);
  policy.staging_bytes = options.staging_bytes;
  policy.quota_sessions_per_user = options.quota_sessions_per_user;
  policy.quota_layouts_per_session = options.quota_layouts_per_session;
  return policy;
}

DecodeLimits DecodeLimitsOf(const Options& options) {
  return {options.quota_parameters_per_layout, options.quota_buckets_per_layout,
          options.staging_bytes};
}

PeerOptions PeerOptionsOf(const Options& options) {
  PeerOptions peer;
  peer.listen = options.peer_listen;
  peer.coordinators = options.peer_coordinators;
  peer.node_name = options.node_name;
  peer.tls_certificate = options.peer_tls_certificate;
  peer.tls_key = options.peer_tls_key;
  peer.tls_ca = options.peer_tls_ca;
  peer.tls_name = options.peer_tls_name;
  peer.gpus = options.cuda_library != WorkerSupervisorOptions::kNoGpus;
  peer.quota_jobs_per_user = options.quota_jobs_per_user;
  peer.limits = DecodeLimitsOf(options);
  peer.engine.lanes = static_cast<int>(options.engine_lanes);
  peer.engine.chunk_bytes = options.engine_chunk_bytes;
  peer.engine.wire = options.engine_wire_type;
  peer.engine.silence_limit = options.engine_timeout;
  peer.worker_idle_limit_ns = ToNs(options.worker_idle_limit);
  return peer;
}

WorkerSupervisorOptions WorkerOptionsOf(const Options& options) {
  WorkerSupervisorOptions workers;
  workers.cuda_library = options.cuda_library;
  workers.nccl_library = options.nccl_library;
  workers.nvml_library = options.nvml_library;
  workers.mps_multiuser = options.mps_multiuser;
  // To start takes a core for a while.
  workers.starting_at_once_per_user = static_cast<std::size_t>(std::max(1, AvailableCpus() / 4));
  workers.idle_limit_ns = ToNs(options.worker_idle_limit);
  return workers;
}

}  // namespace gradsync::daemon
