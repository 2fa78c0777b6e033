#include "daemon/engine/peer_watch.h"

#include <poll.h>
#include <sys/eventfd.h>

#include <algorithm>
#include <limits>
#include <utility>

#include "absl/strings/str_cat.h"
#include "absl/strings/str_join.h"
#include "daemon/base/clock.h"
#include "daemon/engine/engine_errors.h"
#include "proto/gradsync/duration_text.h"

namespace gradsync::daemon {
namespace {

constexpr std::uint64_t kNever = std::numeric_limits<std::uint64_t>::max();

}  // namespace

PeerWatch::PeerWatch(Options options, std::vector<PeerStream> peers,
                     const std::vector<LaneProgress>* progress)
    : options_(std::move(options)),
      limit_ns_(static_cast<std::uint64_t>(absl::ToInt64Nanoseconds(options_.silence_limit))),
      period_ns_(std::min<std::uint64_t>(limit_ns_ / 10 + 1, 1'000'000'000)),
      progress_(progress),
      wake_(eventfd(0, EFD_CLOEXEC | EFD_NONBLOCK)),
      peers_(peers.size()),
      stalls_(progress->size()) {
  for (std::size_t node = 0; node < peers.size(); ++node) {
    peers_[node].stream = std::move(peers[node]);
    peers_[node].begun.resize(progress->size());
  }
  thread_ = std::thread([this] { Run(); });
}

PeerWatch::~PeerWatch() {
  {
    MutexLock lock(&mutex_);
    stopping_ = true;
  }
  Wake();
  thread_.join();
}

void PeerWatch::Wake() {
  const std::uint64_t one = 1;
  // The write fails only if the thread is being woken already.
  [[maybe_unused]] const ssize_t written = write(wake_.get(), &one, sizeof(one));
}

void PeerWatch::Suspect(const absl::Status& why) {
  {
    MutexLock lock(&mutex_);
    if (!suspicion_.ok()) return;
    suspicion_ = why;
    suspicion_ns_ =
        MonotonicNowNs() + static_cast<std::uint64_t>(absl::ToInt64Nanoseconds(kSuspicion));
  }
  Wake();
}

void PeerWatch::Say(const absl::Status& failure) {
  {
    MutexLock lock(&mutex_);
    if (!to_say_.ok()) return;
    to_say_ = failure;
  }
  Wake();
}

void PeerWatch::Fail(const absl::Status& failure) {
  if (failed_ || failure.ok()) return;
  failed_ = true;
  Say(failure);
  options_.on_failure(failure);
}

// A node that does not read gets no more than one frame beyond what its socket's buffer holds.
void PeerWatch::Send(WatchFrame::Kind kind, const absl::Status& failure) {
  WatchFrame frame;
  frame.kind = kind;
  frame.failure = failure;
  for (const LaneProgress& lane : *progress_) {
    frame.begun.push_back(lane.begun.load(std::memory_order_acquire));
  }
  const std::string encoded = EncodeWatchFrame(frame);
  for (Peer& peer : peers_) {
    if (!peer.stream.valid()) continue;
    // The last kAlive is not sent yet: another one would say nothing new.
    if (kind == WatchFrame::Kind::kAlive && !peer.unsent.empty()) continue;
    peer.unsent += encoded;
    Flush(&peer);
  }
}

void PeerWatch::Flush(Peer* peer) {
  while (!peer->unsent.empty()) {
    const absl::StatusOr<std::size_t> sent =
        peer->stream.Write(peer->unsent.data(), peer->unsent.size());
    // Read() sees an error, after the node's last messages.
    if (!sent.ok() || *sent == 0) return;
    peer->unsent.erase(0, *sent);
  }
}

absl::Status PeerWatch::Take(const WatchFrame& frame, Peer* peer, const std::string& name) {
  switch (frame.kind) {
    case WatchFrame::Kind::kFailed: {
      const ErrorDetails details = DetailsOf(frame.failure);
      if (details.reason == reason::kEngineClosed) {
        return PeerLost(name, "it ended its engine with exchanges pending");
      }
      return frame.failure;
    }
    case WatchFrame::Kind::kLeft:
      peer->left = true;
      break;
    case WatchFrame::Kind::kAlive:
      break;
  }
  peer->begun = frame.begun;
  return absl::OkStatus();
}

absl::Status PeerWatch::Read(Peer* peer, const std::string& name) {
  for (;;) {
    char bytes[4096];
    const absl::StatusOr<std::size_t> got = peer->stream.Read(bytes, sizeof(bytes));
    if (got.ok() && *got == 0) return absl::OkStatus();
    if (!got.ok()) {
      peer->stream.Close();
      return peer->left ? absl::OkStatus() : PeerLost(name, got.status().message());
    }
    peer->heard_ns = MonotonicNowNs();
    peer->received.append(bytes, *got);
    absl::string_view rest = peer->received;
    for (;;) {
      WatchFrame frame;
      const absl::StatusOr<bool> taken = DecodeWatchFrame(&rest, progress_->size(), &frame);
      if (!taken.ok()) {
        peer->stream.Close();
        return PeerLost(name, taken.status().message());
      }
      if (!*taken) break;
      absl::Status failure = Take(frame, peer, name);
      if (!failure.ok()) {
        peer->stream.Close();
        return failure;
      }
    }
    peer->received.erase(0, peer->received.size() - rest.size());
  }
}

absl::Status PeerWatch::CheckSilence(std::uint64_t now_ns) {
  for (std::size_t node = 0; node < peers_.size(); ++node) {
    const Peer& peer = peers_[node];
    if (!peer.stream.valid() || peer.left || peer.heard_ns == 0) continue;
    if (now_ns < peer.heard_ns + limit_ns_) continue;
    return EngineTimeout(options_.node_names[node],
                         absl::StrCat("has sent nothing for ",
                                      DurationText(absl::Nanoseconds(now_ns - peer.heard_ns))));
  }
  return absl::OkStatus();
}

absl::Status PeerWatch::CheckLanes(std::uint64_t now_ns) {
  for (std::size_t lane = 0; lane < stalls_.size(); ++lane) {
    Stall& stall = stalls_[lane];
    const std::uint64_t waiting = (*progress_)[lane].waiting.load(std::memory_order_acquire);
    bool all_begun = waiting != 0;
    std::vector<std::string> names;
    for (std::size_t node = 0; node < peers_.size() && all_begun; ++node) {
      if (node == options_.node) continue;
      all_begun = peers_[node].begun[lane] > waiting / 4;
      names.push_back(options_.node_names[node]);
    }
    if (!all_begun || waiting != stall.waiting) {
      stall.waiting = all_begun ? waiting : 0;
      stall.since_ns = now_ns;
    } else if (now_ns - stall.since_ns >= limit_ns_) {
      return EngineTimeout(
          absl::StrJoin(names, ", "),
          absl::StrCat("the data of a chunk that every node has begun has not arrived for ",
                       DurationText(absl::Nanoseconds(now_ns - stall.since_ns))));
    }
  }
  return absl::OkStatus();
}

absl::Status PeerWatch::CheckLeft() {
  bool suspected = false;
  {
    MutexLock lock(&mutex_);
    suspected = !suspicion_.ok();
  }
  for (std::size_t node = 0; node < peers_.size(); ++node) {
    const Peer& peer = peers_[node];
    if (!peer.left) continue;
    for (std::size_t lane = 0; lane < peer.begun.size(); ++lane) {
      // It finished the chunks that it had begun. This node has begun another one.
      if (suspected ||
          (*progress_)[lane].begun.load(std::memory_order_acquire) > peer.begun[lane]) {
        return PeerLost(options_.node_names[node], "it has ended its engine");
      }
    }
  }
  return absl::OkStatus();
}

absl::Status PeerWatch::CheckSuspicion(std::uint64_t now_ns) {
  MutexLock lock(&mutex_);
  return !suspicion_.ok() && now_ns >= suspicion_ns_ ? suspicion_ : absl::OkStatus();
}

int PeerWatch::TimeoutMs(std::uint64_t now_ns) {
  std::uint64_t next_ns = next_alive_ns_;
  if (!failed_) {
    for (const Peer& peer : peers_) {
      if (!peer.stream.valid() || peer.left || peer.heard_ns == 0) continue;
      next_ns = std::min(next_ns, peer.heard_ns + limit_ns_);
    }
    MutexLock lock(&mutex_);
    if (!suspicion_.ok()) next_ns = std::min(next_ns, suspicion_ns_);
  }
  if (next_ns == kNever) return -1;
  if (next_ns <= now_ns) return 0;
  return static_cast<int>((next_ns - now_ns + 999'999) / 1'000'000);
}

void PeerWatch::Run() {
  std::vector<pollfd> polled;
  for (;;) {
    polled.clear();
    polled.push_back({wake_.get(), POLLIN, 0});
    for (const Peer& peer : peers_) {
      const int events = peer.unsent.empty() ? POLLIN : POLLIN | POLLOUT;
      polled.push_back({peer.stream.fd(), static_cast<short>(events), 0});
    }
    poll(polled.data(), polled.size(), TimeoutMs(MonotonicNowNs()));

    std::uint64_t woken = 0;
    [[maybe_unused]] const ssize_t got = read(wake_.get(), &woken, sizeof(woken));
    // Read all sockets before judging: this process may have been stopped, and messages may have
    // arrived meanwhile.
    for (std::size_t node = 0; node < peers_.size(); ++node) {
      Peer& peer = peers_[node];
      if (!peer.stream.valid()) continue;
      Flush(&peer);
      Fail(Read(&peer, options_.node_names[node]));
    }
    const std::uint64_t now_ns = MonotonicNowNs();
    if (!failed_) {
      Fail(CheckLeft());
      Fail(CheckSilence(now_ns));
      Fail(CheckLanes(now_ns));
      Fail(CheckSuspicion(now_ns));
    }

    absl::Status to_say;
    bool stopping = false;
    {
      MutexLock lock(&mutex_);
      to_say = to_say_;
      stopping = stopping_;
    }
    if (!said_ && !to_say.ok()) {
      Send(WatchFrame::Kind::kFailed, to_say);
      said_ = true;
      failed_ = true;
      next_alive_ns_ = kNever;
    }
    if (stopping) {
      if (!said_) Send(WatchFrame::Kind::kLeft, absl::OkStatus());
      return;
    }
    if (!said_ && now_ns >= next_alive_ns_) {
      Send(WatchFrame::Kind::kAlive, absl::OkStatus());
      next_alive_ns_ = now_ns + period_ns_;
    }
  }
}

}  // namespace gradsync::daemon
