#include "daemon/rpc/rank_dispatch.h"

#include <algorithm>
#include <cstddef>
#include <memory>
#include <optional>
#include <string>
#include <utility>

#include "absl/functional/function_ref.h"
#include "absl/strings/str_cat.h"
#include "absl/time/time.h"
#include "absl/types/span.h"
#include "daemon/base/error.h"
#include "daemon/job/job.h"
#include "daemon/rpc/encode.h"
#include "proto/gradsync/limits.h"

namespace gradsync::daemon {
namespace {

// A year. A notice of a longer wait says so much.
constexpr std::uint64_t kMostWaitedMs = std::uint64_t{365} * 24 * 3600 * 1000;

// Another node coordinates the job and gets the rank's messages.
bool Forwards(const RankPort& port) { return !port.job().coordinator().empty(); }

absl::Status RegisterLayout(const v1::SessionRequest& message, const DecodeLimits& limits,
                            std::uint64_t now_ns, RankPort* port) {
  auto request = port->parts().TakeLayout(message, limits, Forwards(*port), now_ns);
  if (!request.ok()) {
    port->RefuseLayout(message.register_layout().request_id(), request.status());
    return absl::OkStatus();
  }
  if (request->replaces != 0) {
    const absl::Status may = port->job().CheckReplaces(port->session(), request->replaces);
    if (!may.ok()) return may;
  }
  return port->RegisterLayout(*std::move(request));
}

// The messages about the state of the model.
absl::Status TakeStateRequest(const v1::SessionRequest& request, RankPort* port) {
  const RankSession session = port->session();
  StagingMemory staging;
  const auto deliver = [&](absl::FunctionRef<absl::Status(Job*)> call) {
    return port->job().Deliver({&request, call, staging});
  };
  const auto stage = [&] {
    auto memory = port->Staging();
    if (!memory.ok()) return memory.status();
    staging = *std::move(memory);
    return absl::OkStatus();
  };
  if (request.has_fetch_state()) {
    if (absl::Status staged = stage(); !staged.ok()) return staged;
    return deliver([&](Job* job) {
      return job->FetchState(session, staging, DecodeStateTimeoutNs(request.fetch_state()));
    });
  }
  if (request.has_state_offer()) {
    const auto& offer = request.state_offer();
    if (absl::Status possible = CheckStateOffer(offer); !possible.ok()) return possible;
    if (absl::Status staged = stage(); !staged.ok()) return staged;
    return deliver([&](Job* job) {
      return job->OfferState(session, offer.transfer(), offer.bytes(), staging);
    });
  }
  if (request.has_state_written()) {
    const auto& written = request.state_written();
    return deliver(
        [&](Job* job) { return job->StateWritten(session, written.transfer(), written.chunk()); });
  }
  if (request.has_state_read()) {
    const auto& read = request.state_read();
    return deliver(
        [&](Job* job) { return job->StateRead(session, read.transfer(), read.chunk()); });
  }
  if (request.has_state_digests()) {
    auto digests = port->parts().TakeDigests(request.state_digests());
    if (!digests.ok()) return digests.status();
    if (!digests->has_value()) return absl::OkStatus();  // more follow
    return deliver([&](Job* job) {
      return job->TakeDigests(session, request.state_digests().transfer(),
                              std::move((*digests)->items), std::move((*digests)->charge));
    });
  }
  const auto& refused = request.state_refused();
  if (refused.reason().size() > kMaxReasonBytes) {
    return MakeError(absl::StatusCode::kInvalidArgument, reason::kMalformed,
                     absl::StrCat("StateRefused.reason has ", refused.reason().size(), " bytes; ",
                                  kMaxReasonBytes, " allowed"));
  }
  return deliver(
      [&](Job* job) { return job->RefuseState(session, refused.transfer(), refused.reason()); });
}

}  // namespace

void RankPort::RefuseLayout(std::uint64_t request_id, const absl::Status& why) {
  v1::SessionResponse response;
  Encode(LayoutFailedMessage{request_id, why}, &response);
  Respond(std::move(response));
}

absl::Status TakeRankRequest(const v1::SessionRequest& request, const DecodeLimits& limits,
                             std::uint64_t now_ns, RankPort* port) {
  const RankSession session = port->session();
  const auto deliver = [&](absl::FunctionRef<absl::Status(Job*)> call) {
    return port->job().Deliver({&request, call, {}});
  };
  const auto operate = [&](const absl::StatusOr<OperationRequest>& operation) {
    if (!operation.ok()) return operation.status();
    absl::StatusOr<StagingMemory> staging = StagingMemory{};
    if (operation->uses_staging) staging = port->Staging();
    if (!staging.ok()) return staging.status();
    const auto call = [&](Job* job) {
      return job->Operate(session, operation->sequence, operation->spec, *staging,
                          operation->deadline_ns);
    };
    return port->job().Deliver({&request, call, *staging});
  };
  switch (request.kind_case()) {
    case v1::SessionRequest::kBucketReady: {
      const auto& ready = request.bucket_ready();
      const auto buckets = absl::MakeConstSpan(ready.buckets().data(),
                                               static_cast<std::size_t>(ready.buckets_size()));
      return deliver([&](Job* job) {
        return job->MarkReady(session, ready.channel(), ready.step(), buckets,
                              DecodePosition(ready));
      });
    }
    case v1::SessionRequest::kEndStep: {
      const auto& end = request.end_step();
      return deliver([&](Job* job) {
        const std::optional<Position> position = DecodePosition(end);
        return end.ready_rest()
                   ? job->FinishStep(session, end.channel(), end.step(), end.used_map(), position)
                   : job->EndStep(session, end.channel(), end.step(), end.used_map(), position);
      });
    }
    case v1::SessionRequest::kAbandonStep: {
      const auto& abandon = request.abandon_step();
      if (abandon.reason().size() > kMaxReasonBytes) {
        return MakeError(absl::StatusCode::kInvalidArgument, reason::kMalformed,
                         absl::StrCat("AbandonStep.reason has ", abandon.reason().size(),
                                      " bytes; ", kMaxReasonBytes, " allowed"));
      }
      return deliver([&](Job* job) {
        return job->AbandonStep(session, abandon.channel(), abandon.step(), abandon.reason());
      });
    }
    case v1::SessionRequest::kRegisterLayout:
      return RegisterLayout(request, limits, now_ns, port);
    case v1::SessionRequest::kLayoutPart:
      port->parts().AddLayoutPart(request, limits, Forwards(*port));
      return absl::OkStatus();
    case v1::SessionRequest::kReleaseLayout:
      return deliver([&](Job* job) {
        return job->ReleaseLayout(session, request.release_layout().channel());
      });
    case v1::SessionRequest::kArenaMapped:
      return port->ArenaMapped(request.arena_mapped().channel());
    case v1::SessionRequest::kBroadcast:
      return operate(DecodeBroadcast(request.broadcast(), now_ns));
    case v1::SessionRequest::kBarrier:
      return operate(DecodeBarrier(request.barrier(), now_ns));
    case v1::SessionRequest::kAllReduce:
      return operate(DecodeAllReduce(request.all_reduce(), limits.staging_bytes, now_ns));
    case v1::SessionRequest::kChunkWritten: {
      const auto& chunk = request.chunk_written();
      return deliver([&](Job* job) {
        return job->ChunkWritten(session, chunk.sequence(), chunk.chunk(), chunk.bytes());
      });
    }
    case v1::SessionRequest::kChunkRead: {
      const auto& chunk = request.chunk_read();
      return deliver(
          [&](Job* job) { return job->ChunkRead(session, chunk.sequence(), chunk.chunk()); });
    }
    case v1::SessionRequest::kBeginCollective: {
      const std::string& description = request.begin_collective().description();
      if (description.empty() || description.size() > kMaxCollectiveBytes) {
        return MakeError(absl::StatusCode::kInvalidArgument, reason::kMalformed,
                         absl::StrCat("BeginCollective.description has ", description.size(),
                                      " bytes; 1 to ", kMaxCollectiveBytes, " allowed"));
      }
      return deliver([&](Job* job) { return job->BeginCollective(session, description); });
    }
    case v1::SessionRequest::kQueryCollectives:
      return deliver([&](Job* job) {
        const std::uint64_t waited_ms = request.query_collectives().waited_ms();
        return job->QueryCollectives(session,
                                     absl::Milliseconds(std::min(waited_ms, kMostWaitedMs)));
      });
    case v1::SessionRequest::kFetchState:
    case v1::SessionRequest::kStateOffer:
    case v1::SessionRequest::kStateWritten:
    case v1::SessionRequest::kStateRead:
    case v1::SessionRequest::kStateDigests:
    case v1::SessionRequest::kStateRefused:
      return TakeStateRequest(request, port);
    case v1::SessionRequest::kLeave:
      return deliver([&](Job* job) { return job->Leave(session, request.leave().exit()); });
    case v1::SessionRequest::kFinish:
      return deliver([&](Job* job) { return job->Finish(session); });
    case v1::SessionRequest::kQueryStep:
      return deliver([&](Job* job) {
        const auto& query = request.query_step();
        v1::SessionResponse response;
        response.mutable_step_state()->set_channel(query.channel());
        response.mutable_step_state()->set_step(query.step());
        response.mutable_step_state()->set_missing(
            job->MissingInStep(query.channel(), query.step()));
        port->Respond(std::move(response));
        return absl::OkStatus();
      });
    case v1::SessionRequest::kOpenSession:
    case v1::SessionRequest::kLeaseAnswer:
    case v1::SessionRequest::KIND_NOT_SET:
      break;
  }
  return MakeError(absl::StatusCode::kInvalidArgument, reason::kMalformed,
                   "a message of no kind that this daemon knows: upgrade the daemon");
}

}  // namespace gradsync::daemon
