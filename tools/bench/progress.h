// What a person sees on stderr while figures are being made.

#ifndef TOOLS_BENCH_PROGRESS_H_
#define TOOLS_BENCH_PROGRESS_H_

#include <cstdint>
#include <string>

namespace gradsync::bench {

// One size. On a terminal, a line that counts iterations and is wiped in the end; elsewhere, one
// line that says what has begun. Main thread only.
class Progress {
 public:
  Progress(std::string what, std::uint64_t total);
  ~Progress();
  Progress(const Progress&) = delete;
  Progress& operator=(const Progress&) = delete;

  void Done(std::uint64_t iterations);

 private:
  const std::string what_;
  const std::uint64_t total_;
  const bool terminal_;
};

}  // namespace gradsync::bench

#endif  // TOOLS_BENCH_PROGRESS_H_
