#include "tests/client/cuda_worker_role.h"

#include <fcntl.h>
#include <sys/mman.h>
#include <unistd.h>

#include <cstring>
#include <sstream>
#include <thread>
#include <utility>

#include "absl/strings/str_cat.h"
#include "google/protobuf/wrappers.pb.h"
#include "gtest/gtest.h"
#include "tests/fakes/cuda_process.h"
#include "tests/fakes/isolated_test.h"
#include "tests/kit/deadline.h"

namespace gradsync {
namespace {

using google::protobuf::BytesValue;

constexpr int kRoleSocket = 3;

void Send(const daemon::MessageSocket& socket, const std::string& text,
          absl::Span<const int> fds = {}) {
  BytesValue message;
  message.set_value(text);
  const auto sent = socket.Send(message, fds, daemon::MessageSocket::Wait::kYes);
  EXPECT_TRUE(sent.ok()) << sent;
}

// Empty at the end.
std::string Receive(const daemon::MessageSocket& socket,
                    std::vector<daemon::UniqueFd>* fds = nullptr) {
  auto received = socket.Receive();
  BytesValue message;
  if (!received.ok() || received->end || !message.ParseFromString(received->bytes)) return "";
  if (fds != nullptr) *fds = std::move(received->descriptors);
  return message.value();
}

std::byte* MapSemaphores(int memfd, std::size_t bytes) {
  void* const pages = mmap(nullptr, bytes, PROT_READ | PROT_WRITE, MAP_SHARED, memfd, 0);
  EXPECT_NE(pages, MAP_FAILED);
  return static_cast<std::byte*>(pages);
}

std::size_t DoneOffset(std::size_t bucket) {
  return sizeof(SemaphorePageHeader) + bucket * sizeof(BucketSemaphore);
}

ROLE(cuda_worker) {
  const daemon::MessageSocket socket{daemon::UniqueFd(kRoleSocket)};
  std::istringstream options(Receive(socket));
  std::string memory;
  std::size_t semaphore_bytes = 0;
  options >> memory >> semaphore_bytes;
  fakes::EnterContext();
  CUstream stream = fakes::MakeStream();

  const int semaphores = memfd_create("semaphores", MFD_CLOEXEC | MFD_ALLOW_SEALING);
  if (ftruncate(semaphores, static_cast<off_t>(semaphore_bytes)) != 0) return 1;
  fcntl(semaphores, F_ADD_SEALS, F_SEAL_SHRINK);
  std::byte* const pages = MapSemaphores(semaphores, semaphore_bytes);
  CUdeviceptr words = 0;
  CUDA_OK(cuMemHostRegister(pages, semaphore_bytes, CU_MEMHOSTREGISTER_DEVICEMAP));
  CUDA_OK(cuMemHostGetDevicePointer(&words, pages, 0));

  CUdeviceptr arena = 0;
  if (memory == "ipc") {
    CUipcMemHandle handle;
    CUDA_OK(cuMemAlloc(&arena, kRoleArenaBytes));
    CUDA_OK(cuIpcGetMemHandle(&handle, arena));
    Send(socket, {handle.reserved, sizeof(handle)}, {semaphores});
  } else {
    const fakes::Mapped mapped = fakes::MakeMapped(kRoleArenaBytes);
    arena = mapped.address;
    int exported = -1;
    CUDA_OK(cuMemExportToShareableHandle(&exported, mapped.handle,
                                         CU_MEM_HANDLE_TYPE_POSIX_FILE_DESCRIPTOR, 0));
    Send(socket, "vmm", {exported, semaphores});
    close(exported);
  }

  for (std::string line = Receive(socket); !line.empty(); line = Receive(socket)) {
    std::istringstream command(line);
    std::string what;
    std::size_t place = 0;
    std::uint64_t value = 0;
    std::size_t count = 0;
    command >> what >> place >> value >> count;
    std::string answer = "done";
    if (what == "fill") {
      CUDA_OK(cuMemsetD32Async(arena + place, static_cast<unsigned>(value), count, stream));
    } else if (what == "done") {
      CUDA_OK(cuStreamWriteValue64(stream, words + DoneOffset(place), value, 0));
    } else {
      answer = absl::StrCat(fakes::ReadFloats(arena + place, 1, stream)[0]);
    }
    Send(socket, answer);
  }
  return 0;
}

}  // namespace

CudaWorkerRole::CudaWorkerRole(Memory memory, std::size_t buckets) : buckets_(buckets) {
  auto pair = daemon::MessageSocket::Pair();
  EXPECT_TRUE(pair.ok());
  socket_ = std::make_unique<daemon::MessageSocket>(std::move(pair->first));
  process_ = fakes::StartRole("cuda_worker", {pair->second.fd()});
  pair->second.Release();
  Send(*socket_, absl::StrCat(memory == Memory::kIpc ? "ipc " : "vmm ", SemaphoreBytes(buckets)));
  std::vector<daemon::UniqueFd> fds;
  std::string told = Receive(*socket_, &fds);
  semaphores_ = std::move(fds.back());
  if (memory == Memory::kIpc) {
    ipc_handle_ = std::move(told);
  } else {
    arena_ = std::move(fds.front());
  }
  pages_ = MapSemaphores(semaphores_.get(), SemaphoreBytes(buckets));
}

CudaWorkerRole::~CudaWorkerRole() { munmap(pages_, SemaphoreBytes(buckets_)); }

std::vector<int> CudaWorkerRole::descriptors() const {
  if (!arena_.valid()) return {semaphores_.get()};
  return {arena_.get(), semaphores_.get()};
}

BucketSemaphore& CudaWorkerRole::semaphore(std::size_t bucket) const {
  return *reinterpret_cast<BucketSemaphore*>(pages_ + DoneOffset(bucket));
}

bool CudaWorkerRole::AwaitReady(std::size_t bucket, std::uint64_t step) const {
  const std::uint64_t deadline = NowNs() + kPatienceMs * 1'000'000ull;
  while (semaphore(bucket).ready.load(std::memory_order_acquire) != step) {
    if (NowNs() > deadline) return false;
    std::this_thread::yield();
  }
  return true;
}

void CudaWorkerRole::Fill(std::size_t offset, float value, std::size_t count) {
  std::uint32_t bits;
  std::memcpy(&bits, &value, sizeof(bits));
  Call(absl::StrCat("fill ", offset, " ", bits, " ", count));
}

void CudaWorkerRole::WriteDone(std::size_t bucket, std::uint64_t step) {
  Call(absl::StrCat("done ", bucket, " ", step));
}

float CudaWorkerRole::Read(std::size_t offset) {
  return std::stof(Call(absl::StrCat("read ", offset)));
}

void CudaWorkerRole::Kill() { process_->Kill(); }

std::string CudaWorkerRole::Call(const std::string& command) {
  Send(*socket_, command);
  return Receive(*socket_);
}

}  // namespace gradsync
