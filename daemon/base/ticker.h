// A thread that calls a function at fixed intervals, but only while there is something to do.

#ifndef DAEMON_BASE_TICKER_H_
#define DAEMON_BASE_TICKER_H_

#include <chrono>
#include <condition_variable>
#include <functional>
#include <mutex>
#include <thread>

namespace gradsync::daemon {

// Thread-safe. Owns its thread; the destructor ends and joins it.
class Ticker {
 public:
  // Calls `tick` until it returns false, and again after Wake(). It sleeps until the first Wake().
  Ticker(std::chrono::milliseconds period, std::function<bool()> tick);
  ~Ticker() { Stop(); }
  Ticker(const Ticker&) = delete;
  Ticker& operator=(const Ticker&) = delete;

  void Wake();
  // Waits for a call of `tick` that is under way. No other call follows.
  void Stop();

 private:
  void Loop();

  const std::chrono::milliseconds period_;
  const std::function<bool()> tick_;

  std::mutex mutex_;
  std::condition_variable changed_;
  bool active_ = false;
  bool stopping_ = false;

  std::thread thread_;  // last
};

}  // namespace gradsync::daemon

#endif  // DAEMON_BASE_TICKER_H_
