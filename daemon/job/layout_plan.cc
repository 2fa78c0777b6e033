#include "daemon/job/layout_plan.h"

#include <algorithm>
#include <array>
#include <utility>

#include "absl/strings/str_cat.h"
#include "absl/strings/str_join.h"
#include "absl/strings/string_view.h"
#include "daemon/base/error.h"
#include "proto/gradsync/shared_memory.h"

namespace gradsync::daemon {
namespace {

constexpr std::uint64_t kPage = 4096;

constexpr std::uint64_t RoundUp(std::uint64_t value, std::uint64_t multiple) {
  return (value + multiple - 1) / multiple * multiple;
}

std::uint64_t Elements(const Parameter& parameter) {
  std::uint64_t count = 1;
  for (const std::uint64_t extent : parameter.shape) count *= extent;
  return count;
}

// FNV-1a, 64 bits. Identifies a layout in status and logs. Only FirstDifference decides whether
// layouts agree.
class Fingerprint {
 public:
  void Add(std::uint64_t value) {
    for (int shift = 0; shift < 64; shift += 8) AddByte(static_cast<std::uint8_t>(value >> shift));
  }
  void Add(absl::string_view text) {
    Add(text.size());
    for (const char c : text) AddByte(static_cast<std::uint8_t>(c));
  }
  std::uint64_t value() const { return value_; }

 private:
  void AddByte(std::uint8_t byte) { value_ = (value_ ^ byte) * 0x100000001b3u; }
  std::uint64_t value_ = 0xcbf29ce484222325u;
};

std::uint64_t FingerprintOf(const LayoutSpec& spec) {
  Fingerprint print;
  print.Add(spec.name);
  print.Add(spec.parameters.size());
  for (const Parameter& parameter : spec.parameters) {
    print.Add(parameter.name);
    print.Add(static_cast<std::uint64_t>(parameter.dtype));
    print.Add(parameter.shape.size());
    for (const std::uint64_t extent : parameter.shape) print.Add(extent);
  }
  print.Add(spec.bucket_cap_bytes);
  print.Add(spec.first_bucket_cap_bytes);
  print.Add(spec.last_bucket_cap_bytes);
  print.Add(spec.explicit_buckets.size());
  for (const auto& [dtype, count] : spec.explicit_buckets) {
    print.Add(static_cast<std::uint64_t>(dtype));
    print.Add(count);
  }
  print.Add(static_cast<std::uint64_t>(spec.op));
  print.Add(spec.on_gpu ? 1 : 0);
  if (spec.buffer_bytes != 0) print.Add(spec.buffer_bytes);
  return print.value();
}

// Which parameters share a bucket, in the order in which the buckets close.
struct Group {
  DataType dtype = DataType::kUnspecified;
  std::vector<std::size_t> parameters;
  std::uint64_t bytes = 0;  // without padding: the cap does not count it
};

std::uint64_t BytesOf(const Parameter& parameter) {
  return Elements(parameter) * ItemSize(parameter.dtype);
}

std::vector<Group> GroupByRule(const LayoutSpec& spec) {
  struct Open {
    Group group;
    bool first = true;
  };
  std::array<Open, 8> open;  // by dtype: integers have no parameters
  std::vector<Group> closed;
  for (std::size_t i = spec.parameters.size(); i-- > 0;) {
    const Parameter& parameter = spec.parameters[i];
    Open& filling = open[static_cast<std::size_t>(parameter.dtype)];
    const std::uint64_t bytes = BytesOf(parameter);
    const std::uint64_t cap = filling.first ? spec.first_bucket_cap_bytes : spec.bucket_cap_bytes;
    if (!filling.group.parameters.empty() && filling.group.bytes + bytes > cap) {
      closed.push_back(std::exchange(filling.group, Group{}));
      filling.first = false;
    }
    filling.group.dtype = parameter.dtype;
    filling.group.parameters.push_back(i);
    filling.group.bytes += bytes;
  }
  // The groups that are still open close in the order in which backward finishes their first
  // parameters.
  std::vector<Group> rest;
  for (Open& filling : open) {
    if (!filling.group.parameters.empty()) rest.push_back(std::move(filling.group));
  }
  std::sort(rest.begin(), rest.end(), [](const Group& a, const Group& b) {
    return a.parameters.front() > b.parameters.front();
  });
  std::move(rest.begin(), rest.end(), std::back_inserter(closed));
  return closed;
}

// Moves the parameters that are ready last, as many as fit last_bucket_cap_bytes, into a group of
// their own.
void SplitLast(const LayoutSpec& spec, std::vector<Group>* groups) {
  const std::uint64_t cap = spec.last_bucket_cap_bytes;
  if (cap == 0 || groups->empty()) return;
  // With several types, the group that is ready last may not be the last one to close.
  Group& whole = *std::min_element(
      groups->begin(), groups->end(),
      [](const Group& a, const Group& b) { return a.parameters.back() < b.parameters.back(); });
  if (whole.bytes <= cap) return;
  Group last{whole.dtype, {}, 0};
  auto first = whole.parameters.end();
  do {
    last.bytes += BytesOf(spec.parameters[*--first]);
  } while (first != whole.parameters.begin() &&
           last.bytes + BytesOf(spec.parameters[*(first - 1)]) <= cap);
  if (last.bytes == whole.bytes) return;  // only empty parameters would be left
  last.parameters.assign(first, whole.parameters.end());
  whole.parameters.erase(first, whole.parameters.end());
  whole.bytes -= last.bytes;
  groups->push_back(std::move(last));
}

std::string Describe(const Parameter& parameter) {
  return absl::StrCat("'", parameter.name, "' ", DataTypeName(parameter.dtype), " [",
                      absl::StrJoin(parameter.shape, ","), "]");
}

std::string Differ(absl::string_view what, absl::string_view a, std::uint32_t rank_a,
                   absl::string_view b, std::uint32_t rank_b) {
  return absl::StrCat(what, ": ", a, " on rank ", rank_a, ", ", b, " on rank ", rank_b);
}

// What an allocation takes beside its bytes.
constexpr std::uint64_t kAllocationBytes = 16;

}  // namespace

std::uint64_t BytesOf(absl::Span<const Parameter> parameters) {
  std::uint64_t bytes = 0;
  for (const Parameter& parameter : parameters) {
    bytes += sizeof(Parameter) + 2 * kAllocationBytes + parameter.name.size() +
             parameter.shape.size() * sizeof(std::uint64_t);
  }
  return bytes;
}

std::uint64_t BytesOf(const LayoutSpec& spec) {
  return sizeof(LayoutSpec) + BytesOf(spec.parameters) +
         spec.explicit_buckets.size() * sizeof(spec.explicit_buckets.front());
}

std::uint64_t BytesOf(const LayoutPlan& plan) {
  return sizeof(LayoutPlan) + plan.buckets.size() * sizeof(PlannedBucket) +
         plan.placements.size() * sizeof(PlannedParameter);
}

absl::StatusOr<LayoutPlan> PlanLayout(const LayoutSpec& spec, std::size_t max_buckets) {
  LayoutPlan plan;
  plan.fingerprint = FingerprintOf(spec);
  plan.placements.resize(spec.parameters.size());
  std::vector<Group> groups = GroupByRule(spec);
  SplitLast(spec, &groups);
  const std::size_t buckets =
      groups.size() + spec.explicit_buckets.size() + (spec.buffer_bytes != 0 ? 1 : 0);
  if (buckets > max_buckets) {
    return MakeError(
        absl::StatusCode::kResourceExhausted, reason::kQuota,
        absl::StrCat("layout '", spec.name, "' needs ", buckets, " buckets; ", max_buckets,
                     " allowed (quota_buckets_per_layout): raise bucket_cap_bytes"));
  }
  std::uint64_t end = 0;
  for (const Group& group : groups) {
    const std::uint64_t item = ItemSize(group.dtype);
    PlannedBucket bucket{group.dtype, 0, RoundUp(end, kBucketAlignment)};
    std::uint64_t cursor = bucket.offset;
    for (const std::size_t parameter : group.parameters) {
      cursor = RoundUp(cursor, kParameterAlignment);
      plan.placements[parameter] = {static_cast<std::uint32_t>(plan.buckets.size()), cursor};
      cursor += Elements(spec.parameters[parameter]) * item;
    }
    bucket.count = (cursor - bucket.offset) / item;
    end = cursor;
    plan.buckets.push_back(bucket);
  }
  for (const auto& [dtype, count] : spec.explicit_buckets) {
    const std::uint64_t offset = RoundUp(end, kBucketAlignment);
    plan.buckets.push_back({dtype, count, offset});
    end = offset + count * ItemSize(dtype);
  }
  if (spec.buffer_bytes != 0) {
    const std::uint64_t offset = RoundUp(end, kBucketAlignment);
    plan.buckets.push_back({DataType::kUint8, spec.buffer_bytes, offset});
    end = offset + spec.buffer_bytes;
  }
  if (spec.on_gpu) {
    plan.verdict_offset = RoundUp(end, kBucketAlignment);
    end = plan.verdict_offset + 2 * sizeof(float);
  }
  plan.arena_bytes = std::max(kPage, RoundUp(end, kPage));
  return plan;
}

std::string FirstDifference(const LayoutSpec& a, std::uint32_t rank_a, const LayoutSpec& b,
                            std::uint32_t rank_b) {
  if (a.name != b.name) {
    return Differ("name", absl::StrCat("'", a.name, "'"), rank_a, absl::StrCat("'", b.name, "'"),
                  rank_b);
  }
  const std::size_t common = std::min(a.parameters.size(), b.parameters.size());
  for (std::size_t i = 0; i < common; ++i) {
    const Parameter& pa = a.parameters[i];
    const Parameter& pb = b.parameters[i];
    if (pa.name != pb.name || pa.dtype != pb.dtype || pa.shape != pb.shape) {
      return Differ(absl::StrCat("parameter ", i), Describe(pa), rank_a, Describe(pb), rank_b);
    }
  }
  if (a.parameters.size() != b.parameters.size()) {
    const bool a_has_more = a.parameters.size() > common;
    const Parameter& extra = a_has_more ? a.parameters[common] : b.parameters[common];
    return Differ(absl::StrCat("parameter ", common), a_has_more ? Describe(extra) : "none", rank_a,
                  a_has_more ? "none" : Describe(extra), rank_b);
  }
  const std::size_t buckets = std::min(a.explicit_buckets.size(), b.explicit_buckets.size());
  for (std::size_t i = 0; i < buckets; ++i) {
    if (a.explicit_buckets[i] != b.explicit_buckets[i]) {
      const auto describe = [](const std::pair<DataType, std::uint64_t>& bucket) {
        return absl::StrCat(DataTypeName(bucket.first), " x ", bucket.second);
      };
      return Differ(absl::StrCat("bucket ", i), describe(a.explicit_buckets[i]), rank_a,
                    describe(b.explicit_buckets[i]), rank_b);
    }
  }
  if (a.explicit_buckets.size() != b.explicit_buckets.size()) {
    return Differ("number of explicit buckets", absl::StrCat(a.explicit_buckets.size()), rank_a,
                  absl::StrCat(b.explicit_buckets.size()), rank_b);
  }
  if (a.bucket_cap_bytes != b.bucket_cap_bytes) {
    return Differ("bucket_cap_bytes", absl::StrCat(a.bucket_cap_bytes), rank_a,
                  absl::StrCat(b.bucket_cap_bytes), rank_b);
  }
  if (a.first_bucket_cap_bytes != b.first_bucket_cap_bytes) {
    return Differ("first_bucket_cap_bytes", absl::StrCat(a.first_bucket_cap_bytes), rank_a,
                  absl::StrCat(b.first_bucket_cap_bytes), rank_b);
  }
  if (a.last_bucket_cap_bytes != b.last_bucket_cap_bytes) {
    return Differ("last_bucket_cap_bytes", absl::StrCat(a.last_bucket_cap_bytes), rank_a,
                  absl::StrCat(b.last_bucket_cap_bytes), rank_b);
  }
  if (a.buffer_bytes != b.buffer_bytes) {
    return Differ("buffer_bytes", absl::StrCat(a.buffer_bytes), rank_a,
                  absl::StrCat(b.buffer_bytes), rank_b);
  }
  if (a.on_gpu != b.on_gpu) {
    return Differ("memory", a.on_gpu ? "on a GPU" : "on the host", rank_a,
                  b.on_gpu ? "on a GPU" : "on the host", rank_b);
  }
  if (a.op != b.op) {
    return Differ("reduce op", ReduceOpName(a.op), rank_a, ReduceOpName(b.op), rank_b);
  }
  return "";
}

}  // namespace gradsync::daemon
