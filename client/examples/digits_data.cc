#include "client/examples/digits_data.h"

#include <errno.h>
#include <zlib.h>

#include <array>
#include <cstring>

#include "absl/status/status.h"
#include "absl/strings/numbers.h"
#include "absl/strings/str_cat.h"
#include "absl/strings/str_split.h"
#include "absl/strings/strip.h"

namespace gradsync::examples {
namespace {

constexpr int kHighestPixel = 16;
constexpr std::size_t kHeldOutOneIn = 5;
// Far above the real file (273 kB of text): a wrong file is refused, not swallowed.
constexpr std::size_t kLargestFile = 16u << 20;

absl::StatusOr<std::string> ReadGzip(const std::string& path) {
  errno = 0;
  gzFile file = gzopen(path.c_str(), "rb");
  if (file == nullptr) {
    return absl::NotFoundError(absl::StrCat("cannot open ", path, ": ", std::strerror(errno)));
  }
  std::string text;
  std::array<char, 64 << 10> chunk;
  int got = 0;
  while ((got = gzread(file, chunk.data(), chunk.size())) > 0 && text.size() <= kLargestFile) {
    text.append(chunk.data(), got);
  }
  int code = Z_OK;
  const std::string error = got < 0 ? gzerror(file, &code) : "";
  // A truncated file shows only here.
  if (gzclose_r(file) != Z_OK || got < 0) {
    return absl::InvalidArgumentError(
        absl::StrCat(path, ": ", error.empty() ? "ends too early" : error));
  }
  if (text.size() > kLargestFile) {
    return absl::InvalidArgumentError(absl::StrCat(path, ": larger than 16 MiB"));
  }
  return text;
}

}  // namespace

void Samples::Append(const float* image, std::uint8_t label) {
  pixels.insert(pixels.end(), image, image + kPixels);
  labels.push_back(label);
}

absl::StatusOr<Digits> ParseDigits(absl::string_view csv, absl::string_view source) {
  Digits digits;
  std::size_t line_number = 0;
  for (absl::string_view line : absl::StrSplit(absl::StripSuffix(csv, "\n"), '\n')) {
    ++line_number;
    const auto malformed = [&](absl::string_view what) {
      return absl::InvalidArgumentError(absl::StrCat(source, ":", line_number, ": ", what));
    };
    const std::vector<absl::string_view> columns = absl::StrSplit(line, ',');
    if (columns.size() != kPixels + 1) {
      return malformed(
          absl::StrCat("expected 64 pixels and a label, found ", columns.size(), " columns"));
    }
    std::array<float, kPixels> image;
    for (std::size_t i = 0; i < kPixels; ++i) {
      int pixel = 0;
      if (!absl::SimpleAtoi(columns[i], &pixel) || pixel < 0 || pixel > kHighestPixel) {
        return malformed(absl::StrCat("pixel ", i + 1, " is '", columns[i], "', not 0 to 16"));
      }
      image[i] = static_cast<float>(pixel) / kHighestPixel;
    }
    int label = 0;
    if (!absl::SimpleAtoi(columns[kPixels], &label) || label < 0 || label > 9) {
      return malformed(absl::StrCat("the label is '", columns[kPixels], "', not 0 to 9"));
    }
    Samples& half = (line_number - 1) % kHeldOutOneIn == 0 ? digits.test : digits.train;
    half.Append(image.data(), static_cast<std::uint8_t>(label));
  }
  if (digits.train.size() == 0) {
    return absl::InvalidArgumentError(absl::StrCat(source, ": too few lines"));
  }
  return digits;
}

absl::StatusOr<Digits> LoadDigits(const std::string& path) {
  absl::StatusOr<std::string> csv = ReadGzip(path);
  if (!csv.ok()) return csv.status();
  return ParseDigits(*csv, path);
}

}  // namespace gradsync::examples
