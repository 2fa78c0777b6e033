// Tests that run in processes of their own. A CUDA error lasts until its process ends, and a
// process cannot change its machine. So each test runs in a new process on a new fake machine.
// Other processes of a test run a role of the same program.
//
//   ISOLATED_TEST(Suite, Name, MachineWithGpus(1)) { ... FakeMachine machine; ... }
//
//   ROLE(importer) { ... return HasFailure(); }
//   ... ChildProcess other = StartRole("importer", {socket});   // becomes its descriptor 3
//
// On a real machine (machine/real_gpus.h), a test that describes another machine is skipped, and a
// test that needs the fakes is skipped from that point on.
//
// The program's main is in isolated_test.cc.

#ifndef TESTS_FAKES_ISOLATED_TEST_H_
#define TESTS_FAKES_ISOLATED_TEST_H_

#include <gtest/gtest.h>

#include <memory>
#include <string>
#include <vector>

#include "tests/fakes/control.h"
#include "tests/kit/child_process.h"

namespace gradsync::fakes {

// Runs the test `name` of this program in a new process on a new machine, and expects it to pass.
void RunIsolated(const std::string& name, const MachineDescription& machine);
bool Isolated();  // true in a process that RunIsolated started

using RoleFunction = int();
bool RegisterRole(const std::string& name, RoleFunction* role);
// Starts a process of this program that runs a role on the same machine. Its exit status is the
// role's result. Its environment is this process's and `environment`.
std::unique_ptr<ChildProcess> StartRole(const std::string& name, std::vector<int> passed,
                                        std::vector<std::string> environment = {});
// True if the process ends with status 0 in time.
bool Succeeds(ChildProcess& process);

#define ISOLATED_TEST(suite, name, machine)   \
  static void suite##name##Body();            \
  TEST(suite, name) {                         \
    using gradsync::fakes::RunIsolated;       \
    if (gradsync::fakes::Isolated()) {        \
      suite##name##Body();                    \
    } else {                                  \
      RunIsolated(#suite "." #name, machine); \
    }                                         \
  }                                           \
  static void suite##name##Body()

// Skips a test of an intended race. The fakes' streams are threads, so ThreadSanitizer would report
// the race.
#if defined(__SANITIZE_THREAD__)
#define SKIP_UNDER_TSAN() GTEST_SKIP() << "a race on purpose"
#else
#define SKIP_UNDER_TSAN() static_assert(true)
#endif

#define ROLE(name)                                                                        \
  static int name##Role();                                                                \
  static const bool name##_registered = gradsync::fakes::RegisterRole(#name, name##Role); \
  static int name##Role()

}  // namespace gradsync::fakes

#endif  // TESTS_FAKES_ISOLATED_TEST_H_
