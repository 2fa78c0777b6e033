#include "daemon/rpc/asking_service.h"

#include <grpcpp/grpcpp.h>

#include <chrono>
#include <set>
#include <string>
#include <utility>
#include <vector>

#include "absl/strings/str_cat.h"
#include "daemon/arena/arena_quota.h"
#include "daemon/base/error.h"
#include "daemon/rpc/completion_dispatcher.h"
#include "daemon/rpc/health_answers.h"
#include "daemon/rpc/message_memory.h"
#include "daemon/rpc/question_desk.h"
#include "daemon/rpc/reflection_answers.h"
#include "daemon/rpc/stream_count.h"
#include "daemon/rpc/stream_service.h"
#include "daemon/rpc/unknown_calls.h"
#include "gradsync/v1/introspection.pb.h"

namespace gradsync::daemon {
namespace {

using grpc::health::v1::HealthCheckRequest;
using grpc::health::v1::HealthCheckResponse;
using grpc::reflection::v1alpha::ServerReflectionRequest;
using grpc::reflection::v1alpha::ServerReflectionResponse;

constexpr char kGradientSync[] = "gradsync.v1.GradientSync";
constexpr char kIntrospection[] = "gradsync.v1.Introspection";
constexpr char kHealth[] = "grpc.health.v1.Health";
constexpr char kReflection[] = "grpc.reflection.v1alpha.ServerReflection";

// Open calls of one user and method. grpcurl has one or two calls of reflection at a time.
constexpr std::size_t kQuestionsPerUser = 16;
constexpr std::size_t kWatchersPerUser = 32;
constexpr std::size_t kReflectionsPerUser = 4;
// Time that a client has to ask, and to read the answer.
constexpr std::uint64_t kPatienceNs = 10'000'000'000;
// Time between two requests of a call of reflection.
constexpr std::uint64_t kReflectionPatienceNs = 60'000'000'000;
// Answers up to here cost their user nothing, so that asking works when the quota is used up.
constexpr std::size_t kFreeAnswerBytes = 1 << 20;

// Until an answer has been read, there are the message and its form on the wire.
std::size_t BytesOf(const google::protobuf::Message& answer) {
  return MemoryOf(answer) + answer.ByteSizeLong();
}

// A client may ask for long answers and read none.
absl::StatusOr<ArenaQuota::Reservation> ChargeFor(std::size_t bytes, const MemoryAccount& asker) {
  if (bytes <= kFreeAnswerBytes) return ArenaQuota::Reservation();
  auto charge = asker.Reserve(bytes);
  if (charge.ok()) return charge;
  return MakeError(charge.status().code(), DetailsOf(charge.status()),
                   absl::StrCat("the answer is too long: ", charge.status().message(),
                                ". Ask about one job, or about fewer steps."));
}

}  // namespace

struct AskingService::Parts {
  Parts(IntrospectionContext context, const Connections* the_connections,
        UserExecutor* the_executor)
      : connections(the_connections),
        executor(the_executor),
        memory(context.control_quota),
        clock(context.clock),
        answers(std::make_shared<const IntrospectionAnswers>(std::move(context))) {}

  template <class In, class Out>
  QuestionMethod<In, Out> Method(const std::string& service, const std::string& name,
                                 decltype(QuestionMethod<In, Out>::ask) ask) const {
    QuestionMethod<In, Out> method;
    method.name = service + "/" + name;
    method.connections = connections;
    method.clock = clock;
    method.per_user = kQuestionsPerUser;
    method.patience_ns = kPatienceNs;
    method.ask = std::move(ask);
    return method;
  }

  // Answers on the executor's threads: `answer` locks jobs, and may wait for workers. The service
  // may have ended meanwhile, so the work uses nothing of it.
  template <class In, class Out>
  QuestionMethod<In, Out> Later(
      const std::string& name,
      std::function<absl::StatusOr<Out>(const ClientProcess&, const In&)> answer) {
    return Method<In, Out>(
        kIntrospection, name,
        [this, answer = std::move(answer)](const auto& stream, const ClientProcess& caller,
                                           const In& message) {
          // Nobody is charged for a request that waits, so it must be short.
          executor->Run(caller.tenant(), [memory = memory, stream = stream, answer, asker = caller,
                                          request = WithoutUnknownFields(message)] {
            if (stream->Ended()) return;  // nobody reads the answer
            absl::StatusOr<Out> out = answer(asker, request);
            if (!out.ok()) return stream->Refuse(out.status());
            auto charge = ChargeFor(BytesOf(*out), {memory, asker.tenant()});
            if (!charge.ok()) return stream->Refuse(charge.status());
            stream->AnswerLast(*std::move(out), *std::move(charge));
          });
        });
  }

  QuestionMethod<HealthCheckRequest, HealthCheckResponse> Check() {
    return Method<HealthCheckRequest, HealthCheckResponse>(
        kHealth, "Check",
        [this](const auto& stream, const ClientProcess&, const HealthCheckRequest& request) {
          auto state = health.Check(request);
          if (state.ok()) {
            stream->AnswerLast(*std::move(state));
          } else {
            stream->Refuse(state.status());
          }
        });
  }
  QuestionMethod<HealthCheckRequest, HealthCheckResponse> Watch() {
    auto method = Method<HealthCheckRequest, HealthCheckResponse>(
        kHealth, "Watch",
        [this](const auto& stream, const ClientProcess&, const HealthCheckRequest& request) {
          health.Watch(stream, request);
        });
    method.per_user = kWatchersPerUser;
    method.patience_ns = 0;
    return method;
  }
  QuestionMethod<ServerReflectionRequest, ServerReflectionResponse> Reflection() {
    auto method = Method<ServerReflectionRequest, ServerReflectionResponse>(
        kReflection, "ServerReflectionInfo",
        [](const auto& stream, const ClientProcess&, const ServerReflectionRequest& request) {
          static const auto* const services =
              new std::vector<std::string>{kGradientSync, kIntrospection, kHealth, kReflection};
          stream->Answer(AnswerReflection(request, *services));
        });
    method.per_user = kReflectionsPerUser;
    method.patience_ns = kReflectionPatienceNs;
    method.asks_once = false;
    return method;
  }

  const Connections* const connections;
  UserExecutor* const executor;
  ArenaQuota* const memory;
  const Clock* const clock;
  const std::shared_ptr<const IntrospectionAnswers> answers;  // the executor's work owns it, too
  HealthAnswers health{std::set<std::string>{kGradientSync, kIntrospection}};
  StreamCount streams;  // with those that wait for the next call

  StreamService health_service{"/grpc.health.v1.Health/Check", "/grpc.health.v1.Health/Watch"};
  StreamService introspection_service{"/gradsync.v1.Introspection/GetStatus",
                                      "/gradsync.v1.Introspection/GetStats",
                                      "/gradsync.v1.Introspection/GetTimeline"};
  StreamService reflection_service{
      "/grpc.reflection.v1alpha.ServerReflection/ServerReflectionInfo"};

  QuestionDesk<HealthCheckRequest, HealthCheckResponse> check{Check(), &streams};
  QuestionDesk<HealthCheckRequest, HealthCheckResponse> watch{Watch(), &streams};
  QuestionDesk<v1::GetStatusRequest, v1::GetStatusResponse> status{
      Later<v1::GetStatusRequest, v1::GetStatusResponse>(
          "GetStatus",
          [answers = answers](const ClientProcess& asker, const auto& request) {
            return answers->Status(asker, request);
          }),
      &streams};
  QuestionDesk<v1::GetStatsRequest, v1::GetStatsResponse> stats{
      Later<v1::GetStatsRequest, v1::GetStatsResponse>(
          "GetStats",
          [answers = answers](const ClientProcess& asker, const auto& request) {
            return answers->Stats(asker, request);
          }),
      &streams};
  QuestionDesk<v1::GetTimelineRequest, v1::GetTimelineResponse> timeline{
      Later<v1::GetTimelineRequest, v1::GetTimelineResponse>(
          "GetTimeline",
          [answers = answers](const ClientProcess& asker, const auto& request) {
            return answers->Timeline(asker, request);
          }),
      &streams};
  QuestionDesk<ServerReflectionRequest, ServerReflectionResponse> reflection{Reflection(),
                                                                             &streams};

  UnknownCalls unknown{&streams,
                       {[this](const std::string& caller) { return connections->Input(caller); },
                        /*answered=*/nullptr}};

  std::unique_ptr<CompletionDispatcher> dispatcher;  // last: its queue refers to the streams
};

AskingService::AskingService(IntrospectionContext context, const Connections* connections,
                             UserExecutor* executor)
    : parts_(std::make_unique<Parts>(std::move(context), connections, executor)) {}

AskingService::~AskingService() = default;

void AskingService::Register(grpc::ServerBuilder* builder) {
  for (StreamService* service :
       {&parts_->health_service, &parts_->introspection_service, &parts_->reflection_service}) {
    builder->RegisterService(service);
  }
  parts_->unknown.Register(builder);
  parts_->dispatcher = std::make_unique<CompletionDispatcher>(builder->AddCompletionQueue());
}

void AskingService::Start() {
  Parts& p = *parts_;
  grpc::ServerCompletionQueue* const queue = p.dispatcher->queue();
  // First, because it may fail. One thread: QuestionStream relies on it.
  p.dispatcher->Start(1);
  p.check.Start(&p.health_service, 0, queue);
  p.watch.Start(&p.health_service, 1, queue);
  p.status.Start(&p.introspection_service, 0, queue);
  p.stats.Start(&p.introspection_service, 1, queue);
  p.timeline.Start(&p.introspection_service, 2, queue);
  p.reflection.Start(&p.reflection_service, 0, queue);
  p.unknown.Start(queue);
}

void AskingService::StopServing() { parts_->health.StopServing(); }

void AskingService::Tick(std::uint64_t now_ns) {
  Parts& p = *parts_;
  p.check.Tick(now_ns);
  p.watch.Tick(now_ns);
  p.status.Tick(now_ns);
  p.stats.Tick(now_ns);
  p.timeline.Tick(now_ns);
  p.reflection.Tick(now_ns);
}

void AskingService::Stop(std::chrono::steady_clock::time_point deadline) {
  Parts& p = *parts_;
  p.check.Stop();
  p.watch.Stop();
  p.status.Stop();
  p.stats.Stop();
  p.timeline.Stop();
  p.reflection.Stop();
  p.unknown.Stop();
  p.streams.WaitForNone(deadline);
  p.dispatcher->Stop();
}

}  // namespace gradsync::daemon
