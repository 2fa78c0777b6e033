#include "client/src/state_image.h"

#include <sys/mman.h>

#include <algorithm>
#include <cstring>
#include <utility>

#include "absl/container/flat_hash_set.h"
#include "absl/strings/str_cat.h"
#include "absl/strings/string_view.h"
#include "client/src/error.h"
#include "client/src/utf8.h"
#include "gradsync/limits.h"

namespace gradsync::client {
namespace {

constexpr absl::string_view kMagic = "GSSTATE1";
constexpr std::uint64_t kNumberBytes = 8;
constexpr std::uint64_t kAlignment = 64;
// A name and two lengths have at least this.
constexpr std::uint64_t kLeastEntryBytes = 2 * kNumberBytes + 1;

std::uint64_t Aligned(std::uint64_t bytes) {
  return (bytes + kAlignment - 1) / kAlignment * kAlignment;
}

void AppendNumber(std::uint64_t number, std::string* out) {
  for (unsigned i = 0; i < kNumberBytes; ++i) {
    out->push_back(static_cast<char>(number >> (8 * i)));
  }
}

absl::Status Malformed(absl::string_view what) {
  return MakeError(absl::StatusCode::kInvalidArgument, reason::kMalformed,
                   absl::StrCat("the state of the model: ", what));
}

absl::Status Broken(absl::string_view what) {
  return MakeError(absl::StatusCode::kFailedPrecondition, reason::kStateRefused,
                   absl::StrCat("the state of the model that arrived is malformed: ", what,
                                "; check that every rank runs the same release of gradsync"));
}

// Reads the header of an image piece by piece.
class HeaderReader {
 public:
  explicit HeaderReader(absl::string_view image) : rest_(image) {}

  // False: fewer bytes are left.
  bool Take(std::uint64_t bytes, absl::string_view* out) {
    if (bytes > rest_.size()) return false;
    *out = rest_.substr(0, bytes);
    rest_.remove_prefix(bytes);
    return true;
  }
  bool TakeNumber(std::uint64_t* out) {
    absl::string_view bytes;
    if (!Take(kNumberBytes, &bytes)) return false;
    *out = 0;
    for (unsigned i = 0; i < kNumberBytes; ++i) {
      *out |= std::uint64_t{static_cast<unsigned char>(bytes[i])} << (8 * i);
    }
    return true;
  }
  std::size_t left() const { return rest_.size(); }

 private:
  absl::string_view rest_;
};

}  // namespace

absl::Status ValidateItems(absl::Span<const StateItem> items) {
  absl::flat_hash_set<absl::string_view> names;
  for (std::size_t i = 0; i < items.size(); ++i) {
    const StateItem& item = items[i];
    const std::string who =
        absl::StrCat("item ", i, " ('", ValidUtf8(item.name.substr(0, 80)), "')");
    if (item.name.empty() || item.name.size() > kMaxStateNameBytes ||
        ValidUtf8(item.name) != item.name) {
      return Malformed(
          absl::StrCat(who, " needs a name of 1 to ", kMaxStateNameBytes, " bytes of UTF-8"));
    }
    if (!names.insert(item.name).second) {
      return Malformed(absl::StrCat(who, " has the name of an earlier one"));
    }
    if (item.data == nullptr && item.bytes > 0) {
      return Malformed(absl::StrCat(who, " has ", item.bytes, " bytes at a null pointer"));
    }
  }
  return absl::OkStatus();
}

StateImageSource::StateImageSource(std::vector<StateItem> items) : items_(std::move(items)) {
  header_ = std::string(kMagic);
  AppendNumber(items_.size(), &header_);
  for (const StateItem& item : items_) {
    AppendNumber(item.name.size(), &header_);
    AppendNumber(item.bytes, &header_);
    header_ += item.name;
  }
  header_.resize(Aligned(header_.size()), '\0');
  bytes_ = header_.size();
  for (const StateItem& item : items_) {
    offsets_.push_back(bytes_);
    bytes_ += Aligned(item.bytes);
  }
}

void StateImageSource::Copy(std::uint64_t offset, std::size_t bytes, std::byte* out) const {
  // What begins at or before `offset`.
  std::size_t next = static_cast<std::size_t>(
      std::upper_bound(offsets_.begin(), offsets_.end(), offset) - offsets_.begin());
  while (bytes > 0) {
    const bool header = next == 0;
    const std::uint64_t begin = header ? 0 : offsets_[next - 1];
    const std::uint64_t end = next < offsets_.size() ? offsets_[next] : bytes_;
    const char* const data =
        header ? header_.data() : static_cast<const char*>(items_[next - 1].data);
    const std::uint64_t size = header ? header_.size() : items_[next - 1].bytes;
    const std::uint64_t from = offset - begin;
    const std::size_t piece = std::min<std::uint64_t>(bytes, end - offset);
    const std::size_t copied = from < size ? std::min<std::uint64_t>(piece, size - from) : 0;
    if (copied > 0) std::memcpy(out, data + from, copied);
    std::memset(out + copied, 0, piece - copied);
    out += piece;
    offset += piece;
    bytes -= piece;
    ++next;
  }
}

std::shared_ptr<std::byte> NewImageMemory(std::uint64_t bytes) {
  void* const data =
      mmap(nullptr, bytes, PROT_READ | PROT_WRITE, MAP_PRIVATE | MAP_ANONYMOUS, -1, 0);
  if (data == MAP_FAILED) return nullptr;
  return {static_cast<std::byte*>(data), [bytes](std::byte* memory) { munmap(memory, bytes); }};
}

absl::StatusOr<StateImage> ParseImage(std::uint32_t source, std::shared_ptr<std::byte> memory,
                                      std::uint64_t bytes) {
  HeaderReader reader({reinterpret_cast<const char*>(memory.get()), bytes});
  absl::string_view magic;
  std::uint64_t count = 0;
  if (!reader.Take(kMagic.size(), &magic) || magic != kMagic || !reader.TakeNumber(&count)) {
    return Broken("it has no header");
  }
  if (count > reader.left() / kLeastEntryBytes) return Broken("number of items");
  StateImage image;
  image.source = source;
  std::vector<std::uint64_t> sizes;
  absl::flat_hash_set<absl::string_view> names;
  for (std::uint64_t i = 0; i < count; ++i) {
    std::uint64_t name_bytes = 0;
    std::uint64_t value_bytes = 0;
    absl::string_view name;
    if (!reader.TakeNumber(&name_bytes) || !reader.TakeNumber(&value_bytes) || name_bytes == 0 ||
        name_bytes > kMaxStateNameBytes || !reader.Take(name_bytes, &name) || value_bytes > bytes ||
        !names.insert(name).second) {
      return Broken(absl::StrCat("item ", i));
    }
    image.items.push_back({std::string(name), {}});
    sizes.push_back(value_bytes);
  }
  std::uint64_t offset = Aligned(bytes - reader.left());
  for (std::uint64_t i = 0; i < count; ++i) {
    if (offset > bytes || sizes[i] > bytes - offset) return Broken(absl::StrCat("item ", i));
    image.items[i].data = absl::MakeSpan(memory.get() + offset, sizes[i]);
    offset += Aligned(sizes[i]);
  }
  if (offset != bytes) return Broken("its length");
  image.memory = std::move(memory);
  return image;
}

}  // namespace gradsync::client
