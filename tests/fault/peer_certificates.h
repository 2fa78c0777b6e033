// A certificate authority, and a certificate that all nodes of a test share.

#ifndef TESTS_FAULT_PEER_CERTIFICATES_H_
#define TESTS_FAULT_PEER_CERTIFICATES_H_

#include <string>
#include <vector>

#include "tests/kit/temporary_directory.h"

namespace gradsync::fault {

// Made by deploy/peer-keys, with the name "gradsyncd". The files live as long as this.
class PeerCertificates {
 public:
  PeerCertificates();
  // The flags with which a daemon uses them.
  std::vector<std::string> Flags() const;

 private:
  const TemporaryDirectory folder_;
};

}  // namespace gradsync::fault

#endif  // TESTS_FAULT_PEER_CERTIFICATES_H_
