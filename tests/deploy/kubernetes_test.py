"""Checks that the Kubernetes manifests match their schemas and give the daemon what it needs."""

import os
import pathlib
import subprocess
import sys
import unittest

MANIFESTS = sorted(pathlib.Path("deploy/kubernetes").glob("*.yaml"))
CHECK_OPTIONS = "tests/deploy/check_options"
# The oldest version with native sidecars by default, and the newest that kubernetes-validate knows.
VERSIONS = ["1.29", "1.37"]
SOCKET_FOLDER = "/run/gradsync"

try:
    import yaml
except ImportError:
    sys.exit("PyYAML is missing in .venv: run tools/setup --test")


def documents(path):
    return [document for document in yaml.safe_load_all(path.read_text()) if document]


def pod_spec(document):
    spec = document["spec"]
    return spec["template"]["spec"] if "template" in spec else spec


def containers(spec):
    return spec.get("initContainers", []) + spec["containers"]


def find(items, name):
    matches = [item for item in items if item["name"] == name]
    assert len(matches) == 1, f"{name}: {matches}"
    return matches[0]


class SchemaTest(unittest.TestCase):
    def validate(self, path, version):
        return subprocess.run(
            [sys.executable, "-m", "kubernetes_validate", "--strict", "-k", version, path],
            capture_output=True,
            text=True,
            check=False,
        )

    def test_manifests_exist(self):
        self.assertEqual(
            [path.name for path in MANIFESTS],
            ["daemonset.yaml", "gpu-daemonset.yaml", "sidecar-pod.yaml"],
        )

    def test_manifests_are_valid(self):
        for path in MANIFESTS:
            for version in VERSIONS:
                with self.subTest(path=path.name, version=version):
                    result = self.validate(path, version)
                    self.assertEqual(result.returncode, 0, result.stdout + result.stderr)
                    passed = result.stdout + result.stderr
                    self.assertEqual(passed.count(" passed "), len(documents(path)), passed)

    def test_validation_finds_faults(self):
        text = MANIFESTS[0].read_text()
        broken = pathlib.Path(os.environ["TEST_TMPDIR"]) / "broken.yaml"
        for old, new in [("hostPID: true", "hostPID: maybe"), ("hostPID:", "hostPid:")]:
            self.assertIn(old, text)
            broken.write_text(text.replace(old, new))
            self.assertNotEqual(self.validate(broken, VERSIONS[-1]).returncode, 0)


class PodTest(unittest.TestCase):
    """Rules for each pod of each manifest."""

    def pods(self):
        for path in MANIFESTS:
            for document in documents(path):
                if document["kind"] == "NetworkPolicy":
                    continue
                with self.subTest(path=path.name, kind=document["kind"]):
                    yield pod_spec(document)

    def daemons(self):
        found = 0
        for spec in self.pods():
            for container in containers(spec):
                if container["name"] == "gradsyncd":
                    found += 1
                    yield spec, container
        self.assertEqual(found, 3)

    def test_the_daemon_accepts_its_arguments(self):
        for _, daemon in self.daemons():
            # Kubernetes puts the pod's address there.
            arguments = [argument.replace("$(POD_IP)", "10.0.0.7") for argument in daemon["args"]]
            result = subprocess.run(
                [CHECK_OPTIONS, *arguments], capture_output=True, text=True, check=False
            )
            self.assertEqual(result.returncode, 0, result.stderr)
            self.assertIn(f"--socket={SOCKET_FOLDER}/gradsyncd.sock", daemon["args"])

    def test_kubernetes_waits_for_the_drain(self):
        for spec, _ in self.daemons():
            self.assertGreaterEqual(spec["terminationGracePeriodSeconds"], 25 + 5)

    def test_the_daemon_is_probed_over_its_socket(self):
        for _, daemon in self.daemons():
            for probe in ["startupProbe", "livenessProbe"]:
                command = daemon[probe]["exec"]["command"]
                self.assertIn("gradsyncctl health", " ".join(command))

    def test_a_warning_does_not_restart_the_daemon(self):
        for _, daemon in self.daemons():
            command = daemon["livenessProbe"]["exec"]["command"]
            for status, alive in [(0, True), (1, True), (2, False)]:
                script = command[-1].replace("gradsyncctl health", f"(exit {status})")
                result = subprocess.run([*command[:-1], script], check=False)
                self.assertEqual(result.returncode == 0, alive, status)

    def test_cpu_is_not_limited(self):
        for spec in self.pods():
            for container in containers(spec):
                limits = container.get("resources", {}).get("limits", {})
                self.assertNotIn("cpu", limits, container["name"])

    def test_memory_is_limited(self):
        for spec in self.pods():
            for container in spec["containers"]:
                self.assertIn("memory", container["resources"]["limits"])

    def test_the_daemon_has_no_privileges(self):
        for spec, daemon in self.daemons():
            security = {**spec["securityContext"], **daemon["securityContext"]}
            self.assertTrue(security["runAsNonRoot"])
            self.assertNotEqual(security["runAsUser"], 0)
            self.assertFalse(security["allowPrivilegeEscalation"])
            self.assertEqual(security["capabilities"], {"drop": ["ALL"]})

    def test_the_sockets_are_shared_as_a_folder(self):
        for spec in self.pods():
            for container in containers(spec):
                mount = find(container["volumeMounts"], "gradsync")
                self.assertEqual(mount["mountPath"], SOCKET_FOLDER)
                self.assertNotIn("subPath", mount)
            find(spec["volumes"], "gradsync")


class SidecarTest(unittest.TestCase):
    def setUp(self):
        self.spec = documents(pathlib.Path("deploy/kubernetes/sidecar-pod.yaml"))[0]["spec"]
        self.daemon = find(self.spec["initContainers"], "gradsyncd")

    def test_it_is_a_native_sidecar(self):
        self.assertEqual(self.daemon["restartPolicy"], "Always")

    def test_it_sees_the_trainers_processes(self):
        self.assertTrue(self.spec["shareProcessNamespace"])

    def test_both_users_reach_the_socket(self):
        self.assertIn("emptyDir", find(self.spec["volumes"], "gradsync"))
        self.assertEqual(
            self.spec["securityContext"]["fsGroup"], self.daemon["securityContext"]["runAsGroup"]
        )


class DaemonSetTest(unittest.TestCase):
    def setUp(self):
        daemonset, self.policy, trainer = documents(
            pathlib.Path("deploy/kubernetes/daemonset.yaml")
        )
        self.labels = daemonset["spec"]["template"]["metadata"]["labels"]
        self.spec = pod_spec(daemonset)
        self.daemon = find(self.spec["containers"], "gradsyncd")
        self.trainer = trainer["spec"]

    def test_it_sees_the_trainers_processes(self):
        self.assertTrue(self.spec["hostPID"])

    def test_jobs_need_a_token_and_the_example_has_one(self):
        self.assertIn("--require_token=true", self.daemon["args"])
        token = find(self.trainer["containers"][0]["env"], "GRADSYNC_JOB_TOKEN")
        self.assertIn("secretKeyRef", token["valueFrom"])

    def test_the_socket_folder_is_on_the_host(self):
        for spec in [self.spec, self.trainer]:
            folder = find(spec["volumes"], "gradsync")["hostPath"]
            self.assertEqual(folder["path"], SOCKET_FOLDER)
            self.assertIn(folder["type"], ["Directory", "DirectoryOrCreate"])

    def test_the_peer_port_is_on_the_address_of_the_pod(self):
        listen = self.option("peer_listen")
        self.assertEqual(listen, "$(POD_IP):7417")
        address = find(self.daemon["env"], "POD_IP")["valueFrom"]["fieldRef"]["fieldPath"]
        self.assertEqual(address, "status.podIP")
        self.assertEqual(self.daemon["ports"], [{"name": "peer", "containerPort": 7417}])
        self.assertNotIn("hostNetwork", self.spec)

    def test_the_daemon_can_read_the_secret_with_the_certificate(self):
        mount = find(self.daemon["volumeMounts"], "peer-tls")
        for name in ["peer_tls_certificate", "peer_tls_key", "peer_tls_ca"]:
            self.assertEqual(os.path.dirname(self.option(name)), mount["mountPath"])
        # All nodes share the certificate, so it contains no address.
        self.assertTrue(self.option("peer_tls_name"))
        secret = find(self.spec["volumes"], "peer-tls")["secret"]
        self.assertEqual(secret["defaultMode"], 0o440)
        group = self.daemon["securityContext"]["runAsGroup"]
        self.assertEqual(self.spec["securityContext"]["fsGroup"], group)

    def test_only_daemons_reach_the_ports_of_daemons(self):
        policy = self.policy["spec"]
        self.assertEqual(policy["policyTypes"], ["Ingress"])
        daemons = {"matchLabels": self.labels}
        self.assertEqual(policy["podSelector"], daemons)
        (rule,) = policy["ingress"]
        self.assertEqual(rule["from"], [{"podSelector": daemons}])
        sysctls = self.spec["securityContext"]["sysctls"]
        low, high = find(sysctls, "net.ipv4.ip_local_port_range")["value"].split()
        self.assertEqual(
            rule["ports"],
            [
                {"protocol": "TCP", "port": 7417},
                {"protocol": "TCP", "port": int(low), "endPort": int(high)},
            ],
        )

    def option(self, name):
        prefix = f"--{name}="
        (value,) = [a[len(prefix) :] for a in self.daemon["args"] if a.startswith(prefix)]
        return value

    def test_the_trainer_may_enter_the_folder(self):
        group = self.daemon["securityContext"]["runAsGroup"]
        self.assertIn(group, self.trainer["securityContext"]["supplementalGroups"])


class GpuDaemonSetTest(unittest.TestCase):
    def setUp(self):
        daemonset, trainer = documents(pathlib.Path("deploy/kubernetes/gpu-daemonset.yaml"))
        self.spec = pod_spec(daemonset)
        self.daemon = find(self.spec["containers"], "gradsyncd")
        self.trainer = trainer["spec"]

    def test_it_sees_the_trainers_processes(self):
        self.assertTrue(self.spec["hostPID"])

    def test_the_daemon_sees_every_gpu_and_takes_none(self):
        self.assertEqual(find(self.daemon["env"], "NVIDIA_VISIBLE_DEVICES")["value"], "all")
        self.assertNotIn("nvidia.com/gpu", self.daemon["resources"]["limits"])
        self.assertIn("nvidia.com/gpu", self.trainer["containers"][0]["resources"]["limits"])
        for spec in [self.spec, self.trainer]:
            self.assertEqual(spec["runtimeClassName"], "nvidia")

    def test_jobs_need_a_token_and_the_example_has_one(self):
        self.assertIn("--require_token=true", self.daemon["args"])
        token = find(self.trainer["containers"][0]["env"], "GRADSYNC_JOB_TOKEN")
        self.assertIn("secretKeyRef", token["valueFrom"])

    def test_the_trainer_may_enter_the_folder(self):
        group = self.daemon["securityContext"]["runAsGroup"]
        self.assertIn(group, self.trainer["securityContext"]["supplementalGroups"])


if __name__ == "__main__":
    unittest.main()
