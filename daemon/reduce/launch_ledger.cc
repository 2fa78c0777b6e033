#include "daemon/reduce/launch_ledger.h"

#include <algorithm>
#include <utility>
#include <variant>

namespace gradsync::daemon {

void Finish(const LaunchRecord& launch) {
  ReduceOperation& operation = *launch.operation;
  operation.failure = launch.failure;
  operation.stats = launch.stats.value_or(GradientStats{});
  if (auto* const device = std::get_if<DeviceReduction>(&operation.work)) {
    device->is_void = launch.is_void;
  }
  operation.done(launch.times);
}

std::uint64_t LaunchLedger::Begin(LaunchRecord launch,
                                  const std::vector<Participant>& participants) {
  in_flight_[++last_number_] = {std::move(launch), {participants.begin(), participants.end()}};
  return last_number_;
}

bool LaunchLedger::Owes(Participant participant, std::uint64_t number) const {
  const auto found = in_flight_.find(number);
  return found != in_flight_.end() && found->second.owing.count(participant) > 0;
}

std::vector<std::uint64_t> LaunchLedger::OwedBy(Participant participant) const {
  std::vector<std::uint64_t> owed;
  for (const auto& [number, flight] : in_flight_) {
    if (flight.owing.count(participant) > 0) owed.push_back(number);
  }
  return owed;
}

std::set<LaunchLedger::Participant> LaunchLedger::Late(std::uint64_t now_ns,
                                                       std::uint64_t limit_ns) const {
  std::set<Participant> late;
  for (const auto& [number, flight] : in_flight_) {
    const std::uint64_t answered_ns = flight.launch.times.finish_ns;
    if (answered_ns == 0 || now_ns <= answered_ns + limit_ns) continue;
    late.insert(flight.owing.begin(), flight.owing.end());
  }
  return late;
}

std::optional<LaunchRecord> LaunchLedger::Answer(Participant participant, std::uint64_t number,
                                                 const LaunchAnswer& answer) {
  const auto found = in_flight_.find(number);
  if (found == in_flight_.end() || found->second.owing.erase(participant) == 0) {
    return std::nullopt;
  }
  LaunchRecord& launch = found->second.launch;
  if (launch.failure.ok()) launch.failure = answer.status;
  if (!launch.stats.has_value()) launch.stats = answer.stats;
  launch.is_void = launch.is_void || answer.is_void;
  launch.times.start_ns = std::max(launch.times.start_ns, answer.times.start_ns);
  launch.times.finish_ns = std::max(launch.times.finish_ns, answer.times.finish_ns);
  if (!found->second.owing.empty()) return std::nullopt;
  LaunchRecord finished = std::move(launch);
  in_flight_.erase(found);
  return finished;
}

std::vector<std::shared_ptr<void>> LaunchLedger::Owners() const {
  std::vector<std::shared_ptr<void>> owners;
  for (const auto& [number, flight] : in_flight_) owners.push_back(flight.launch.owner);
  return owners;
}

}  // namespace gradsync::daemon
