// Which of the messages between nodes that wait has the next turn.

#ifndef DAEMON_PEER_TURN_QUEUE_H_
#define DAEMON_PEER_TURN_QUEUE_H_

#include <cstdint>
#include <deque>
#include <functional>
#include <map>
#include <optional>
#include <string>
#include <utility>
#include <vector>

#include "daemon/base/tenant.h"

namespace gradsync::daemon {

// One message of a user has a turn at a time, and one message of an address. A ticket says since
// when a user waits at an address; it has a new one after each turn there. The next turn goes to
// the lowest ticket among the messages that can have one. An address does not wait for a user that
// has a turn elsewhere: another user goes first. But then no younger ticket of the first user goes
// before that one. So nobody starves.
//
// Not thread-safe: PeerTurns guards it.
class TurnQueue {
 public:
  // Handles a message. True: it is dropped instead.
  using Take = std::function<void(bool drop)>;
  struct Turn {
    Tenant user;
    std::string address;
    Take take;
  };

  // The message waits. `address`: of the node that names the user; empty: the user is known, and
  // only the user's other messages count. Returns the message if it has a turn at once.
  std::optional<Turn> Add(const Tenant& user, const std::string& address, Take take);
  // The message of such a turn is handled. Returns the messages that have turns now: at most two.
  std::vector<Turn> End(const Tenant& user, const std::string& address);
  // No message waits or has a turn.
  bool empty() const { return users_.empty() && addresses_.empty() && waiting_.empty(); }

 private:
  // Since when a user waits at an address: the lower, the longer.
  using Ticket = std::uint64_t;
  // The messages of a user from an address.
  struct Messages {
    Ticket ticket = 0;
    std::deque<Take> takes;  // not empty
  };
  struct User {
    bool busy = false;                        // one of its messages has a turn
    std::map<Ticket, std::string> addresses;  // whose messages wait
    std::optional<Ticket> passed;             // its lowest ticket that another user has passed
  };
  struct Address {
    bool busy = false;               // one of its messages has a turn
    std::map<Ticket, Tenant> users;  // whose messages wait
  };

  struct Candidate {
    Ticket ticket = 0;
    Tenant user;
    std::string address;
  };

  void Wait(const Tenant& user, const std::string& address, Messages messages);
  bool IsIdle(const std::string& address) const;
  bool CanBegin(Ticket ticket, const Tenant& user, const std::string& address) const;
  // The message that can begin and has waited longest, of the user and at the address. Nullopt:
  // none can.
  std::optional<Candidate> FirstOf(const Tenant& user) const;
  std::optional<Candidate> FirstAt(const std::string& address) const;
  // The one with the lower ticket.
  static std::optional<Candidate> Earlier(std::optional<Candidate> one,
                                          std::optional<Candidate> other);
  Turn Begin(const Tenant& user, const std::string& address);
  // A message with this ticket begins at the address, and so passes lower tickets of users that
  // have turns elsewhere.
  void NotePassed(Ticket ticket, const std::string& address);

  Ticket last_ticket_ = 0;
  // Those that have messages that wait, or a turn.
  std::map<Tenant, User> users_;
  std::map<std::string, Address> addresses_;
  std::map<std::pair<Tenant, std::string>, Messages> waiting_;
};

}  // namespace gradsync::daemon

#endif  // DAEMON_PEER_TURN_QUEUE_H_
