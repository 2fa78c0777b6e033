// Experiment (d): can a process import a descriptor of GPU memory (cuMemExportToShareableHandle)
// from another PID namespace? Containers need this.
//
// The importer is the first process of a new PID namespace, with a /proc of its own, as in a
// container: the driver looks itself up there. If that needs rights, the importer enters a new user
// namespace too. It gets the descriptor over a socket.
//
// holds: importer and exporter each read what the other one has written.
// not available: the machine does not allow such a namespace.

#include <cuda.h>
#include <sched.h>
#include <sys/mount.h>
#include <sys/wait.h>
#include <unistd.h>

#include <cerrno>
#include <cstring>

#include "tests/fakes/cuda_process.h"
#include "tests/gpu/experiment.h"

namespace gradsync::gpu {
namespace {

constexpr std::size_t kBytes = std::size_t{4} << 20;
constexpr std::uint32_t kSeven = 0x40E00000;  // 7.0f
constexpr std::uint32_t kNine = 0x41100000;   // 9.0f

void Set(CUdeviceptr address, std::uint32_t bits, CUstream stream) {
  CUDA_OK(cuMemsetD32Async(address, bits, kBytes / sizeof(bits), stream));
  CUDA_OK(cuStreamSynchronize(stream));
}

// Runs in the new namespace.
void Import(const Line& first) {
  const Message arena = first.Expect("arena");
  fakes::EnterContext();
  CUmemGenericAllocationHandle handle = 0;
  const CUresult imported = cuMemImportFromShareableHandle(
      &handle, reinterpret_cast<void*>(static_cast<std::uintptr_t>(arena.descriptor.get())),
      CU_MEM_HANDLE_TYPE_POSIX_FILE_DESCRIPTOR);
  if (imported != CUDA_SUCCESS) {
    first.Send("import failed: " + std::to_string(imported));
    return;
  }
  const fakes::Mapped memory = fakes::MapHandle(handle, kBytes);
  CUstream stream = fakes::MakeStream();
  const bool right = fakes::ReadFloats(memory.address, 1, stream)[0] == 7;
  Set(memory.address, kNine, stream);
  first.Send(right ? "imported" : "reads something else");
}

// Mounts the /proc of this process's PID namespace, for this process and its children alone.
bool MountProc() {
  return mount(nullptr, "/", nullptr, MS_REC | MS_PRIVATE, nullptr) == 0 &&
         mount("proc", "/proc", "proc", MS_NOSUID | MS_NODEV | MS_NOEXEC, nullptr) == 0;
}

void Importer(const Line& first) {
  constexpr int kNamespaces = CLONE_NEWPID | CLONE_NEWNS;
  if (unshare(kNamespaces) != 0 && unshare(CLONE_NEWUSER | kNamespaces) != 0) {
    first.Send(std::string("no namespace: ") + std::strerror(errno));
    return;
  }
  const pid_t child = fork();
  if (child == 0) {
    if (!MountProc()) {
      first.Send(std::string("no /proc of its own: ") + std::strerror(errno));
      _exit(0);
    }
    first.Send("pid " + std::to_string(getpid()));
    Import(first);
    _exit(0);
  }
  waitpid(child, nullptr, 0);
}

Answer Ask() {
  OtherProcess importer("importer");
  const std::optional<Message> there = importer.line().Receive();
  if (!there.has_value() || there->text != "pid 1") {
    return {Answer::Kind::kNotAvailable, there.has_value() ? there->text : "no answer"};
  }
  fakes::EnterContext();
  CUstream stream = fakes::MakeStream();
  const fakes::Mapped memory = fakes::MakeMapped(kBytes);
  Set(memory.address, kSeven, stream);
  int exported = -1;
  CUDA_OK(cuMemExportToShareableHandle(&exported, memory.handle,
                                       CU_MEM_HANDLE_TYPE_POSIX_FILE_DESCRIPTOR, 0));
  const Descriptor descriptor(exported);
  importer.line().Send("arena", descriptor.get());
  const std::optional<Message> answer = importer.line().Receive();
  Fact("importer", answer.has_value() ? answer->text : "no answer");
  const float written = fakes::ReadFloats(memory.address, 1, stream)[0];
  Fact("its_write_is_seen", written == 9);
  if (!answer.has_value() || answer->text != "imported" || written != 9) {
    return {Answer::Kind::kDoesNotHold, "the import across PID namespaces failed"};
  }
  return {};
}

}  // namespace
}  // namespace gradsync::gpu

int main(int argc, char** argv) {
  using namespace gradsync::gpu;  // NOLINT(google-build-using-namespace): main is nothing else
  return RunExperiment(argc, argv, {{"importer", Importer}}, Ask);
}
