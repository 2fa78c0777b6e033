// Finds out whether this machine, this user and this daemon are ready for training with gradsync,
// and what to do if they are not. Works without a daemon and without a GPU; changes nothing.

#ifndef TOOLS_GRADSYNCCTL_DOCTOR_DOCTOR_H_
#define TOOLS_GRADSYNCCTL_DOCTOR_DOCTOR_H_

#include <string>
#include <vector>

#include "absl/status/statusor.h"
#include "absl/time/time.h"
#include "gradsync/v1/introspection.pb.h"

namespace gradsync {

enum class Verdict { kOk, kWarning, kFailure };

// One line each.
struct Finding {
  std::string check;
  Verdict verdict = Verdict::kOk;
  std::string what;
  std::string remedy;  // empty: there is nothing to do
};

// The machine, user and daemon that the doctor looks at.
struct DoctorSubject {
  // Goes before /dev, /proc and /sys; empty except in tests.
  std::string root;
  // As dlopen takes them.
  std::string cuda_library = "libcuda.so.1";
  std::string nccl_library = "libnccl.so.2";
  // CUDA_MPS_PIPE_DIRECTORY of the user who runs this.
  std::string mps_pipe_directory = "/tmp/nvidia-mps";
  std::string socket;
  absl::Duration timeout = absl::Seconds(5);  // of each connection
  // The daemon's status, or why there is none.
  absl::StatusOr<v1::GetStatusResponse> daemon = absl::UnavailableError("not asked");
};

// In the order in which a person would look. The libraries are opened in this process.
std::vector<Finding> Diagnose(const DoctorSubject& subject);

}  // namespace gradsync

#endif  // TOOLS_GRADSYNCCTL_DOCTOR_DOCTOR_H_
