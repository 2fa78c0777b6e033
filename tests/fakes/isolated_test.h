// Tests that run in processes of their own. A CUDA error is sticky for its process, and a process
// is on one machine for all its life: so each test gets a new process on a new fake machine, and
// plays its other processes by roles of the same program.
//
//   ISOLATED_TEST(Suite, Name, MachineWithGpus(1)) { ... FakeMachine machine; ... }
//
//   ROLE(importer) { ... return HasFailure(); }
//   ... ChildProcess other = StartRole("importer", {socket});   // becomes its descriptor 3
//
// On a real machine (machine/real_gpus.h) a test that describes another one is skipped, and one
// that asks for what only fakes show is skipped from there on.
//
// The program's main is in isolated_test.cc.

#ifndef TESTS_FAKES_ISOLATED_TEST_H_
#define TESTS_FAKES_ISOLATED_TEST_H_

#include <gtest/gtest.h>

#include <memory>
#include <string>
#include <vector>

#include "tests/fakes/control.h"
#include "tests/fault/child_process.h"

namespace gradsync::fakes {

// Runs the test `name` of this program again, as a process on a new machine, and expects that it
// passes.
void RunIsolated(const std::string& name, const MachineDescription& machine);
bool Isolated();  // true in that process

using RoleFunction = int();
bool RegisterRole(const std::string& name, RoleFunction* role);
// A process of this program that runs a role on the same machine; its exit status is what the role
// returns. `environment` is added to this process's.
std::unique_ptr<fault::ChildProcess> StartRole(const std::string& name, std::vector<int> passed,
                                               std::vector<std::string> environment = {});
// True if it ends with status 0 in time.
bool Succeeds(fault::ChildProcess& process);

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

// For tests that race on purpose: streams are threads, so ThreadSanitizer reports it too.
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
