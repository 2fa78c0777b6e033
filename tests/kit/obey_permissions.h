// For tests of what a user sees who may not open a file or a folder.

#ifndef TESTS_KIT_OBEY_PERMISSIONS_H_
#define TESTS_KIT_OBEY_PERMISSIONS_H_

#include <linux/capability.h>
#include <sys/syscall.h>
#include <unistd.h>

#include "gtest/gtest.h"

namespace gradsync {

// Makes the calling thread obey permissions from now on: without these capabilities even root does.
inline void ObeyPermissions() {
  __user_cap_header_struct header = {_LINUX_CAPABILITY_VERSION_3, 0};
  __user_cap_data_struct capabilities[_LINUX_CAPABILITY_U32S_3] = {};
  ASSERT_EQ(syscall(SYS_capget, &header, capabilities), 0);
  capabilities[0].effective &= ~(1u << CAP_DAC_OVERRIDE | 1u << CAP_DAC_READ_SEARCH);
  ASSERT_EQ(syscall(SYS_capset, &header, capabilities), 0);
}

}  // namespace gradsync

#endif  // TESTS_KIT_OBEY_PERMISSIONS_H_
