// A store for engines in several processes of one machine: one file per key.

#ifndef TESTS_ENGINE_DIRECTORY_STORE_H_
#define TESTS_ENGINE_DIRECTORY_STORE_H_

#include <string>

#include "daemon/engine/rendezvous_store.h"

namespace gradsync::daemon {

class DirectoryStore final : public RendezvousStore {
 public:
  // `directory` must exist, and be empty when the first node connects.
  explicit DirectoryStore(std::string directory);

  absl::Status Set(const std::string& key, const std::string& value) override;
  absl::StatusOr<std::string> Get(const std::string& key, absl::Duration timeout) override;

 private:
  std::string Path(const std::string& key) const;

  const std::string directory_;
};

}  // namespace gradsync::daemon

#endif  // TESTS_ENGINE_DIRECTORY_STORE_H_
