#include "daemon/engine/lane_links.h"

#include <poll.h>
#include <sys/eventfd.h>

#include <algorithm>
#include <utility>

#include "absl/strings/str_cat.h"
#include "daemon/base/error.h"
#include "daemon/engine/engine_errors.h"

namespace gradsync::daemon {
namespace {

absl::Status Broken(const std::string& name, const absl::Status& how) {
  if (absl::IsUnavailable(how)) return PeerLost(name, how.message());
  return MakeError(how.code(), reason::kEngineBroken,
                   absl::StrCat("node ", name, ": ", how.message()), {{field::kNode, name}});
}

}  // namespace

LaneLinks::LaneLinks(std::vector<PeerStream> peers, std::vector<std::string> names)
    : names_(std::move(names)), wake_(eventfd(0, EFD_CLOEXEC | EFD_NONBLOCK)) {
  peers_.reserve(peers.size());
  for (PeerStream& stream : peers) peers_.emplace_back(std::move(stream));
  thread_ = std::thread([this] { Run(); });
}

LaneLinks::~LaneLinks() {
  Abort();
  thread_.join();
  bool drop = false;
  {
    MutexLock lock(&mutex_);
    drop = drop_unsent_;
  }
  for (LaneConnection& peer : peers_) drop ? peer.stream().Reset() : peer.stream().Close();
}

void LaneLinks::DropUnsent() {
  MutexLock lock(&mutex_);
  drop_unsent_ = true;
}

// ---- For the lane

void LaneLinks::Receive(std::size_t node, Group* group, std::byte* data, std::size_t bytes) {
  Post(node, /*receives=*/true, {group, data, bytes});
}

void LaneLinks::Send(std::size_t node, Group* group, const std::byte* data, std::size_t bytes) {
  // A sent message is only read.
  Post(node, /*receives=*/false, {group, const_cast<std::byte*>(data), bytes});
}

void LaneLinks::Post(std::size_t node, bool receives, const Transfer& transfer) {
  MutexLock lock(&mutex_);
  ++transfer.group->left;
  posted_.push_back({node, receives, transfer});
}

void LaneLinks::Start() { Wake(); }

void LaneLinks::Wake() const {
  const std::uint64_t one = 1;
  // The write fails only if the thread is being woken already.
  [[maybe_unused]] const ssize_t written = write(wake_.get(), &one, sizeof(one));
}

absl::Status LaneLinks::Await(Group* group) {
  MutexLock lock(&mutex_);
  while (group->left > 0 && (status_.ok() || running_)) changed_.Wait(&mutex_);
  return group->left > 0 ? status_ : absl::OkStatus();
}

void LaneLinks::Abort() {
  {
    MutexLock lock(&mutex_);
    if (status_.ok()) status_ = absl::CancelledError("aborted");
  }
  Wake();
}

// ---- The thread

void LaneLinks::Fail(const absl::Status& why) {
  MutexLock lock(&mutex_);
  if (status_.ok()) status_ = why;
}

bool LaneLinks::TakePosted() {
  {
    MutexLock lock(&mutex_);
    if (!status_.ok()) return false;
    taken_.swap(posted_);
  }
  for (const Posted& posted : taken_) {
    LaneConnection& peer = peers_[posted.node];
    posted.receives ? peer.Receive(posted.transfer) : peer.Send(posted.transfer);
  }
  taken_.clear();
  return true;
}

void LaneLinks::Run() {
  std::vector<pollfd> polled(peers_.size() + 1);
  polled.back() = {wake_.get(), POLLIN, 0};
  while (TakePosted()) {
    absl::Status status;
    for (std::size_t node = 0; node < peers_.size() && status.ok(); ++node) {
      LaneConnection& peer = peers_[node];
      status = peer.Move(&done_);
      if (!status.ok()) status = Broken(names_[node], status);
      // Without a transfer the other side may close the connection: it has left in order.
      const int events = peer.events();
      polled[node] = {events != 0 ? peer.stream().fd() : -1, static_cast<short>(events), 0};
    }
    if (!done_.empty()) {
      MutexLock lock(&mutex_);
      bool finished = false;
      for (Group* const group : done_) finished = --group->left == 0 || finished;
      done_.clear();
      if (finished) changed_.NotifyAll();
    }
    if (!status.ok()) {
      Fail(status);
      break;
    }
    poll(polled.data(), polled.size(), -1);
    std::uint64_t woken = 0;
    [[maybe_unused]] const ssize_t got = read(wake_.get(), &woken, sizeof(woken));
  }
  {
    MutexLock lock(&mutex_);
    running_ = false;
  }
  changed_.NotifyAll();
}

}  // namespace gradsync::daemon
