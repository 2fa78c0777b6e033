#include "daemon/peer/dialed_sockets.h"

#include <grpc/support/sync.h>
#include <grpcpp/version_info.h>

#include <algorithm>
#include <utility>

#include "daemon/base/clock.h"
#include "daemon/base/header_frames.h"

// gRPC's interface for the descriptors that it connects. The public headers declare only the name
// grpc_socket_mutator; the library exports the rest.
static_assert(GRPC_CPP_VERSION_MAJOR == 1 && GRPC_CPP_VERSION_MINOR == 51,
              "compare these with gRPC's src/core/lib/iomgr/socket_mutator.h");
struct grpc_mutate_socket_info;
struct grpc_socket_mutator_vtable {
  bool (*mutate_client)(int descriptor, grpc_socket_mutator* mutator);
  int (*compare)(grpc_socket_mutator* a, grpc_socket_mutator* b);
  void (*destroy)(grpc_socket_mutator* mutator);
  // Instead of mutate_client, if it is not null.
  bool (*mutate_any)(const grpc_mutate_socket_info* info, grpc_socket_mutator* mutator);
};
struct grpc_socket_mutator {
  const grpc_socket_mutator_vtable* vtable;
  gpr_refcount references;
};
void grpc_socket_mutator_init(grpc_socket_mutator* mutator,
                              const grpc_socket_mutator_vtable* vtable);

namespace gradsync::daemon {
namespace {

// A call of the stream, and those of ReachProbe while it is not answered.
constexpr std::uint32_t kMostCalls = 128;

struct Mutator : grpc_socket_mutator {
  std::shared_ptr<DialedSockets> sockets;
};

bool AddDescriptor(int descriptor, grpc_socket_mutator* mutator) {
  return static_cast<Mutator*>(mutator)->sockets->Add(descriptor);
}

int Compare(grpc_socket_mutator* a, grpc_socket_mutator* b) {
  const auto* const first = static_cast<Mutator*>(a)->sockets.get();
  const auto* const second = static_cast<Mutator*>(b)->sockets.get();
  return first == second ? 0 : (first < second ? -1 : 1);
}

void Destroy(grpc_socket_mutator* mutator) { delete static_cast<Mutator*>(mutator); }

constexpr grpc_socket_mutator_vtable kTable = {AddDescriptor, Compare, Destroy, nullptr};

}  // namespace

void DialedSockets::AddTo(const std::shared_ptr<DialedSockets>& sockets,
                          grpc::ChannelArguments* arguments) {
  auto mutator = std::make_unique<Mutator>();
  mutator->sockets = sockets;
  grpc_socket_mutator_init(mutator.get(), &kTable);
  arguments->SetSocketMutator(mutator.release());
}

bool DialedSockets::Add(int descriptor) {
  if (rate_ != nullptr && !rate_->Take(user_, MonotonicNowNs())) return false;
  const BorrowedSocket socket(descriptor);
  if (plain_text_) socket.LimitHeaders(HeaderFrames::OfServer(kMostCalls));
  MutexLock lock(&mutex_);
  if (closed_) return false;
  NoteRefusedLocked();
  dialed_.erase(std::remove_if(dialed_.begin(), dialed_.end(),
                               [](const Dialed& one) { return !one.socket.IsOpen(); }),
                dialed_.end());
  Dialed added{socket, {}};
  added.vain.Look(socket, input_);  // earlier messages make up for nothing
  added.vain.Forget();
  dialed_.push_back(added);
  return true;
}

void DialedSockets::Close() {
  MutexLock lock(&mutex_);
  closed_ = true;
  NoteRefusedLocked();
  for (const Dialed& one : dialed_) one.socket.End();
}

std::size_t DialedSockets::UnreadBytes() {
  std::size_t bytes = 0;
  MutexLock lock(&mutex_);
  for (const Dialed& one : dialed_) bytes += one.socket.UnreadBytes();
  return bytes;
}

std::uint64_t DialedSockets::Look() {
  std::uint64_t bytes = 0;
  MutexLock lock(&mutex_);
  for (Dialed& one : dialed_) bytes += one.vain.Look(one.socket, input_);
  return bytes;
}

bool DialedSockets::EndHarmful(const VainBytes::Most& most, std::uint64_t all) {
  MutexLock lock(&mutex_);
  for (Dialed& one : dialed_) {
    if (!one.vain.AreMany(most, all)) continue;
    one.vain.Forget();
    harmed_ = one.socket.End() || harmed_;
  }
  NoteRefusedLocked();
  return harmed_;
}

void DialedSockets::NoteHarm() {
  MutexLock lock(&mutex_);
  harmed_ = true;
}

bool DialedSockets::HasHarmed() {
  MutexLock lock(&mutex_);
  NoteRefusedLocked();
  return harmed_;
}

void DialedSockets::NoteRefusedLocked() {
  for (const Dialed& one : dialed_) harmed_ = harmed_ || one.socket.Headers().refused;
}

}  // namespace gradsync::daemon
