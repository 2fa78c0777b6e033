// The digits that the example learns to read: 8x8 greyscale images of handwritten 0-9
// (data/README.md).

#ifndef CLIENT_EXAMPLES_DIGITS_DATA_H_
#define CLIENT_EXAMPLES_DIGITS_DATA_H_

#include <cstddef>
#include <cstdint>
#include <string>
#include <vector>

#include "absl/status/statusor.h"
#include "absl/strings/string_view.h"

namespace gradsync::examples {

inline constexpr std::size_t kPixels = 64;
inline constexpr std::size_t kClasses = 10;

// Images with their labels. Image i is pixels[i * kPixels] onwards, each pixel in 0..1.
struct Samples {
  std::vector<float> pixels;
  std::vector<std::uint8_t> labels;

  std::size_t size() const { return labels.size(); }
  void Append(const float* image, std::uint8_t label);
};

struct Digits {
  Samples train;
  Samples test;  // held out: every fifth line of the file, from the first on
};

// Reads a CSV file, gzip-compressed or plain. Each line has 64 pixels (0-16) and the label (0-9).
//   NOT_FOUND         no such file.
//   INVALID_ARGUMENT  a line has another format, and the error names it; or there are too few lines
//                     for a test set.
absl::StatusOr<Digits> LoadDigits(const std::string& path);

// The same from text in memory; `source` names it in errors.
absl::StatusOr<Digits> ParseDigits(absl::string_view csv, absl::string_view source);

}  // namespace gradsync::examples

#endif  // CLIENT_EXAMPLES_DIGITS_DATA_H_
