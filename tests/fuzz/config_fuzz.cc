// The daemon's configuration file, and the values in it.

#include <cstdint>
#include <string>

#include "daemon/config/config_file.h"
#include "daemon/config/option_value.h"
#include "tests/fuzz/check.h"

extern "C" int LLVMFuzzerTestOneInput(const std::uint8_t* data, std::size_t size) {
  const std::string text(reinterpret_cast<const char*>(data), size);
  gradsync::daemon::ParseConfig("gradsyncd.textproto", text);
  gradsync::daemon::ParseCount(text).status().IgnoreError();
  gradsync::daemon::ParseBytes(text).status().IgnoreError();
  gradsync::daemon::ParseBool(text).status().IgnoreError();
  const auto time = gradsync::daemon::ParseTime(text);
  if (time.ok()) {
    FUZZ_CHECK(*time >= absl::ZeroDuration());
    const auto again = gradsync::daemon::ParseTime(gradsync::daemon::FormatTime(*time));
    FUZZ_CHECK(again.ok() && *again == *time);
  }
  return 0;
}
