// Which message between nodes has the next turn.

#include "daemon/peer/turn_queue.h"

#include <algorithm>
#include <cstddef>
#include <map>
#include <optional>
#include <string>
#include <utility>
#include <vector>

#include "absl/strings/str_join.h"
#include "gtest/gtest.h"

namespace gradsync::daemon {
namespace {

// Users and addresses are letters here: "Ua" is a message of user U from address a. '-' stands for
// no address.
class Turns {
 public:
  void Add(const std::string& message) {
    const std::string address = message[1] == '-' ? "" : message.substr(1);
    if (waiting_[message]++ == 0) order_.push_back(message);
    auto turn = queue_.Add(Tenant(static_cast<uid_t>(message[0])), address,
                           [this, message](bool) { handled_ += message; });
    if (turn.has_value()) Begin(*turn);
  }
  // Handles the message that has a turn.
  void End(const std::string& message) {
    const auto turn = running_.find(message);
    ASSERT_NE(turn, running_.end()) << message << " has no turn";
    const TurnQueue::Turn ended = turn->second;
    running_.erase(turn);
    ended.take(/*drop=*/false);
    for (const TurnQueue::Turn& next : queue_.End(ended.user, ended.address)) Begin(next);
  }
  // The messages that have turns, in the order of the alphabet.
  std::string Running() const {
    std::string all;
    for (const auto& [message, turn] : running_) all += (all.empty() ? "" : " ") + message;
    return all;
  }
  std::vector<std::string> RunningOnes() const {
    std::vector<std::string> all;
    for (const auto& [message, turn] : running_) all.push_back(message);
    return all;
  }
  // The messages that wait, those first that wait longest. Two of the same user and address count
  // once, and again after the first one's turn.
  const std::vector<std::string>& waiting() const { return order_; }
  const std::string& handled() const { return handled_; }
  bool empty() const { return queue_.empty() && running_.empty(); }

 private:
  void Begin(const TurnQueue::Turn& turn) {
    const char user = static_cast<char>(turn.user.uid);
    const std::string address = turn.address.empty() ? "-" : turn.address;
    for (const auto& [message, other] : running_) {
      EXPECT_NE(message[0], user) << "two messages of a user";
      EXPECT_TRUE(address == "-" || message.substr(1) != address) << "two messages of " << address;
    }
    const std::string message = std::string(1, user) + address;
    running_.emplace(message, turn);
    order_.erase(std::find(order_.begin(), order_.end(), message));
    if (--waiting_[message] > 0) order_.push_back(message);
  }

  TurnQueue queue_;
  std::map<std::string, TurnQueue::Turn> running_;
  std::map<std::string, int> waiting_;
  std::vector<std::string> order_;
  std::string handled_;
};

TEST(TurnQueueTest, AMessageHasATurnAtOnceIfNeitherItsUserNorItsAddressHasOne) {
  Turns turns;
  for (const char* message : {"Ua", "Ub", "Va", "Vb", "W-", "W-", "Wc"}) turns.Add(message);
  EXPECT_EQ(turns.Running(), "Ua Vb W-");
  turns.End("Ua");
  EXPECT_EQ(turns.Running(), "Vb W-");
  turns.End("Vb");
  EXPECT_EQ(turns.Running(), "Ub Va W-");
  turns.End("W-");
  turns.End("W-");
  EXPECT_EQ(turns.Running(), "Ub Va Wc");
  for (const char* message : {"Ub", "Va", "Wc"}) turns.End(message);
  EXPECT_EQ(turns.handled(), "UaVbW-W-UbVaWc");
  EXPECT_TRUE(turns.empty());
}

TEST(TurnQueueTest, TheUsersOfAnAddressTakeTurns) {
  Turns turns;
  for (const char* message : {"Ua", "Ua", "Ua", "Va", "Va"}) turns.Add(message);
  for (const char* message : {"Ua", "Ua", "Va", "Ua", "Va"}) turns.End(message);
  EXPECT_TRUE(turns.empty());
}

TEST(TurnQueueTest, TheAddressesOfAUserTakeTurns) {
  Turns turns;
  for (const char* message : {"Ua", "Ua", "Ua", "Ub", "U-", "Ub"}) turns.Add(message);
  for (const char* message : {"Ua", "Ua", "Ub", "U-", "Ua", "Ub"}) turns.End(message);
  EXPECT_TRUE(turns.empty());
}

// The user that waits longest at the address has a turn elsewhere.
TEST(TurnQueueTest, AnAddressDoesNotWaitForAUserThatHasATurnElsewhere) {
  Turns turns;
  for (const char* message : {"Va", "Xa", "Ya", "Xb"}) turns.Add(message);
  EXPECT_EQ(turns.Running(), "Va Xb");
  turns.End("Va");
  EXPECT_EQ(turns.Running(), "Xb Ya");
}

// U always has a message at b, and V always one at a.
TEST(TurnQueueTest, AUserThatWasPassedOverHasItsNextTurnThere) {
  Turns turns;
  for (const char* message : {"Ub", "Va", "Ua", "Ub", "Va"}) turns.Add(message);
  turns.End("Va");  // U has a turn at b
  turns.Add("Va");
  EXPECT_EQ(turns.Running(), "Ub Va");
  turns.End("Ub");
  turns.Add("Ub");
  EXPECT_EQ(turns.Running(), "Va") << "U waits for a";
  turns.End("Va");
  EXPECT_EQ(turns.Running(), "Ua");
  turns.End("Ua");
  EXPECT_EQ(turns.Running(), "Ub Va");
}

// V passes U at b while U has a turn at a. U waits longest at c.
TEST(TurnQueueTest, AUserThatWasPassedOverStillHasItsOldestMessageFirst) {
  Turns turns;
  for (const char* message : {"Ua", "Vb", "Uc", "Ub", "Vb"}) turns.Add(message);
  turns.End("Vb");
  EXPECT_EQ(turns.Running(), "Ua Vb");
  turns.End("Ua");
  EXPECT_EQ(turns.Running(), "Uc Vb");
}

// V and X keep U's other addresses busy, and each passes U while it has a turn at the other one.
TEST(TurnQueueTest, NobodyStarvesBecauseItIsPassedOverAgainAndAgain) {
  Turns turns;
  for (const char* message : {"Ua", "Vb", "Uc", "Ub", "Vb", "Xa", "Ua"}) turns.Add(message);
  for (int i = 0; i < 10 && turns.handled().find("Uc") == std::string::npos; ++i) {
    for (const std::string& message : turns.RunningOnes()) {
      turns.End(message);
      turns.Add(message);
    }
  }
  EXPECT_NE(turns.handled().find("Uc"), std::string::npos) << turns.handled();
}

// Every order of so many events: three users, two addresses, and messages without an address. Turns
// checks that no user and no address has two turns.
class EveryOrder {
 public:
  int Count(std::size_t events) {
    Try({}, events);
    return orders_;
  }

 private:
  // "+Ua" adds a message, "-Ua" ends its turn.
  static void Follow(const std::vector<std::string>& events, Turns* turns) {
    for (const std::string& event : events) {
      event[0] == '+' ? turns->Add(event.substr(1)) : turns->End(event.substr(1));
    }
  }
  void Try(const std::vector<std::string>& events, std::size_t more) {
    Turns turns;
    Follow(events, &turns);
    Check(events, turns);
    if (more == 0) {
      ++orders_;
      return Drain(events, &turns);
    }
    std::vector<std::string> next;
    for (const char* message : {"Ua", "Ub", "Va", "Vb", "Wa", "W-"}) {
      next.push_back(std::string("+") + message);
    }
    for (const std::string& message : turns.RunningOnes()) next.push_back("-" + message);
    for (const std::string& event : next) {
      std::vector<std::string> longer = events;
      longer.push_back(event);
      Try(longer, more - 1);
    }
  }
  // A message waits only for a turn of its user or its address, or for an older one of its user.
  static void Check(const std::vector<std::string>& events, const Turns& turns) {
    std::string busy;
    for (const std::string& message : turns.RunningOnes()) busy += message;
    std::string waits;  // users with an older message
    for (const std::string& message : turns.waiting()) {
      const bool is_older = waits.find(message[0]) == std::string::npos;
      waits += message[0];
      if (!is_older || busy.find(message[0]) != std::string::npos) continue;
      EXPECT_TRUE(message[1] != '-' && busy.find(message[1]) != std::string::npos)
          << message << " could have a turn after " << absl::StrJoin(events, " ");
    }
  }
  static void Drain(const std::vector<std::string>& events, Turns* turns) {
    for (std::size_t left = events.size(); left > 0 && !turns->RunningOnes().empty(); --left) {
      turns->End(turns->RunningOnes().front());
    }
    EXPECT_TRUE(turns->empty());
    const auto added = std::count_if(events.begin(), events.end(),
                                     [](const std::string& event) { return event[0] == '+'; });
    EXPECT_EQ(turns->handled().size(), 2 * static_cast<std::size_t>(added));
  }

  int orders_ = 0;
};

TEST(TurnQueueTest, EveryMessageHasOneTurnInEveryOrderOfEvents) {
  EXPECT_GT(EveryOrder().Count(/*events=*/6), 100'000);
}

}  // namespace
}  // namespace gradsync::daemon
