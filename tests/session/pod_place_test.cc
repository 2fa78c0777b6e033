#include "daemon/session/pod_place.h"

#include <gtest/gtest.h>
#include <unistd.h>

#include <string>
#include <vector>

#include "absl/status/status.h"
#include "absl/strings/str_cat.h"
#include "absl/strings/str_replace.h"
#include "tests/kit/forked_child.h"

namespace gradsync::daemon {
namespace {

constexpr char kA[] = "6f1e0c4a-93d2-4a57-8f0e-1b2c3d4e5f60";
constexpr char kB[] = "0a4d5e7c-1111-4222-9333-abcdefabcdef";
constexpr char kStatic[] = "6f1e0c4a93d24a578f0e1b2c3d4e5f60";

std::string Underscored(const std::string& id) { return absl::StrReplaceAll(id, {{"-", "_"}}); }

std::string SystemdPod(const std::string& id) {
  return absl::StrCat("kubepods-burstable-pod", Underscored(id), ".slice");
}

struct Case {
  const char* name;
  std::string text;
};

PodPlace InPod(const char* id) { return {PodPlace::Kind::kPod, *PodId::Parse(id)}; }
const PodPlace kNode{PodPlace::Kind::kNode, {}};
const PodPlace kUnknown{};

void Expect(const PodPlace& place, const std::vector<Case>& cases) {
  for (const Case& one : cases) {
    const PodPlace found = PodPlaceIn(one.text);
    EXPECT_TRUE(found == place) << one.name << ": kind " << static_cast<int>(found.kind) << ", pod "
                                << found.pod.Text() << ", of " << one.text;
  }
}

TEST(PodPlaceTest, FindsThePodOfEveryDriverAndVersion) {
  const std::string a = kA;
  const std::string a_ = Underscored(a);
  Expect(
      InPod(kA),
      {
          {"v2, systemd, containerd", "0::/kubepods.slice/kubepods-burstable.slice/" +
                                          SystemdPod(a) + "/cri-containerd-0123abcd.scope\n"},
          {"v2, systemd, best effort",
           "0::/kubepods.slice/kubepods-besteffort.slice/kubepods-besteffort-pod" + a_ +
               ".slice/crio-0123abcd.scope\n"},
          {"v2, systemd, guaranteed",
           "0::/kubepods.slice/kubepods-pod" + a_ + ".slice/cri-containerd-0123abcd.scope\n"},
          {"v2, systemd, crun's cgroup in the scope",
           "0::/kubepods.slice/kubepods-pod" + a_ + ".slice/crio-0123abcd.scope/container\n"},
          {"v2, systemd, conmon",
           "0::/kubepods.slice/kubepods-pod" + a_ + ".slice/crio-conmon-0123abcd.scope\n"},
          {"v2, cgroupfs", "0::/kubepods/burstable/pod" + a + "/0123abcd\n"},
          {"v2, cgroupfs, guaranteed", "0::/kubepods/pod" + a + "/0123abcd\n"},
          {"v2, the pod itself", "0::/kubepods/besteffort/pod" + a},
          {"v2, a pod of the kubelet", absl::StrCat("0::/kubepods/pod", kStatic, "/0123abcd\n")},
          {"v1, cgroupfs", "12:pids:/kubepods/burstable/pod" + a +
                               "/0123\n11:memory:/kubepods/burstable/pod" + a +
                               "/0123\n1:name=systemd:/kubepods/burstable/pod" + a + "/0123\n"},
          {"v1, systemd", "9:cpu,cpuacct:/kubepods.slice/kubepods-burstable.slice/" +
                              SystemdPod(a) + "/docker-0123.scope\n"},
          {"v1, a hierarchy that the runtime does not use",
           "13:rdma:/\n12:misc:/\n11:memory:/kubepods/pod" + a + "/0123\n"},
          {"hybrid", "11:memory:/kubepods/pod" + a + "/0123\n1:name=systemd:/kubepods/pod" + a +
                         "/0123\n0::/system.slice/containerd.service\n"},
          {"two drivers at once",
           "0::/system.slice/containerd.service/" + SystemdPod(a) + ":cri-containerd:0123abcd\n"},
          {"two drivers at once, no unit", "0::/" + SystemdPod(a) + ":cri-containerd:0123abcd\n"},
          {"beside the daemon's pod", "0::/../../" + SystemdPod(a) + "/cri-containerd-01.scope\n"},
          {"in another class than the daemon's pod",
           "0::/../../../kubepods-burstable.slice/" + SystemdPod(a) + "/cri-containerd-01.scope\n"},
          {"beside the daemon's pod, cgroupfs", "0::/../../pod" + a + "/0123\n"},
          {"another class, cgroupfs", "0::/../../../besteffort/pod" + a + "/0123\n"},
          {"from a daemon outside of kubepods", "0::/../../kubepods/burstable/pod" + a + "/01\n"},
      });
}

// A container's processes may make cgroups below their own, with any names.
TEST(PodPlaceTest, OnlyTheOutermostPodCounts) {
  const std::string a = kA;
  const std::string b = kB;
  Expect(
      InPod(kA),
      {
          {"v2", "0::/kubepods/pod" + a + "/0123/kubepods/pod" + b + "/4567\n"},
          {"systemd in the pod", "0::/kubepods.slice/kubepods-pod" + Underscored(a) +
                                     ".slice/cri-containerd-01.scope/kubepods.slice/kubepods-pod" +
                                     Underscored(b) + ".slice/cri-containerd-02.scope\n"},
          {"Docker in the pod", "0::/kubepods/pod" + a + "/0123/docker/4567\n"},
          {"beside the daemon's", "0::/../../pod" + a + "/0123/pod" + b + "\n"},
          {"a name with a colon", "0::/kubepods/pod" + a + "/1:x:/kubepods/pod" + b + "\n"},
      });
}

// An ordinary user makes cgroups with these names, to get quotas without end.
TEST(PodPlaceTest, PathsThatUsersCanMakeAreNoPods) {
  const std::string a = kA;
  const std::string user = "/user.slice/user-1000.slice/user@1000.service/";
  Expect(kNode,
         {
             {"a plain user", "0::" + user + "app.slice/run-u1.scope\n"},
             {"a service", "0::/system.slice/cron.service\n"},
             {"the root", "0::/\n"},
             {"the root, v1", "11:memory:/\n1:name=systemd:/\n0::/\n"},
             {"the daemon's own container", "0::/init\n"},
             {"kubepods in a user's part", "0::" + user + "kubepods/burstable/pod" + a + "/01\n"},
             {"kubepods.slice there", "0::" + user + "kubepods.slice/kubepods-pod" +
                                          Underscored(a) + ".slice/cri-containerd-01.scope\n"},
             {"a pod's slice there", "0::" + user + SystemdPod(a) + "/x.scope\n"},
             {"a user's scope", "0::" + user + "kubepods-pod" + Underscored(a) + ".scope\n"},
             {"containerd.service of a user",
              "0::" + user + "containerd.service/" + SystemdPod(a) + ":cri-containerd:01\n"},
             {"another service with the name",
              "0::/system.slice/evil.service/" + SystemdPod(a) + ":cri-containerd:01\n"},
             {"kubepods in a container", "0::/docker/0123/kubepods/burstable/pod" + a + "/01\n"},
             {"in a machine", "0::/machine.slice/x.scope/kubepods/pod" + a + "\n"},
             {"in the daemon's own cgroup", "0::/pod" + a + "/0123\n"},
             {"a class in the daemon's own cgroup", "0::/burstable/pod" + a + "/0123\n"},
             {"a user's part, from a namespace", "0::/../.." + user + "kubepods/pod" + a + "\n"},
             {"a longer name", "0::/kubepods2/pod" + a + "/01\n"},
             {"a longer slice", "0::/kubepods-evil.slice/kubepods-pod" + a + "\n"},
             {"a user's hierarchy, v1", "1:name=systemd:" + user + "kubepods/pod" + a +
                                            "\n11:memory:" + user + "kubepods/pod" + a + "\n"},
         });
}

TEST(PodPlaceTest, UnreadableCgroupsAreUnknown) {
  const std::string a = kA;
  Expect(
      kUnknown,
      {
          {"nothing", ""},
          {"no path", "0:\n"},
          {"no controller", "0:/kubepods/pod" + a + "\n"},
          {"a relative path", "0::kubepods/pod" + a + "\n"},
          {"two pods", "11:memory:/kubepods/pod" + a + "/01\n10:cpu:/kubepods/pod" + kB + "/01\n"},
          {"kubepods without a pod", "0::/kubepods/burstable\n"},
          {"kubepods with a strange pod", "0::/kubepods/burstable/pod42/01\n"},
          {"an id of another length", "0::/kubepods/pod" + a + "0/01\n"},
          {"an id in upper case", "0::/kubepods/pod6F1E0C4A-93D2-4A57-8F0E-1B2C3D4E5F60/01\n"},
          {"an id of zeros", "0::/kubepods/pod00000000-0000-0000-0000-000000000000/01\n"},
          {"a scope instead of a slice",
           "0::/kubepods.slice/kubepods-pod" + Underscored(a) + ".scope\n"},
          {"a class that does not exist", "0::/kubepods/guaranteed/pod" + a + "/01\n"},
          {"no pod beside an unknown one", "11:memory:/\n10:cpu:/kubepods/burstable\n"},
      });
}

TEST(PodPlaceTest, ReadsTheCgroupOfALivingProcess) {
  ForkedChild child;
  const auto text = ReadCgroups(child.pid());
  ASSERT_TRUE(text.ok()) << text.status();
  EXPECT_TRUE(PodPlaceOf(child.pid(), child.pidfd()) == PodPlaceIn(*text));
  const auto in_pod = [](pid_t) { return absl::StrCat("0::/kubepods/pod", kA, "/01\n"); };
  EXPECT_TRUE(PodPlaceOf(child.pid(), child.pidfd(), in_pod) == InPod(kA));
  EXPECT_TRUE(PodPlaceOf(0, child.pidfd(), in_pod) == kUnknown) << "of another PID namespace";
  EXPECT_TRUE(PodPlaceOf(child.pid(), -1, in_pod) == kUnknown) << "nothing holds the number";
}

// The process of a pod hands its connection on and ends, and its number is used again.
TEST(PodPlaceTest, ProcessThatEndsWhileItIsReadIsUnknown) {
  ForkedChild child;
  const auto reused = [&child](pid_t) {
    child.Kill();
    return std::string("0::/\n");
  };
  EXPECT_TRUE(PodPlaceOf(child.pid(), child.pidfd(), reused) == kUnknown);
  ForkedChild other;
  const auto gone = [&other](pid_t) -> absl::StatusOr<std::string> {
    other.Kill();
    return absl::NotFoundError("no such process");
  };
  EXPECT_TRUE(PodPlaceOf(other.pid(), other.pidfd(), gone) == kUnknown);
}

TEST(PodPlaceTest, WhereProcHidesProcessesThereAreNoPods) {
  ForkedChild child;
  const auto failing = [](absl::StatusCode code) {
    return [code](pid_t) -> absl::StatusOr<std::string> { return absl::Status(code, "no"); };
  };
  for (const auto code : {absl::StatusCode::kNotFound, absl::StatusCode::kPermissionDenied}) {
    EXPECT_TRUE(PodPlaceOf(child.pid(), child.pidfd(), failing(code)) == kNode);
  }
  // The daemon is out of descriptors or memory: a client can cause that.
  for (const auto code : {absl::StatusCode::kResourceExhausted, absl::StatusCode::kOutOfRange}) {
    EXPECT_TRUE(PodPlaceOf(child.pid(), child.pidfd(), failing(code)) == kUnknown);
  }
}

}  // namespace
}  // namespace gradsync::daemon
