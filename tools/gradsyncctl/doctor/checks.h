// The doctor's checks, one function per subject. Each adds at least one finding.

#ifndef TOOLS_GRADSYNCCTL_DOCTOR_CHECKS_H_
#define TOOLS_GRADSYNCCTL_DOCTOR_CHECKS_H_

#include <sys/types.h>

#include <cstddef>
#include <string>
#include <vector>

#include "tools/gradsyncctl/doctor/doctor.h"

namespace gradsync {

using Findings = std::vector<Finding>;

inline void AddOk(const char* check, std::string what, Findings* findings) {
  findings->push_back({check, Verdict::kOk, std::move(what), ""});
}
inline void AddWarning(const char* check, std::string what, std::string remedy,
                       Findings* findings) {
  findings->push_back({check, Verdict::kWarning, std::move(what), std::move(remedy)});
}
inline void AddFailure(const char* check, std::string what, std::string remedy,
                       Findings* findings) {
  findings->push_back({check, Verdict::kFailure, std::move(what), std::move(remedy)});
}

// The process that listens at the daemon's socket, as the kernel reports it.
struct DaemonProcessOwner {
  bool known = false;
  uid_t uid = 0;
  pid_t pid = 0;  // 0: in another PID namespace
};

// The kernel's version, memfds, the cgroup's memory.
void CheckMemory(const DoctorSubject& subject, Findings* findings);

// Device files. Returns how many GPUs there are.
std::size_t CheckDeviceFiles(const DoctorSubject& subject, Findings* findings);
// The driver and NCCL, as this process finds them.
void CheckLibraries(const DoctorSubject& subject, std::size_t gpus, Findings* findings);
void CheckMps(const DoctorSubject& subject, std::size_t gpus, const DaemonProcessOwner& owner,
              Findings* findings);

// Both sockets: they exist, are of the right kind and open to this user, and somebody listens.
DaemonProcessOwner CheckSockets(const DoctorSubject& subject, Findings* findings);
// Namespaces that hide from the daemon which process and user a trainer is.
void CheckNamespaces(const DoctorSubject& subject, const DaemonProcessOwner& owner,
                     Findings* findings);
void CheckDescriptors(const DoctorSubject& subject, const DaemonProcessOwner& owner,
                      Findings* findings);
// The daemon's answers: version, warnings, which of this machine's GPUs it sees, the peer port.
void CheckDaemon(const DoctorSubject& subject, std::size_t gpus, const DaemonProcessOwner& owner,
                 Findings* findings);

}  // namespace gradsync

#endif  // TOOLS_GRADSYNCCTL_DOCTOR_CHECKS_H_
