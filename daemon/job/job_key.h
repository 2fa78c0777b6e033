// Names a job through all of its generations: its user, its id and its token.

#ifndef DAEMON_JOB_JOB_KEY_H_
#define DAEMON_JOB_JOB_KEY_H_

#include <sys/types.h>

#include <string>
#include <tuple>

namespace gradsync::daemon {

struct JobKey {
  uid_t uid = 0;
  std::string job_id;
  std::string token_hash;  // SHA-256, empty without a token

  bool operator<(const JobKey& other) const {
    return std::tie(uid, job_id, token_hash) < std::tie(other.uid, other.job_id, other.token_hash);
  }

  // Different for every key. Without a token: "1000/run". With a token it has the token's whole
  // hash, because somebody can choose two tokens whose hashes begin alike.
  std::string Text() const;
};

}  // namespace gradsync::daemon

#endif  // DAEMON_JOB_JOB_KEY_H_
