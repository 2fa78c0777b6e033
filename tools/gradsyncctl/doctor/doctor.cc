#include "tools/gradsyncctl/doctor/doctor.h"

#include "tools/gradsyncctl/doctor/checks.h"

namespace gradsync {

std::vector<Finding> Diagnose(const DoctorSubject& subject) {
  Findings findings;
  CheckMemory(subject, &findings);
  const DaemonProcessOwner owner = CheckSockets(subject, &findings);
  CheckNamespaces(subject, owner, &findings);
  CheckDescriptors(subject, owner, &findings);
  const std::size_t gpus = CheckDeviceFiles(subject, &findings);
  CheckLibraries(subject, gpus, &findings);
  CheckMps(subject, gpus, owner, &findings);
  CheckDaemon(subject, gpus, owner, &findings);
  return findings;
}

}  // namespace gradsync
