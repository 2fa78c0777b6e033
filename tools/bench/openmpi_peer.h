// A rank of Open MPI: MPI_Allreduce in place, through shared memory on one machine.

#ifndef TOOLS_BENCH_OPENMPI_PEER_H_
#define TOOLS_BENCH_OPENMPI_PEER_H_

#include <memory>
#include <string>
#include <vector>

#include "absl/status/statusor.h"
#include "tools/bench/peer.h"

namespace gradsync::bench {

// The launcher's command line up to the ranks' own; NOT_FOUND if this build or machine has no Open
// MPI. Its ranks keep their files under `directory`, their shared memory under `shared_directory`.
absl::StatusOr<std::vector<std::string>> OpenMpiLauncher(std::uint32_t ranks,
                                                         const std::string& directory,
                                                         const std::string& shared_directory);

// This process' rank, from the launcher's environment.
absl::StatusOr<std::uint32_t> OpenMpiRank();

std::unique_ptr<Peer> MakeOpenMpiPeer(const PeerOptions& options);

}  // namespace gradsync::bench

#endif  // TOOLS_BENCH_OPENMPI_PEER_H_
