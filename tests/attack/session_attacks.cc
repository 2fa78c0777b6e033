// Attacks with sessions: trainers that make the daemon work.

#include <fcntl.h>
#include <grpcpp/grpcpp.h>
#include <sys/mman.h>
#include <unistd.h>

#include <atomic>
#include <chrono>
#include <cstdint>
#include <future>
#include <iostream>
#include <memory>
#include <string>
#include <thread>
#include <utility>
#include <vector>

#include "gradsync/client.h"
#include "gradsync/v1/gradsync.pb.h"
#include "gradsync/v1/introspection.grpc.pb.h"
#include "tests/attack/attacker.h"
#include "tests/fault/raw_session.h"
#include "tests/kit/become_user.h"

namespace gradsync::attack {
namespace {

using fault::RawSession;

// Opens a session and joins layouts, one after the other. Returns their channels, or nothing if
// that fails.
std::vector<std::uint32_t> Join(const Target& target, const v1::SessionRequest& open,
                                const std::vector<v1::SessionRequest>& layouts, RawSession* rank) {
  std::vector<std::uint32_t> channels;
  if (rank->Send(open) && rank->Await(v1::SessionResponse::kSessionOpened).has_value()) {
    for (const v1::SessionRequest& layout : layouts) {
      const auto joined = rank->JoinLayout(layout, target.side_socket);
      if (!joined.has_value()) break;
      channels.push_back(joined->channel);
    }
  }
  if (channels.size() == layouts.size()) return channels;
  std::cerr << "attacker: could not join" << std::endl;
  return {};
}

// Jobs of `world` ranks each that step without a pause.
void Steps(const Target& target, int jobs, std::uint32_t world, std::size_t buckets,
           std::uint64_t count) {
  OnThreads(jobs * static_cast<int>(world), [&](int thread, const Begun& begun) {
    const auto number = static_cast<std::uint32_t>(thread);
    const auto open =
        RawSession::OpenRequest(number % world, world, "attack" + std::to_string(number / world));
    RawSession rank(target.socket);
    const auto channels = Join(target, open, {RawSession::LayoutRequest(buckets, count)}, &rank);
    begun();
    for (std::uint64_t step = 1; !channels.empty(); ++step) {
      if (!rank.EndStep(channels[0], step, /*ready_rest=*/true)) return;
      if (!rank.Await(v1::SessionResponse::kStepDone).has_value()) return;
    }
  });
}

// The most ranks and buckets of a layout: its void step has 131,072 done words.
constexpr std::uint32_t kVoidRanks = 32;
constexpr std::size_t kVoidBuckets = 4096;

// Makes such steps void while one of their buckets is reduced, without a pause.
void AbandonedSteps(const Target& target) {
  v1::SessionRequest layout = RawSession::LayoutRequest(kVoidBuckets, 1);
  layout.mutable_register_layout()->mutable_explicit_buckets(0)->set_count(64 << 10);
  std::atomic<std::uint64_t> marks{0};
  OnThreads(kVoidRanks, [&](int thread, const Begun& begun) {
    const auto number = static_cast<std::uint32_t>(thread);
    RawSession rank(target.socket);
    const auto channels =
        Join(target, RawSession::OpenRequest(number, kVoidRanks, "abandoned"), {layout}, &rank);
    begun();
    for (std::uint64_t step = 1; !channels.empty(); ++step) {
      // Rank 0 marks last, and abandons the step that the reduce threads then work at.
      while (number == 0 && marks < (kVoidRanks - 1) * step) {
        std::this_thread::sleep_for(std::chrono::microseconds(50));  // the pace of the attack
      }
      if (!rank.Ready(channels[0], step, {0})) return;
      if (number > 0) ++marks;
      v1::SessionRequest abandon;
      abandon.mutable_abandon_step()->set_channel(channels[0]);
      abandon.mutable_abandon_step()->set_step(step);
      if (number == 0 && !rank.Send(abandon)) return;
      if (!rank.Await(v1::SessionResponse::kStepDone).has_value()) return;
    }
  });
}

// Begins such steps, on eight layouts at once, and lets them time out after a millisecond.
void ShortTimeouts(const Target& target) {
  std::vector<v1::SessionRequest> layouts;
  for (int i = 0; i < 8; ++i) {
    layouts.push_back(RawSession::LayoutRequest(kVoidBuckets, 1, "layout" + std::to_string(i)));
  }
  OnThreads(kVoidRanks, [&](int thread, const Begun& begun) {
    const auto number = static_cast<std::uint32_t>(thread);
    RawSession rank(target.socket);
    auto open = RawSession::OpenRequest(number, kVoidRanks, "timeouts");
    open.mutable_open_session()->mutable_options()->set_step_timeout_ms(1);
    const auto channels = Join(target, open, layouts, &rank);
    begun();
    for (std::uint64_t step = 1; !channels.empty(); ++step) {
      for (const std::uint32_t channel : channels) {
        if (number == 0 && !rank.Ready(channel, step, {0})) return;
      }
      for (std::size_t done = 0; done < channels.size(); ++done) {
        if (!rank.Await(v1::SessionResponse::kStepDone).has_value()) return;
      }
    }
  });
}

// Jobs of four ranks that broadcast without a pause: the daemon copies. `across`: all ranks but the
// first are on the other node.
void Broadcasts(const Target& target, int jobs, std::size_t bytes, bool across) {
  constexpr int kRanks = 4;
  OnThreads(jobs * kRanks, [&](int thread, const Begun& begun) {
    const int rank = thread % kRanks;
    SessionOptions options;
    options.socket = across && rank > 0 ? target.other_socket : target.socket;
    if (across) options.coordinator = target.peer;
    options.job_id = "broadcasts" + std::to_string(thread / kRanks);
    options.rank = static_cast<std::uint32_t>(rank);
    options.world_size = kRanks;
    const auto session = Session::Join(options);
    if (!session.ok()) std::cerr << "attacker: " << session.status() << std::endl;
    begun();
    std::vector<char> data(bytes);
    while (session.ok() && (*session)->Broadcast(data.data(), data.size(), /*root=*/0).ok()) {
    }
  });
}

// A job of as many buckets as a layout may have. Eight threads ask for its timeline without a
// pause, and read the answers, of 2.6 MB each.
void TimelineFlood(const Target& target) {
  constexpr std::uint64_t kSteps = 64;
  std::promise<void> stepped;
  const std::shared_future<void> ready = stepped.get_future().share();
  OnThreads(9, [&](int thread, const Begun& begun) {
    if (thread > 0) {
      grpc::ChannelArguments arguments;
      arguments.SetInt(GRPC_ARG_USE_LOCAL_SUBCHANNEL_POOL, 1);
      arguments.SetMaxReceiveMessageSize(-1);
      const auto stub = v1::Introspection::NewStub(grpc::CreateCustomChannel(
          "unix:" + target.socket, grpc::InsecureChannelCredentials(), arguments));
      v1::GetTimelineRequest request;
      request.set_job_id("timeline");
      request.set_layout("default");
      request.set_steps(kSteps);
      ready.wait();
      for (;; begun()) {
        grpc::ClientContext context;
        v1::GetTimelineResponse response;
        stub->GetTimeline(&context, request, &response);
      }
    }
    RawSession rank(target.socket);
    const auto channels = Join(target, RawSession::OpenRequest(0, 1, "timeline"),
                               {RawSession::LayoutRequest(4096, 1)}, &rank);
    for (std::uint64_t step = 1; !channels.empty(); ++step) {
      if (!rank.EndStep(channels[0], step, /*ready_rest=*/true)) return;
      if (!rank.Await(v1::SessionResponse::kStepDone).has_value()) return;
      if (step == kSteps) stepped.set_value();
      if (step < kSteps) continue;
      begun();
      std::this_thread::sleep_for(std::chrono::milliseconds(50));  // each answer has new steps
    }
  });
}

// Registers, maps and releases a layout of 64 MiB without a pause, in each of four sessions.
void Mapping(const Target& target) {
  OnThreads(4, [&](int thread, const Begun& begun) {
    RawSession rank(target.socket);
    const bool opened = rank.Open(0, 1, "mapping" + std::to_string(thread)).has_value();
    begun();
    while (opened) {
      const auto layout =
          rank.JoinLayout(RawSession::LayoutRequest(1, 16 << 20), target.side_socket);
      if (!layout.has_value()) return;
      v1::SessionRequest release;
      release.mutable_release_layout()->set_channel(layout->channel);
      if (!rank.Send(release)) return;
    }
  });
}

// False: the daemon has refused the layout, or ended the session.
bool IsGiven(const v1::SessionRequest& layout, RawSession* rank) {
  if (!rank->Send(layout)) return false;
  while (const auto answer = rank->Receive()) {
    if (answer->has_layout_assigned()) return true;
    if (answer->has_operation_failed()) return false;
  }
  return false;
}

// Keeps as many layouts as it gets: for each the daemon has two descriptors and two mappings. Then
// it asks for more without a pause.
void ManyLayouts(const Target& target) {
  constexpr int kPerSession = 64;
  OnThreads(1, [&](int, const Begun& begun) {
    std::vector<std::unique_ptr<RawSession>> kept;
    for (int job = 0;; ++job) {
      auto rank = std::make_unique<RawSession>(target.socket);
      const bool opened = rank->Open(0, 1, "layouts" + std::to_string(job)).has_value();
      int given = 0;
      while (
          opened && given < kPerSession &&
          IsGiven(RawSession::LayoutRequest(1, 1, "layout" + std::to_string(given)), rank.get())) {
        ++given;
      }
      if (given > 0) kept.push_back(std::move(rank));
      if (given == kPerSession) continue;
      begun();
      std::this_thread::sleep_for(std::chrono::milliseconds(1));  // the pace of the attack
    }
  });
}

// Fails if they are sealed.
void FreePages(const fault::RawMemory& memory) {
  fallocate(memory.fd(), FALLOC_FL_PUNCH_HOLE | FALLOC_FL_KEEP_SIZE, 0,
            static_cast<off_t>(memory.size()));
}

// Frees the pages of this memory again and again, until the destructor.
class Puncher {
 public:
  explicit Puncher(const fault::RawMemory& memory)
      : thread_([this, &memory] {
          while (!stop_) FreePages(memory);
        }) {}
  ~Puncher() {
    stop_ = true;
    thread_.join();
  }
  Puncher(const Puncher&) = delete;
  Puncher& operator=(const Puncher&) = delete;

 private:
  std::atomic<bool> stop_{false};
  std::thread thread_;  // last: it uses the other members
};

// Frees the pages of its arena all the time, while it maps it, while the daemon checks it and in a
// step. Begins again when the daemon has ended the session.
void PunchedHoles(const Target& target) {
  Repeat(4, [&](int thread) {
    RawSession rank(target.socket);
    if (!rank.Open(0, 1, "holes" + std::to_string(thread)).has_value()) return;
    const auto assigned = rank.Register(RawSession::LayoutRequest(4, 1 << 20));
    if (!assigned.has_value()) return;
    const auto arena = rank.Map(*assigned, target.side_socket, /*populate=*/false);
    if (arena == nullptr || arena->data() == nullptr) return;
    rank.semaphores()->Populate();
    const Puncher puncher(*arena);
    madvise(arena->data(), arena->size(), MADV_POPULATE_WRITE);
    if (thread % 2 == 0) arena->Seal();  // else the daemon may see that it is not sealed
    if (rank.Mapped(assigned->channel()) &&
        rank.Await(v1::SessionResponse::kLayoutReady).has_value() &&
        rank.EndStep(assigned->channel(), 1, /*ready_rest=*/true)) {
      rank.Await(v1::SessionResponse::kStepDone);
    }
  });
}

// The same with the staging memory of two ranks, while the daemon checks and reduces it.
void StagingHoles(const Target& target) {
  Repeat(2, [&](int thread) {
    RawSession ranks[] = {RawSession(target.socket), RawSession(target.socket)};
    std::unique_ptr<fault::RawMemory> staging[2];
    for (std::uint32_t rank = 0; rank < 2; ++rank) {
      const auto opened = ranks[rank].Open(rank, 2, "staging" + std::to_string(thread));
      if (!opened.has_value()) return;
      staging[rank] = RawSession::MapStaging(*opened, target.side_socket);
      if (staging[rank] == nullptr || staging[rank]->data() == nullptr) return;
    }
    const Puncher first(*staging[0]), second(*staging[1]);
    for (int rank = 0; rank < 2; ++rank) {
      fault::RawMemory& memory = *staging[rank];
      madvise(memory.data(), memory.size(), MADV_POPULATE_WRITE);
      if (thread == 0) memory.Seal();  // else the daemon may see that it is not sealed
      if (!ranks[rank].Send(RawSession::AllReduceRequest(memory.size() / sizeof(float)))) return;
    }
    for (RawSession& rank : ranks) rank.Receive();  // done, or refused
  });
}

// A job of two ranks whose arenas have no pages when their buckets are reduced: the daemon would
// allocate 4 MiB for them.
struct HoledJob {
  std::unique_ptr<RawSession> sessions[2];
  std::shared_ptr<fault::RawMemory> arenas[2];  // null: not mapped
};

// Runs a step of such a job. If `sealed`, its arenas never have more than one page; otherwise the
// ranks free their pages when the daemon has accepted them. False: the daemon has refused the job.
bool ReduceHoles(const Target& target, const std::string& name, bool sealed, HoledJob* job) {
  const auto layout = RawSession::LayoutRequest(4, 128 << 10);  // 2 MiB
  std::uint32_t channel = 0;
  for (std::uint32_t rank = 0; rank < 2; ++rank) {
    job->sessions[rank] = std::make_unique<RawSession>(target.socket);
    if (!job->sessions[rank]->Open(rank, 2, name).has_value()) return false;
  }
  for (int rank = 0; rank < 2; ++rank) {
    RawSession& session = *job->sessions[rank];
    const auto assigned = session.Register(layout);
    if (!assigned.has_value()) return false;
    channel = assigned->channel();
    const auto arena = session.Map(*assigned, target.side_socket, /*populate=*/false);
    if (arena == nullptr || arena->data() == nullptr) return false;
    job->arenas[rank] = arena;
    session.semaphores()->Populate();
    if (sealed) {
      arena->data()[0] = 1;
      arena->Seal();
    } else {
      madvise(arena->data(), arena->size(), MADV_POPULATE_WRITE);
    }
    if (!session.Mapped(channel)) return false;
  }
  for (const auto& session : job->sessions) {
    if (!session->Await(v1::SessionResponse::kLayoutReady).has_value()) return false;
  }
  for (int rank = 0; rank < 2; ++rank) {
    FreePages(*job->arenas[rank]);
    if (!job->sessions[rank]->EndStep(channel, 1, /*ready_rest=*/true)) return false;
  }
  for (const auto& session : job->sessions) {
    if (!session->Await(v1::SessionResponse::kStepDone).has_value()) return false;
  }
  return true;
}

// Begins such jobs, one after the other. Keeps those that the daemon does not refuse, and frees the
// pages of the others. So the attacker itself needs little memory.
void KeptHoles(const Target& target) {
  constexpr std::uint64_t kFullStrength = 60;  // jobs: 120 MiB if the daemon refuses half of them
  OnThreads(1, [&](int, const Begun& begun) {
    std::vector<HoledJob> kept;
    for (std::uint64_t number = 1;; ++number) {
      HoledJob job;
      if (ReduceHoles(target, "kept" + std::to_string(number), number % 2 == 0, &job)) {
        kept.push_back(std::move(job));
      } else {
        for (const auto& arena : job.arenas) {
          if (arena != nullptr) FreePages(*arena);
        }
      }
      if (number >= kFullStrength) begun();
    }
  });
}

// ---- Across nodes: what the daemon of the first node does on the threads of its peer port.

v1::SessionRequest OpenAcross(const Target& target, std::uint32_t rank, std::uint32_t world,
                              const std::string& job) {
  v1::SessionRequest open = RawSession::OpenRequest(rank, world, job);
  open.mutable_open_session()->set_coordinator(target.peer);
  return open;
}

// Jobs of two nodes that end steps without a pause. The rank of the other node is the last one, so
// that its message launches all buckets.
void StepsAcross(const Target& target, std::size_t buckets, std::uint64_t count) {
  constexpr int kJobs = 2;
  std::atomic<std::uint64_t> ended[kJobs] = {};  // by the first rank
  OnThreads(2 * kJobs, [&](int thread, const Begun& begun) {
    const auto rank = static_cast<std::uint32_t>(thread % 2);
    std::atomic<std::uint64_t>& first = ended[thread / 2];
    Target node = target;
    if (rank == 1) node.socket = target.other_socket;
    node.side_socket = fault::SideSocketOf(node.socket);
    RawSession session(node.socket);
    const auto channels =
        Join(node, OpenAcross(target, rank, 2, "steps" + std::to_string(thread / 2)),
             {RawSession::LayoutRequest(buckets, count)}, &session);
    begun();
    for (std::uint64_t step = 1; !channels.empty(); ++step) {
      while (rank == 1 && first < step) {
        std::this_thread::sleep_for(std::chrono::microseconds(50));  // the pace of the attack
      }
      if (!session.EndStep(channels[0], step, /*ready_rest=*/true)) return;
      if (rank == 0) first = step;
      if (!session.Await(v1::SessionResponse::kStepDone).has_value()) return;
    }
  });
}

// Registers layouts of the most parameters, in parts. Each is planned, and refused because it has
// too many buckets.
void RegistrationsAcross(const Target& target) {
  constexpr int kParameters = 100'000, kPerPart = 2500;
  OnThreads(2, [&](int thread, const Begun& begun) {
    RawSession session(target.other_socket);
    const auto open = OpenAcross(target, 0, 1, "registrations" + std::to_string(thread));
    const bool opened =
        session.Send(open) && session.Await(v1::SessionResponse::kSessionOpened).has_value();
    if (!opened) std::cerr << "attacker: could not join" << std::endl;
    std::vector<v1::SessionRequest> parts(kParameters / kPerPart);
    for (int i = 0; i < kParameters; ++i) {
      auto& part = *parts[static_cast<std::size_t>(i / kPerPart)].mutable_layout_part();
      v1::Parameter& parameter = *part.add_parameters();
      parameter.set_name("parameter" + std::to_string(i));
      parameter.add_shape(1);
      parameter.set_dtype(v1::DATA_TYPE_FLOAT32);
    }
    v1::SessionRequest last;
    last.mutable_register_layout()->set_name("large");
    last.mutable_register_layout()->set_bucket_cap_bytes(1);
    last.mutable_register_layout()->set_first_bucket_cap_bytes(1);
    begun();
    for (std::uint64_t id = 1; opened; ++id) {
      for (const v1::SessionRequest& part : parts) {
        if (!session.Send(part)) return;
      }
      last.mutable_register_layout()->set_request_id(id);
      if (!session.Send(last)) return;
      if (!session.Await(v1::SessionResponse::kOperationFailed).has_value()) return;
    }
  });
}

// Other processes of the victim's user open sessions of rank 0 with tokens that are not the job's,
// and keep them. The victim's job must form nevertheless.
void OtherTokens(const Target& target) {
  if (!BecomeUser(target.victim.user)) _exit(1);
  OnThreads(4, [&](int thread, const Begun& begun) {
    v1::SessionRequest open = RawSession::OpenRequest(0, target.victim.ranks, target.victim.job);
    open.mutable_open_session()->set_token("other" + std::to_string(thread));
    for (;;) {
      RawSession rank(target.socket);
      if (rank.Send(open)) rank.Await(v1::SessionResponse::kSessionOpened);
      begun();
      rank.End();  // the daemon ends it, or the call's deadline does
      std::this_thread::sleep_for(std::chrono::milliseconds(1));  // it may have been refused
    }
  });
}

// Registers layouts on GPUs that do not exist, without a pause and several at a time: a worker
// looks for each.
void WorkerStarts(const Target& target) {
  constexpr std::uint64_t kAtATime = 8;
  OnThreads(4, [&](int thread, const Begun& begun) {
    RawSession rank(target.socket);
    const std::string job = "workers" + std::to_string(thread);
    bool refused = rank.Open(0, 1, job).has_value();
    for (std::uint64_t id = 1; refused; id += kAtATime) {
      for (std::uint64_t i = 0; refused && i < kAtATime; ++i) {
        v1::SessionRequest layout = RawSession::LayoutRequest(1, 1, "layout" + std::to_string(i));
        layout.mutable_register_layout()->set_request_id(id + i);
        layout.mutable_register_layout()->set_device("GPU-" + std::to_string(id + i));
        refused = rank.Send(layout);
      }
      for (std::uint64_t i = 0; refused && i < kAtATime; ++i) {
        refused = rank.Await(v1::SessionResponse::kOperationFailed).has_value();
      }
      begun();
    }
  });
}

}  // namespace

Attacks SessionAttacks() {
  return {
      // Many small buckets: each alone would be reduced on the thread that reads the message.
      {"inline_reductions", {[](const Target& t) { Steps(t, 2, 1, 4096, 64 << 10); }}},
      // Much to tell and little to reduce.
      {"tiny_buckets", {[](const Target& t) { Steps(t, 2, 4, 4096, 1); }}},
      {"many_sessions", {[](const Target& t) { Steps(t, 32, 1, 256, 256); }}},
      // Long slices of the reduce threads.
      {"large_buckets", {[](const Target& t) { Steps(t, 2, 4, 4, 2 << 20); }}},
      // More than the staging memory.
      {"broadcasts", {[](const Target& t) { Broadcasts(t, 1, 48 << 20, /*across=*/false); }}},
      {"mapping", {Mapping}},
      {"many_layouts", {ManyLayouts}},
      {"abandoned_steps", {AbandonedSteps}},
      {"short_timeouts", {ShortTimeouts}},
      {"punched_holes", {PunchedHoles}},
      {"staging_holes", {StagingHoles}},
      {"kept_holes", {KeptHoles}},
      {"other_tokens", {OtherTokens, /*on_peer_port=*/false, /*across=*/false, /*on_victim=*/true}},
      {"timeline_flood", {TimelineFlood}},
      {"worker_starts", {WorkerStarts}},
      {"steps_across",
       {[](const Target& t) { StepsAcross(t, 4096, 1); }, /*on_peer_port=*/false, /*across=*/true}},
      {"large_buckets_across",
       {[](const Target& t) { StepsAcross(t, 4, 2 << 20); }, /*on_peer_port=*/false,
        /*across=*/true}},
      {"broadcasts_across",
       {[](const Target& t) { Broadcasts(t, 8, 8 << 20, /*across=*/true); },
        /*on_peer_port=*/false, /*across=*/true}},
      {"registrations_across", {RegistrationsAcross, /*on_peer_port=*/false, /*across=*/true}},
  };
}

}  // namespace gradsync::attack
