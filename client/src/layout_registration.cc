#include "client/src/layout_registration.h"

#include <algorithm>
#include <utility>
#include <vector>

#include "absl/cleanup/cleanup.h"
#include "absl/strings/str_cat.h"
#include "absl/time/clock.h"
#include "client/src/answer_deadline.h"
#include "client/src/connection.h"
#include "client/src/device_layout.h"
#include "client/src/error.h"
#include "client/src/fd_socket.h"
#include "client/src/fork_guard.h"
#include "client/src/layout.h"
#include "client/src/layout_plan.h"
#include "client/src/mapped_memory.h"
#include "client/src/request_parts.h"
#include "client/src/step_client.h"
#include "gradsync/shared_memory.h"

namespace gradsync::client {
namespace {

// What follows the daemon's first answer. `context`: null in host memory.
absl::StatusOr<std::unique_ptr<Layout>> MapAndAwait(const std::shared_ptr<Connection>& connection,
                                                    const LayoutSpec& spec,
                                                    const std::shared_ptr<CudaContext>& context,
                                                    absl::Time deadline,
                                                    LayoutRegistration* registration);

}  // namespace

void LayoutRegistration::OnAssigned(const v1::LayoutAssigned& assigned) {
  absl::MutexLock lock(&mutex_);
  if (is_assigned_) return;
  assigned_ = assigned;
  is_assigned_ = true;
}

bool LayoutRegistration::OnReady(const v1::LayoutReady& ready) {
  absl::MutexLock lock(&mutex_);
  if (!is_assigned_ || assigned_.channel() != ready.channel()) return false;
  ready_ = ready;
  is_ready_ = true;
  return true;
}

void LayoutRegistration::OnFailed(const absl::Status& status) {
  absl::MutexLock lock(&mutex_);
  if (failed_.ok()) failed_ = status;
}

absl::Status LayoutRegistration::AwaitLocked(const bool* answered, absl::Time deadline) {
  const auto settled = [this, answered]() ABSL_EXCLUSIVE_LOCKS_REQUIRED(mutex_) {
    return *answered || !failed_.ok();
  };
  if (!mutex_.AwaitWithDeadline(absl::Condition(&settled), deadline)) {
    return MakeError(
        absl::StatusCode::kDeadlineExceeded, reason::kWaitTimeout,
        "the daemon did not answer RegisterLayout; check that gradsyncd is not stopped "
        "(gradsyncctl health)");
  }
  return failed_;
}

absl::StatusOr<v1::LayoutAssigned> LayoutRegistration::AwaitAssigned(absl::Time deadline) {
  absl::MutexLock lock(&mutex_);
  if (auto status = AwaitLocked(&is_assigned_, deadline); !status.ok()) return status;
  return assigned_;
}

absl::StatusOr<v1::LayoutReady> LayoutRegistration::AwaitReady(absl::Time deadline) {
  absl::MutexLock lock(&mutex_);
  if (auto status = AwaitLocked(&is_ready_, deadline); !status.ok()) return status;
  return ready_;
}

absl::Status LayoutRegistration::AwaitFailure(absl::Time deadline) {
  const auto failed = [this]() ABSL_EXCLUSIVE_LOCKS_REQUIRED(mutex_) { return !failed_.ok(); };
  absl::MutexLock lock(&mutex_);
  mutex_.AwaitWithDeadline(absl::Condition(&failed), deadline);
  return failed_;
}

absl::StatusOr<std::unique_ptr<Layout>> RegisterLayout(
    const std::shared_ptr<Connection>& connection, const LayoutSpec& spec, const Layout* old) {
  if (auto status = ValidateSpec(spec); !status.ok()) return status;
  if (auto end = connection->End(); !end.ok()) return end;
  std::shared_ptr<CudaContext> context;
  if (!spec.device.empty()) {
    auto opened = OpenDevice(spec.device);
    if (!opened.ok()) return opened.status();
    context = *std::move(opened);
  }
  if (connection->left()) {
    return MakeError(absl::StatusCode::kFailedPrecondition, reason::kLeft,
                     absl::StrCat("layout '", spec.name,
                                  "' cannot be registered: this rank has left; register "
                                  "layouts before LeaveAndStay, or after it has returned"),
                     connection->Fields());
  }
  std::shared_ptr<StepClient> replaced;
  if (old != nullptr) {
    auto steps = StepsOf(*old);
    if (!steps.ok()) return steps.status();
    replaced = *std::move(steps);
    if (replaced->connection() != connection.get()) {
      return MakeError(absl::StatusCode::kInvalidArgument, reason::kMalformed,
                       absl::StrCat("ReplaceLayout cannot replace '", old->name(),
                                    "': it is a layout of another session"),
                       connection->Fields());
    }
    if (auto status = replaced->BeginReplacement(); !status.ok()) return status;
  }

  LayoutRegistration registration;
  const std::uint64_t request_id = connection->Announce(&registration);
  const auto withdraw = absl::MakeCleanup([&] { connection->Withdraw(request_id); });
  const absl::Time deadline = AnswerDeadline(spec.timeout);
  v1::SessionRequest request;
  FillRegisterLayout(spec, request.mutable_register_layout());
  request.mutable_register_layout()->set_request_id(request_id);
  if (context != nullptr) request.mutable_register_layout()->set_mps(SharesThroughMps(*context));
  if (replaced != nullptr) request.mutable_register_layout()->set_replaces(replaced->channel());
  connection->stream().Send(LayoutMessages(std::move(request)));

  auto layout = MapAndAwait(connection, spec, context, deadline, &registration);
  if (replaced == nullptr) return layout;
  if (layout.ok()) {
    replaced->Replaced();
  } else if (!registration.AwaitFailure(deadline).ok()) {
    replaced->ReplacementFailed();
  } else {
    // Unknown: the daemon may have replaced the old one, or not.
    replaced->OnSessionEnd(layout.status());
  }
  return layout;
}

namespace {

absl::StatusOr<LayoutMemory> MapHostLayout(int memfd, std::uint64_t bytes) {
  auto arena = MappedMemory::Map(memfd, bytes, "arena");
  if (!arena.ok()) return arena.status();
  if (auto status = (*arena)->PopulateAndSeal(memfd); !status.ok()) return status;
  std::byte* const data = (*arena)->data();
  return LayoutMemory{{*std::move(arena), data}, nullptr};
}

absl::StatusOr<std::unique_ptr<Layout>> MapAndAwait(const std::shared_ptr<Connection>& connection,
                                                    const LayoutSpec& spec,
                                                    const std::shared_ptr<CudaContext>& context,
                                                    absl::Time deadline,
                                                    LayoutRegistration* registration) {
  const auto assigned = registration->AwaitAssigned(deadline);
  if (!assigned.ok()) return assigned.status();
  auto plan = CheckedPlan(spec, *assigned);
  if (!plan.ok()) return plan.status();
  // The semaphores' descriptor is the last one. With an IPC handle the arena has none.
  const std::size_t count = plan->memory == ArenaMemory::kCudaIpc ? 1 : 2;
  auto descriptors = FetchDescriptors(FdSocketPath(connection->options().socket), assigned->nonce(),
                                      count, deadline);
  if (!descriptors.ok()) {
    const absl::Status failure =
        registration->AwaitFailure(absl::Now() + PatienceForReason(descriptors.status()));
    return failure.ok() ? descriptors.status() : failure;
  }
  auto semaphores = MappedMemory::Map(descriptors->back().get(),
                                      SemaphoreBytes(plan->buckets.size()), "semaphores");
  if (!semaphores.ok()) return semaphores.status();
  if (context == nullptr) {
    absl::Status status = (*semaphores)->PopulateAndSeal(descriptors->back().get());
    if (!status.ok()) return status;
  }
  const int arena = descriptors->front().get();
  auto memory = context == nullptr ? MapHostLayout(arena, plan->arena_bytes)
                                   : MapDeviceLayout(context, *plan, arena, *semaphores);
  if (!memory.ok()) return memory.status();

  auto steps = std::make_shared<StepClient>(connection, assigned->channel(), spec.name, *plan,
                                            context == nullptr ? memory->arena : nullptr,
                                            *std::move(semaphores));
  std::shared_ptr<DeviceSteps> device_steps;
  if (context != nullptr) {
    device_steps = std::make_shared<DeviceSteps>(steps, std::move(memory->handoff));
  }
  connection->Attach(assigned->channel(), steps);
  v1::SessionRequest mapped;
  mapped.mutable_arena_mapped()->set_channel(assigned->channel());
  connection->stream().Send(std::move(mapped));

  const auto ready = registration->AwaitReady(deadline);
  if (!ready.ok()) {
    if (device_steps != nullptr) device_steps->Close();
    return ready.status();
  }
  steps->Begin(ready->first_step());
  return NewLayout(spec, ready->fingerprint(), *std::move(plan), std::move(memory->arena),
                   std::move(steps), std::move(device_steps));
}

}  // namespace

}  // namespace gradsync::client
