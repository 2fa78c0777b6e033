// Device memory: how long it lives, who may access it, and how processes pass it to each other.

#include <gmock/gmock.h>
#include <sys/socket.h>
#include <unistd.h>

#include <cerrno>
#include <cstring>
#include <string>
#include <vector>

#include "tests/fakes/cuda_process.h"
#include "tests/fakes/isolated_test.h"
#include "tests/kit/deadline.h"

namespace gradsync::fakes {
namespace {

using testing::ElementsAre;
using testing::HasSubstr;
using testing::IsEmpty;

constexpr std::size_t kBytes = 2 * kMebibyte;
constexpr std::uint32_t kOne = 0x3F800000;  // 1.0f

// ---- messages between the processes of a test ----

void Send(int socket, const void* bytes, std::size_t size, int fd = -1) {
  alignas(cmsghdr) char control[CMSG_SPACE(sizeof(int))] = {};
  iovec data{const_cast<void*>(bytes), size};
  msghdr message{};
  message.msg_iov = &data;
  message.msg_iovlen = 1;
  if (fd >= 0) {
    message.msg_control = control;
    message.msg_controllen = sizeof(control);
    cmsghdr* const header = CMSG_FIRSTHDR(&message);
    header->cmsg_level = SOL_SOCKET;
    header->cmsg_type = SCM_RIGHTS;
    header->cmsg_len = CMSG_LEN(sizeof(int));
    std::memcpy(CMSG_DATA(header), &fd, sizeof(int));
  }
  ASSERT_EQ(sendmsg(socket, &message, MSG_NOSIGNAL), static_cast<ssize_t>(size));
}

// The descriptor that a message carried, or -1.
int Receive(int socket, void* bytes, std::size_t size) {
  alignas(cmsghdr) char control[CMSG_SPACE(sizeof(int))] = {};
  iovec data{bytes, size};
  msghdr message{};
  message.msg_iov = &data;
  message.msg_iovlen = 1;
  message.msg_control = control;
  message.msg_controllen = sizeof(control);
  if (!AwaitReadable(socket, kPatienceMs)) return -1;
  if (recvmsg(socket, &message, MSG_CMSG_CLOEXEC) != static_cast<ssize_t>(size)) return -1;
  int fd = -1;
  if (cmsghdr* const header = CMSG_FIRSTHDR(&message)) {
    std::memcpy(&fd, CMSG_DATA(header), sizeof(int));
  }
  return fd;
}

struct SocketPair {
  SocketPair() {
    int ends[2] = {-1, -1};
    socketpair(AF_UNIX, SOCK_SEQPACKET | SOCK_CLOEXEC, 0, ends);
    mine = Descriptor(ends[0]);
    theirs = Descriptor(ends[1]);
  }
  Descriptor mine, theirs;
};

// Tells the test that this process has reached a point, and waits for the answer.
void Meet(int socket) {
  char byte = 0;
  Send(socket, &byte, 1);
  Receive(socket, &byte, 1);
}

CUmemGenericAllocationHandle Import(int fd) {
  CUmemGenericAllocationHandle handle = 0;
  CUDA_OK(cuMemImportFromShareableHandle(&handle,
                                         reinterpret_cast<void*>(static_cast<std::intptr_t>(fd)),
                                         CU_MEM_HANDLE_TYPE_POSIX_FILE_DESCRIPTOR));
  return handle;
}

int Export(CUmemGenericAllocationHandle handle) {
  int fd = -1;
  CUDA_OK(cuMemExportToShareableHandle(&fd, handle, CU_MEM_HANDLE_TYPE_POSIX_FILE_DESCRIPTOR, 0));
  return fd;
}

// ---- virtual memory management ----

ISOLATED_TEST(VirtualMemory, LivesUntilItsLastHandleOrMapping, MachineWithGpus(1)) {
  const FakeMachine machine;
  EnterContext();
  const std::size_t before = machine.DeviceBytes(0);
  const Mapped mapped = MakeMapped(kBytes);
  EXPECT_EQ(machine.DeviceBytes(0), before + kBytes);
  const int fd = Export(mapped.handle);
  CUDA_OK(cuMemRelease(mapped.handle));
  EXPECT_EQ(machine.DeviceBytes(0), before + kBytes);
  Unmap(mapped);
  EXPECT_EQ(machine.DeviceBytes(0), before + kBytes);  // the exported descriptor keeps it
  close(fd);
  EXPECT_EQ(machine.DeviceBytes(0), before);
  EXPECT_EQ(cuMemRelease(mapped.handle), CUDA_ERROR_INVALID_VALUE);
}

ISOLATED_TEST(VirtualMemory, AllocatesNoMoreThanTheFreeMemory, MachineWithGpus(1)) {
  EnterContext();
  std::size_t free = 0, total = 0;
  CUDA_OK(cuMemGetInfo(&free, &total));
  EXPECT_EQ(total, 1024 * kMebibyte);
  EXPECT_EQ(free, total - 64 * kMebibyte);  // the context takes 64 MiB
  const CUmemAllocationProp properties = ExportableOn(0);
  CUmemGenericAllocationHandle handle = 0;
  EXPECT_EQ(cuMemCreate(&handle, free + kBytes, &properties, 0), CUDA_ERROR_OUT_OF_MEMORY);
  EXPECT_EQ(cuMemCreate(&handle, free, &properties, 0), CUDA_SUCCESS);
  CUdeviceptr address = 0;
  EXPECT_EQ(cuMemAlloc(&address, 1), CUDA_ERROR_OUT_OF_MEMORY);
}

ISOLATED_TEST(VirtualMemory, SizesAreMultiplesOfTheGranularity, MachineWithGpus(1)) {
  EnterContext();
  const CUmemAllocationProp properties = ExportableOn(0);
  std::size_t granularity = 0;
  CUDA_OK(cuMemGetAllocationGranularity(&granularity, &properties,
                                        CU_MEM_ALLOC_GRANULARITY_RECOMMENDED));
  CUmemGenericAllocationHandle handle = 0;
  CUdeviceptr address = 0;
  EXPECT_EQ(cuMemCreate(&handle, granularity / 2, &properties, 0), CUDA_ERROR_INVALID_VALUE);
  EXPECT_EQ(cuMemAddressReserve(&address, granularity / 2, 0, 0, 0), CUDA_ERROR_INVALID_VALUE);
}

ISOLATED_TEST(VirtualMemory, CannotBeAccessedWithoutPermission, MachineWithGpus(1)) {
  EnterContext();
  const CUmemAllocationProp properties = ExportableOn(0);
  CUmemGenericAllocationHandle handle = 0;
  CUdeviceptr address = 0;
  CUDA_OK(cuMemCreate(&handle, kBytes, &properties, 0));
  CUDA_OK(cuMemAddressReserve(&address, kBytes, 0, 0, 0));
  CUDA_OK(cuMemMap(address, kBytes, 0, handle, 0));
  CUmemAccessDesc access{};
  access.location = {CU_MEM_LOCATION_TYPE_DEVICE, 0};
  access.flags = CU_MEM_ACCESS_FLAGS_PROT_READ;
  CUDA_OK(cuMemSetAccess(address, kBytes, &access, 1));
  CUstream stream = MakeStream();
  EXPECT_THAT(ReadFloats(address, 1, stream), ElementsAre(0.0f));
  CUDA_OK(cuMemsetD32Async(address, kOne, 1, stream));
  EXPECT_EQ(cuStreamSynchronize(stream), CUDA_ERROR_ILLEGAL_ADDRESS);
}

ISOLATED_TEST(VirtualMemory, UseAfterUnmapIsStickyForTheProcess, MachineWithGpus(1)) {
  EnterContext();
  CUstream stream = MakeStream();
  const Mapped mapped = MakeMapped(kBytes);
  Unmap(mapped);
  CUDA_OK(cuMemsetD32Async(mapped.address, kOne, 1, stream));
  EXPECT_EQ(cuStreamSynchronize(stream), CUDA_ERROR_ILLEGAL_ADDRESS);
  CUdeviceptr address = 0;
  EXPECT_EQ(cuMemAlloc(&address, 1), CUDA_ERROR_ILLEGAL_ADDRESS);
  EXPECT_THAT(FakeMachine().Violations(), ElementsAre(HasSubstr("sticky error 700")));
}

ISOLATED_TEST(VirtualMemory, UnmapWhileInUseIsAViolation, MachineWithGpus(1)) {
  EnterContext();
  CUstream stream = MakeStream();
  const Mapped mapped = MakeMapped(kBytes);
  Word word;
  CUDA_OK(cuStreamWaitValue64(stream, word.address(), 1, CU_STREAM_WAIT_VALUE_GEQ));
  CUDA_OK(cuMemsetD32Async(mapped.address, kOne, 1, stream));
  Unmap(mapped);
  EXPECT_THAT(FakeMachine().Violations(),
              ElementsAre("cuMemUnmap of memory that cuMemsetD32Async will still touch"));
  word.Store(1);
  EXPECT_EQ(cuStreamSynchronize(stream), CUDA_ERROR_ILLEGAL_ADDRESS);
}

ISOLATED_TEST(VirtualMemory, AccessBeyondTheEndIsIllegal, MachineWithGpus(1)) {
  EnterContext();
  CUstream stream = MakeStream();
  const Mapped mapped = MakeMapped(kBytes);
  CUDA_OK(cuMemsetD8Async(mapped.address + kBytes - 1, 1, 1, stream));
  CUDA_OK(cuStreamSynchronize(stream));
  CUDA_OK(cuMemsetD8Async(mapped.address + kBytes - 1, 1, 2, stream));
  EXPECT_EQ(cuStreamSynchronize(stream), CUDA_ERROR_ILLEGAL_ADDRESS);
}

ISOLATED_TEST(VirtualMemory, CpuCannotReadADeviceAddress, MachineWithGpus(1)) {
  EnterContext();
  const Mapped mapped = MakeMapped(kBytes);
  // Nothing may access the reserved addresses.
  EXPECT_EQ(write(STDOUT_FILENO, reinterpret_cast<const void*>(mapped.address), 1), -1);
  EXPECT_EQ(errno, EFAULT);
}

ROLE(vmm_importer) {
  EnterContext();
  char byte = 0;
  const int fd = Receive(3, &byte, 1);
  const Mapped mapped = MapHandle(Import(fd), kBytes);
  close(fd);
  CUDA_OK(cuMemRelease(mapped.handle));
  CUDA_OK(cuMemsetD32Async(mapped.address, kOne, 1, MakeStream()));
  CUDA_OK(cuCtxSynchronize());
  Meet(3);
  Unmap(mapped);
  Meet(3);
  return 0;
}

ISOLATED_TEST(VirtualMemory, IsSharedByItsDescriptor, MachineWithGpus(1)) {
  const FakeMachine machine;
  EnterContext();
  const SocketPair sockets;
  const Mapped mapped = MakeMapped(kBytes);
  CUstream stream = MakeStream();
  const auto importer = StartRole("vmm_importer", {sockets.theirs.get()});
  char byte = 0;
  {
    const Descriptor exported(Export(mapped.handle));
    Send(sockets.mine.get(), &byte, 1, exported.get());
  }
  Receive(sockets.mine.get(), &byte, 1);
  EXPECT_THAT(ReadFloats(mapped.address, 1, stream), ElementsAre(1.0f));
  // The memory stays while the importer has it, though the exporter has released it.
  CUDA_OK(cuMemRelease(mapped.handle));
  Unmap(mapped);
  const std::size_t contexts = 2 * 64 * kMebibyte;
  EXPECT_EQ(machine.DeviceBytes(0), contexts + kBytes);
  Send(sockets.mine.get(), &byte, 1);
  Receive(sockets.mine.get(), &byte, 1);
  EXPECT_EQ(machine.DeviceBytes(0), contexts);
  Send(sockets.mine.get(), &byte, 1);
  EXPECT_TRUE(Succeeds(*importer));
}

ISOLATED_TEST(VirtualMemory, KilledProcessFreesItsMemory, MachineWithGpus(1)) {
  const FakeMachine machine;
  const std::size_t before = machine.DeviceBytes(0);
  const SocketPair sockets;
  const auto importer = StartRole("vmm_importer", {sockets.theirs.get()});
  EnterContext();
  const Mapped mapped = MakeMapped(kBytes);
  char byte = 0;
  Send(sockets.mine.get(), &byte, 1, Export(mapped.handle));
  Receive(sockets.mine.get(), &byte, 1);
  importer->Kill();
  EXPECT_EQ(machine.DeviceBytes(0), before + 64 * kMebibyte + kBytes);
}

ROLE(vmm_exporter) {
  EnterContext();
  char byte = 0;
  const Mapped mapped = MakeMapped(kBytes);
  CUDA_OK(cuMemsetD32Async(mapped.address, kOne, 1, MakeStream()));
  CUDA_OK(cuCtxSynchronize());
  Send(3, &byte, 1, Export(mapped.handle));
  Meet(3);
  return 0;
}

ISOLATED_TEST(VirtualMemory, MappingOutlivesAKilledExporter, MachineWithGpus(1)) {
  const FakeMachine machine;
  EnterContext();
  CUstream stream = MakeStream();
  const SocketPair sockets;
  const auto exporter = StartRole("vmm_exporter", {sockets.theirs.get()});
  char byte = 0;
  const Descriptor fd(Receive(sockets.mine.get(), &byte, 1));
  const Mapped mapped = MapHandle(Import(fd.get()), kBytes);
  exporter->Kill();
  EXPECT_THAT(ReadFloats(mapped.address, 1, stream), ElementsAre(1.0f));
  EXPECT_EQ(machine.DeviceBytes(0), 64 * kMebibyte + kBytes);
}

ISOLATED_TEST(VirtualMemory, OnlyExportedDescriptorsCanBeImported, MachineWithGpus(1)) {
  EnterContext();
  CUmemGenericAllocationHandle handle = 0;
  for (const int fd : {STDOUT_FILENO, 1000}) {
    EXPECT_EQ(cuMemImportFromShareableHandle(
                  &handle, reinterpret_cast<void*>(static_cast<std::intptr_t>(fd)),
                  CU_MEM_HANDLE_TYPE_POSIX_FILE_DESCRIPTOR),
              CUDA_ERROR_INVALID_VALUE);
  }
}

MachineDescription WithoutDescriptors() {
  MachineDescription machine = MachineWithGpus(1);
  machine.gpus[0].posix_handles = false;
  return machine;
}

ISOLATED_TEST(VirtualMemory, DeviceMayRefuseDescriptors, WithoutDescriptors()) {
  EnterContext();
  const CUmemAllocationProp properties = ExportableOn(0);
  CUmemGenericAllocationHandle handle = 0;
  EXPECT_EQ(cuMemCreate(&handle, kBytes, &properties, 0), CUDA_ERROR_NOT_SUPPORTED);
}

ISOLATED_TEST(VirtualMemory, BelongsToOneDevice, MachineWithGpus(2)) {
  const FakeMachine machine;
  EnterContext(1);
  const Mapped on_first = MakeMapped(kBytes, 0);
  EXPECT_EQ(machine.DeviceBytes(0), kBytes);
  CUstream stream = MakeStream();
  CUDA_OK(cuMemsetD32Async(on_first.address, kOne, 1, stream));  // device 1 writes
  EXPECT_EQ(cuStreamSynchronize(stream), CUDA_ERROR_ILLEGAL_ADDRESS);
}

// ---- cuMemAlloc and legacy IPC ----

ROLE(ipc_opener) {
  EnterContext();
  CUipcMemHandle handle{};
  Receive(3, &handle, sizeof(handle));
  CUdeviceptr address = 0, again = 0;
  CUDA_OK(cuIpcOpenMemHandle(&address, handle, CU_IPC_MEM_LAZY_ENABLE_PEER_ACCESS));
  CUDA_OK(cuIpcOpenMemHandle(&again, handle, CU_IPC_MEM_LAZY_ENABLE_PEER_ACCESS));
  CUstream stream = MakeStream();
  const std::vector<float> first = ReadFloats(address, 1, stream);
  Meet(3);
  if (address != again || first[0] != 1.0f) return 1;
  CUDA_OK(cuIpcCloseMemHandle(again));
  CUDA_OK(cuIpcCloseMemHandle(address));
  return cuIpcCloseMemHandle(address) == CUDA_ERROR_INVALID_VALUE ? 0 : 1;
}

ISOLATED_TEST(LegacyIpc, SharesAWholeAllocation, MachineWithGpus(1)) {
  const FakeMachine machine;
  EnterContext();
  CUdeviceptr address = 0;
  CUDA_OK(cuMemAlloc(&address, kBytes));
  CUDA_OK(cuMemsetD32Async(address, kOne, 1, MakeStream()));
  CUDA_OK(cuCtxSynchronize());
  CUipcMemHandle handle{};
  CUDA_OK(cuIpcGetMemHandle(&handle, address));
  // No handle exists for the middle of an allocation or for mapped memory. This process itself
  // cannot open its handle.
  CUipcMemHandle none{};
  EXPECT_EQ(cuIpcGetMemHandle(&none, address + 512), CUDA_ERROR_INVALID_VALUE);
  EXPECT_EQ(cuIpcGetMemHandle(&none, MakeMapped(kBytes).address), CUDA_ERROR_INVALID_VALUE);
  CUdeviceptr own = 0;
  EXPECT_EQ(cuIpcOpenMemHandle(&own, handle, CU_IPC_MEM_LAZY_ENABLE_PEER_ACCESS),
            CUDA_ERROR_INVALID_CONTEXT);

  const SocketPair sockets;
  const auto opener = StartRole("ipc_opener", {sockets.theirs.get()});
  char byte = 0;
  Send(sockets.mine.get(), &handle, sizeof(handle));
  Receive(sockets.mine.get(), &byte, 1);
  EXPECT_THAT(machine.Violations(), IsEmpty());
  // While the other process has it open, freeing it is undefined behaviour.
  CUDA_OK(cuMemFree(address));
  EXPECT_THAT(machine.Violations(),
              ElementsAre("cuMemFree of memory that another process has open"));
  Send(sockets.mine.get(), &byte, 1);
  EXPECT_TRUE(Succeeds(*opener));
}

ISOLATED_TEST(LegacyIpc, SmallAllocationsShareABlockAndItsHandle, MachineWithGpus(1)) {
  const FakeMachine machine;
  EnterContext();
  const std::size_t before = machine.DeviceBytes(0);
  CUdeviceptr first = 0, second = 0;
  CUDA_OK(cuMemAlloc(&first, 1000));
  CUDA_OK(cuMemAlloc(&second, 1000));
  EXPECT_EQ(machine.DeviceBytes(0), before + kBytes);
  EXPECT_EQ(second - first, 1024u);
  CUipcMemHandle handle{}, other{};
  CUDA_OK(cuIpcGetMemHandle(&handle, first));
  CUDA_OK(cuIpcGetMemHandle(&other, second));
  EXPECT_EQ(std::memcmp(&handle, &other, sizeof(handle)), 0);
  CUDA_OK(cuMemFree(first));
  CUDA_OK(cuMemFree(second));
  EXPECT_EQ(machine.DeviceBytes(0), before);
  EXPECT_EQ(cuMemFree(second), CUDA_ERROR_INVALID_VALUE);
}

ISOLATED_TEST(LegacyMemory, IsFreedWithItsContext, MachineWithGpus(1)) {
  const FakeMachine machine;
  const std::size_t before = machine.DeviceBytes(0);
  EnterContext();
  MakeFloats(1);
  MakeFloats(1 << 20);
  EXPECT_GT(machine.DeviceBytes(0), before);
  CUDA_OK(cuDevicePrimaryCtxRelease(0));
  EXPECT_EQ(machine.DeviceBytes(0), before);
}

ISOLATED_TEST(LegacyMemory, UseAfterFreeIsStickyForTheProcess, MachineWithGpus(1)) {
  EnterContext();
  CUstream stream = MakeStream();
  const CUdeviceptr address = MakeFloats(1 << 20);
  CUDA_OK(cuMemFree(address));
  CUDA_OK(cuMemsetD32Async(address, kOne, 1, stream));
  EXPECT_EQ(cuStreamSynchronize(stream), CUDA_ERROR_ILLEGAL_ADDRESS);
  EXPECT_THAT(FakeMachine().Violations(), ElementsAre(HasSubstr("sticky error 700")));
}

// ---- host memory ----

ISOLATED_TEST(HostMemory, IsRegisteredOnceWithAnotherAddress, MachineWithGpus(1)) {
  EnterContext();
  static std::vector<float> pages(4096);
  const std::size_t bytes = pages.size() * sizeof(float);
  CUDA_OK(cuMemHostRegister(pages.data(), bytes, CU_MEMHOSTREGISTER_DEVICEMAP));
  EXPECT_EQ(cuMemHostRegister(pages.data() + 100, 4, 0), CUDA_ERROR_HOST_MEMORY_ALREADY_REGISTERED);
  CUdeviceptr address = 0;
  CUDA_OK(cuMemHostGetDevicePointer(&address, pages.data() + 1, 0));
  EXPECT_NE(address, reinterpret_cast<CUdeviceptr>(pages.data() + 1));
  CUstream stream = MakeStream();
  CUDA_OK(cuMemsetD32Async(address, kOne, 1, stream));
  CUDA_OK(cuStreamSynchronize(stream));
  EXPECT_EQ(pages[1], 1.0f);
  CUDA_OK(cuMemHostGetDevicePointer(&address, pages.data(), 0));
  CUDA_OK(cuStreamWriteValue64(stream, address, 1, CU_STREAM_WRITE_VALUE_DEFAULT));
  CUDA_OK(cuStreamSynchronize(stream));
  CUDA_OK(cuMemHostUnregister(pages.data()));
  EXPECT_EQ(cuStreamWriteValue64(stream, address, 1, CU_STREAM_WRITE_VALUE_DEFAULT),
            CUDA_ERROR_INVALID_VALUE);
  EXPECT_EQ(cuMemHostUnregister(pages.data()), CUDA_ERROR_HOST_MEMORY_NOT_REGISTERED);
  EXPECT_EQ(cuMemHostGetDevicePointer(&address, pages.data(), 0), CUDA_ERROR_INVALID_VALUE);
}

ISOLATED_TEST(HostMemory, MustBeMapped, MachineWithGpus(1)) {
  EnterContext();
  EXPECT_EQ(cuMemHostRegister(reinterpret_cast<void*>(0x1000), 4096, 0), CUDA_ERROR_INVALID_VALUE);
}

ISOLATED_TEST(HostMemory, CopiesToPageLockedMemoryAreAsynchronous, MachineWithGpus(1)) {
  EnterContext();
  const CUdeviceptr values = MakeFloats(1);
  void* locked = nullptr;
  CUDA_OK(cuMemHostAlloc(&locked, sizeof(float), 0));
  CUstream stream = MakeStream();
  Word word;
  CUDA_OK(cuStreamWaitValue64(stream, word.address(), 1, CU_STREAM_WAIT_VALUE_GEQ));
  CUDA_OK(cuMemsetD32Async(values, kOne, 1, stream));
  // A copy to pageable memory would hang here.
  CUDA_OK(cuMemcpyDtoHAsync(locked, values, sizeof(float), stream));
  EXPECT_EQ(*static_cast<float*>(locked), 0.0f);
  word.Store(1);
  CUDA_OK(cuStreamSynchronize(stream));
  EXPECT_EQ(*static_cast<float*>(locked), 1.0f);
}

}  // namespace
}  // namespace gradsync::fakes
