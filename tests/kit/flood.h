// A stranger that floods a TCP port with connections on which it says nothing.

#ifndef TESTS_KIT_FLOOD_H_
#define TESTS_KIT_FLOOD_H_

#include <atomic>
#include <cstddef>
#include <string>
#include <thread>

namespace gradsync {

// Keeps kConnections open, and makes a new one for each that the other side has closed. It calls
// from an address that no node of a test has, so limits per caller count it separately.
class Flood {
 public:
  static constexpr std::size_t kConnections = 300;
  static constexpr char kAddress[] = "127.0.0.9";

  // `to`: "host:port", an IPv4 address of this machine. It ends when nobody listens there any more.
  explicit Flood(std::string to);
  ~Flood();
  Flood(const Flood&) = delete;
  Flood& operator=(const Flood&) = delete;

  // How many connections it has made.
  std::size_t made() const { return made_; }

 private:
  void Run();

  const std::string to_;
  std::atomic<bool> stop_{false};
  std::atomic<std::size_t> made_{0};
  std::thread thread_;  // last: it uses the other members
};

}  // namespace gradsync

#endif  // TESTS_KIT_FLOOD_H_
