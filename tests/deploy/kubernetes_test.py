"""Checks that the Kubernetes manifests match their schemas, give the daemon what it needs, and keep
tenants out of the rest."""

import copy
import os
import pathlib
import re
import subprocess
import sys
import unittest

MANIFESTS = sorted(pathlib.Path("deploy/kubernetes").glob("*.yaml"))
CHECK_OPTIONS = "tests/deploy/check_options"
# Every option with its default.
CONFIG = pathlib.Path("deploy/gradsyncd.textproto")
# The oldest version with native sidecars by default, the oldest with admission policies by default,
# and the newest that kubernetes-validate knows.
VERSIONS = ["1.29", "1.30", "1.37"]
# These kinds do not belong to a namespace.
CLUSTER_KINDS = ["Namespace", "ValidatingAdmissionPolicy", "ValidatingAdmissionPolicyBinding"]
POD_KINDS = ["DaemonSet", "Pod"]
SYSTEM_NAMESPACE = "gradsync-system"
SOCKET_FOLDER = "/run/gradsync"

try:
    import yaml
    from cel_expr_python import cel
    from cel_expr_python.ext import ext_optional
except ImportError as error:
    sys.exit(f"{error.name} is missing in .venv: run tools/setup --test")


def documents(path):
    return [document for document in yaml.safe_load_all(path.read_text()) if document]


def documents_of(kind):
    """All manifests' documents of one kind."""
    return [d for path in MANIFESTS for d in documents(path) if d["kind"] == kind]


def pod_spec(document):
    spec = document["spec"]
    return spec["template"]["spec"] if "template" in spec else spec


def containers(spec):
    return spec.get("initContainers", []) + spec["containers"]


def find(items, name):
    matches = [item for item in items if item["name"] == name]
    assert len(matches) == 1, f"{name}: {matches}"
    return matches[0]


def bytes_of(text):
    """The bytes of "4GiB", as options have it, or "6Gi", as Kubernetes has it."""
    number, unit = re.fullmatch(r"(\d+)([KMG])iB?", text).groups()
    return int(number) << {"K": 10, "M": 20, "G": 30}[unit]


class SchemaTest(unittest.TestCase):
    def validate(self, version, *paths):
        return subprocess.run(
            [sys.executable, "-m", "kubernetes_validate", "--strict", "-k", version, *paths],
            capture_output=True,
            text=True,
            check=False,
        )

    def test_manifests_exist(self):
        self.assertEqual(
            [path.name for path in MANIFESTS],
            ["daemonset.yaml", "gpu-daemonset.yaml", "namespaces.yaml", "sidecar-pod.yaml"],
        )

    def test_manifests_are_valid(self):
        for version in VERSIONS:
            # The first version has no admission policies yet.
            paths = [p for p in MANIFESTS if version != VERSIONS[0] or p.name != "namespaces.yaml"]
            with self.subTest(version=version):
                result = self.validate(version, *paths)
                passed = result.stdout + result.stderr
                self.assertEqual(result.returncode, 0, passed)
                for path in paths:
                    found = passed.count(f"{path} passed ")
                    self.assertEqual(found, len(documents(path)), passed)

    def test_validation_finds_faults(self):
        text = MANIFESTS[0].read_text()
        broken = pathlib.Path(os.environ["TEST_TMPDIR"]) / "broken.yaml"
        for old, new in [("hostPID: true", "hostPID: maybe"), ("hostPID:", "hostPid:")]:
            self.assertIn(old, text)
            broken.write_text(text.replace(old, new))
            self.assertNotEqual(self.validate(VERSIONS[-1], broken).returncode, 0)


class PodTest(unittest.TestCase):
    """Rules for each pod of each manifest."""

    def pods(self):
        for path in MANIFESTS:
            for document in documents(path):
                if document["kind"] in POD_KINDS:
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
        # drain_timeout, kStopLimit of daemon/app/stop_guard.h, and 5 s to spare.
        for spec, _ in self.daemons():
            self.assertGreaterEqual(spec["terminationGracePeriodSeconds"], 25 + 15 + 5)

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

    def test_images_have_a_digest(self):
        # A tag can name another image tomorrow. A digest of zeros names none, so nobody forgets to
        # replace it.
        for spec in self.pods():
            for container in containers(spec):
                self.assertRegex(
                    container["image"],
                    r"^registry\.example\.com/(gradsync|trainer)@sha256:0{64}$",
                )

    def test_cpu_is_not_limited(self):
        for spec in self.pods():
            for container in containers(spec):
                limits = container.get("resources", {}).get("limits", {})
                self.assertNotIn("cpu", limits, container["name"])

    def test_memory_is_limited(self):
        for spec in self.pods():
            for container in spec["containers"]:
                self.assertIn("memory", container["resources"]["limits"])

    def test_memory_is_enough_for_a_user_with_all_quotas(self):
        # As "Sizing" in deploy/README.md says.
        for _, daemon in self.daemons():
            quotas = dict(re.findall(r'^(quota_\w+): "?(\w+)"?$', CONFIG.read_text(), re.MULTILINE))
            quotas.update(re.findall(r"--(quota_\w+)=(\w+)", " ".join(daemon["args"])))
            grpc = bytes_of("64MiB") + bytes_of("128KiB") * int(quotas["quota_sessions_per_user"])
            peers = "--peer_listen=" in " ".join(daemon["args"])
            least = bytes_of("512MiB" if peers else "320MiB")
            least += grpc + bytes_of(quotas["quota_control_bytes_per_user"])
            if peers:
                least += bytes_of(quotas["quota_engine_bytes_per_user"])
                least += bytes_of("64MiB") + bytes_of("128KiB") * int(quotas["quota_jobs_per_user"])
            self.assertGreaterEqual(bytes_of(daemon["resources"]["limits"]["memory"]), least)

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
        _, pod = documents(pathlib.Path("deploy/kubernetes/sidecar-pod.yaml"))
        self.spec = pod["spec"]
        self.daemon = find(self.spec["initContainers"], "gradsyncd")

    def test_it_is_a_native_sidecar(self):
        self.assertEqual(self.daemon["restartPolicy"], "Always")

    def test_it_sees_the_trainers_processes(self):
        self.assertTrue(self.spec["shareProcessNamespace"])

    def test_level_restricted_allows_it(self):
        self.assertTrue(self.spec["securityContext"]["runAsNonRoot"])
        self.assertEqual(self.spec["securityContext"]["seccompProfile"]["type"], "RuntimeDefault")
        for container in containers(self.spec):
            security = container["securityContext"]
            self.assertFalse(security["allowPrivilegeEscalation"])
            self.assertEqual(security["capabilities"], {"drop": ["ALL"]})
        for volume in self.spec["volumes"]:
            self.assertIn("emptyDir", volume)

    def test_both_users_reach_the_socket(self):
        self.assertIn("emptyDir", find(self.spec["volumes"], "gradsync"))
        self.assertEqual(
            self.spec["securityContext"]["fsGroup"], self.daemon["securityContext"]["runAsGroup"]
        )


class DaemonSetTest(unittest.TestCase):
    def setUp(self):
        daemonset, trainer = documents(pathlib.Path("deploy/kubernetes/daemonset.yaml"))
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

    def test_only_daemons_reach_the_ports_of_daemons_and_they_reach_nothing_else(self):
        (policy,) = documents_of("NetworkPolicy")
        self.assertEqual(policy["metadata"]["namespace"], SYSTEM_NAMESPACE)
        sysctls = self.spec["securityContext"]["sysctls"]
        low, high = find(sysctls, "net.ipv4.ip_local_port_range")["value"].split()
        ports = [
            {"protocol": "TCP", "port": 7417},
            {"protocol": "TCP", "port": int(low), "endPort": int(high)},
        ]
        every_pod_of_its_namespace = {"podSelector": {}}
        self.assertEqual(
            policy["spec"],
            {
                **every_pod_of_its_namespace,
                "policyTypes": ["Ingress", "Egress"],
                "ingress": [{"from": [every_pod_of_its_namespace], "ports": ports}],
                "egress": [{"to": [every_pod_of_its_namespace], "ports": ports}],
            },
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


class NamespaceTest(unittest.TestCase):
    def setUp(self):
        self.labels = {
            namespace["metadata"]["name"]: namespace["metadata"]["labels"]
            for namespace in documents_of("Namespace")
        }

    def test_every_object_names_a_namespace_of_the_manifests(self):
        for path in MANIFESTS:
            for document in documents(path):
                with self.subTest(path=path.name, kind=document["kind"]):
                    if document["kind"] in CLUSTER_KINDS:
                        self.assertNotIn("namespace", document["metadata"])
                    else:
                        self.assertIn(document["metadata"]["namespace"], self.labels)

    def test_the_node_daemons_have_their_namespace_alone(self):
        for document in documents_of("DaemonSet"):
            self.assertEqual(document["metadata"]["namespace"], SYSTEM_NAMESPACE)
        for document in documents_of("Pod"):
            self.assertNotEqual(document["metadata"]["namespace"], SYSTEM_NAMESPACE)

    def test_a_namespace_that_needs_nothing_of_the_nodes_is_restricted(self):
        for name, labels in self.labels.items():
            level = labels["pod-security.kubernetes.io/enforce"]
            needs_nodes = name == SYSTEM_NAMESPACE or "gradsync/user" in labels
            self.assertEqual(level, "privileged" if needs_nodes else "restricted", name)


def change(pod, path, value):
    """Returns a copy of the pod in which the field at the path, such as spec/volumes/0, is set.

    Missing objects on the way are made. An index at the end of a list adds to it.
    """
    pod = copy.deepcopy(pod)
    *way, last = [int(key) if key.isdigit() else key for key in path.split("/")]
    place = pod
    for key in way:
        place = place[key] if isinstance(key, int) else place.setdefault(key, {})
    if isinstance(place, list) and last == len(place):
        place.append(value)
    else:
        place[last] = value
    return pod


class AdmissionTest(unittest.TestCase):
    """Evaluates the admission policy's expressions with the library of CEL's own project.

    The API server uses the same project's library for Go. Except for optional values, its additions
    to the language do not compile here.
    """

    def setUp(self):
        (policy,) = documents_of("ValidatingAdmissionPolicy")
        (self.binding,) = documents_of("ValidatingAdmissionPolicyBinding")
        self.name = policy["metadata"]["name"]
        self.policy = policy["spec"]
        self.cel = cel.NewEnv(
            variables={name: cel.Type.DYN for name in ["object", "namespaceObject", "variables"]},
            extensions=[ext_optional.ExtOptional()],
        )
        namespaces = documents_of("Namespace")
        self.namespaces = {n["metadata"]["name"]: n for n in namespaces}
        self.trainers = [
            pod for pod in documents_of("Pod") if pod["metadata"]["namespace"] == "team-a"
        ]

    def evaluate(self, expression, values):
        value = self.cel.compile(expression).eval(data=values)
        if value.type() == cel.Type.ERROR:
            raise ValueError(f"{expression}: {value.value()}")
        return value.plain_value()

    def refusals(self, pod, namespace=None):
        """The messages with which the policy refuses the pod."""
        namespace = namespace or self.namespaces["team-a"]
        values = {"object": pod, "namespaceObject": namespace, "variables": {}}
        for variable in self.policy["variables"]:
            values["variables"][variable["name"]] = self.evaluate(variable["expression"], values)
        results = [(self.evaluate(v["expression"], values), v) for v in self.policy["validations"]]
        self.assertLessEqual({result for result, _ in results}, {True, False})
        return [validation["message"] for result, validation in results if not result]

    def test_it_refuses_pods_and_containers_added_to_pods(self):
        self.assertEqual(self.policy["failurePolicy"], "Fail")
        self.assertEqual(
            [
                (rule["operations"], rule["resources"])
                for rule in self.policy["matchConstraints"]["resourceRules"]
            ],
            [(["CREATE"], ["pods"]), (["UPDATE"], ["pods/ephemeralcontainers"])],
        )
        self.assertEqual(self.binding["spec"]["policyName"], self.name)
        self.assertEqual(self.binding["spec"]["validationActions"], ["Deny"])

    def test_it_holds_in_the_namespaces_of_tenants(self):
        selector = self.binding["spec"]["matchResources"]["namespaceSelector"]
        self.assertEqual(
            selector, {"matchExpressions": [{"key": "gradsync/user", "operator": "Exists"}]}
        )
        self.assertIn("gradsync/user", self.namespaces["team-a"]["metadata"]["labels"])
        self.assertNotIn("gradsync/user", self.namespaces[SYSTEM_NAMESPACE]["metadata"]["labels"])

    def test_the_examples_may_train(self):
        self.assertEqual(len(self.trainers), 2)
        for trainer in self.trainers:
            self.assertEqual(self.refusals(trainer), [])

    def test_a_pod_without_the_folder_may_run(self):
        pod = change(self.trainers[0], "spec/volumes", [{"name": "gradsync", "emptyDir": {}}])
        pod = change(pod, "spec/containers/0/volumeMounts/0/readOnly", False)
        self.assertEqual(self.refusals(pod), [])
        del pod["spec"]["volumes"], pod["spec"]["containers"][0]["volumeMounts"]
        self.assertEqual(self.refusals(pod), [])

    def test_debugging_is_possible_with_the_rights_of_a_trainer(self):
        pod = change(self.trainers[0], "spec/ephemeralContainers", [{"name": "debugger"}])
        self.assertEqual(len(self.refusals(pod)), 1)
        rights = {"allowPrivilegeEscalation": False}
        pod = change(pod, "spec/ephemeralContainers/0/securityContext", rights)
        self.assertEqual(self.refusals(pod), [])

    def test_daemons_of_the_nodes_are_no_tenants(self):
        for daemonset in documents_of("DaemonSet"):
            self.assertGreater(len(self.refusals(daemonset["spec"]["template"])), 1)

    def test_a_namespace_with_a_wrong_user_runs_no_pods(self):
        for user in ["1e4", "", "tenant"]:
            namespace = {"metadata": {"labels": {"gradsync/user": user}}}
            with self.assertRaises(ValueError):
                self.refusals(self.trainers[0], namespace)
        namespace = {"metadata": {"labels": {"gradsync/user": "10002"}}}
        self.assertIn("runAsUser", " ".join(self.refusals(self.trainers[0], namespace)))

    def test_a_tenant_is_neither_root_nor_the_daemon_nor_nobody(self):
        for user in [0, 7417, 65534]:
            namespace = {"metadata": {"labels": {"gradsync/user": str(user)}}}
            pod = change(self.trainers[0], "spec/securityContext/runAsUser", user)
            (message,) = self.refusals(pod, namespace)
            self.assertIn("must not be 0, 7417 or 65534", message)

    def test_it_refuses_everything_else_of_the_node(self):
        container = "spec/containers/0/"
        context = container + "securityContext/"
        other = {"name": "other", "securityContext": {"allowPrivilegeEscalation": False}}
        mount = {"name": "gradsync", "mountPath": "/run/other"}
        root = {"runAsUser": 0, "allowPrivilegeEscalation": False}
        host = {"host": "10.0.0.1", "port": 7417}
        cases = [
            ("hostPath", "spec/volumes/0/hostPath/path", "/"),
            ("hostPath", "spec/volumes/0/hostPath/path", "/run"),
            ("hostPath", "spec/volumes/0/hostPath/path", "/run/gradsync/"),
            ("hostPath", "spec/volumes/0/hostPath/path", "/run/gradsync/.."),
            ("hostPath", "spec/volumes/1", {"name": "etc", "hostPath": {"path": "/etc"}}),
            ("readOnly", container + "volumeMounts/0/readOnly", False),
            ("readOnly", container + "volumeMounts/1", mount),
            ("readOnly", "spec/initContainers", [{**other, "volumeMounts": [mount]}]),
            ("readOnly", "spec/ephemeralContainers", [{**other, "volumeMounts": [mount]}]),
            ("runAsUser", "spec/securityContext/runAsUser", 0),
            ("runAsUser", "spec/securityContext/runAsUser", 7417),
            ("runAsUser", "spec/securityContext", {"runAsNonRoot": True}),
            ("runAsUser", context + "runAsUser", 10002),
            ("runAsUser", "spec/initContainers", [{**other, "securityContext": root}]),
            ("runAsUser", "spec/ephemeralContainers", [{**other, "securityContext": root}]),
            ("allowPrivilegeEscalation", context + "allowPrivilegeEscalation", True),
            ("allowPrivilegeEscalation", container + "securityContext", {}),
            ("allowPrivilegeEscalation", "spec/initContainers", [{"name": "other"}]),
            ("privileged", context + "privileged", True),
            ("capabilities", context + "capabilities/add", ["SETUID"]),
            ("/proc", context + "procMount", "Unmasked"),
            ("hostUsers", "spec/hostUsers", False),
            ("hostProcess", "spec/securityContext/windowsOptions", {"hostProcess": True}),
            ("hostProcess", context + "windowsOptions", {"hostProcess": True}),
            ("hostNetwork", "spec/hostNetwork", True),
            ("hostPID", "spec/hostPID", True),
            ("hostIPC", "spec/hostIPC", True),
            ("hostPort", container + "ports", [{"containerPort": 80, "hostPort": 80}]),
            ("probe", container + "startupProbe/tcpSocket", host),
            ("probe", container + "readinessProbe/httpGet", host),
            ("probe", container + "livenessProbe/tcpSocket", host),
            ("hook", container + "lifecycle/postStart/httpGet", host),
            ("hook", container + "lifecycle/preStop/httpGet", host),
            ("seLinuxOptions", "spec/securityContext/seLinuxOptions", {"type": "spc_t"}),
            ("seLinuxOptions", context + "seLinuxOptions", {"type": "spc_t"}),
            ("sysctls", "spec/securityContext/sysctls", [{"name": "kernel.shm_rmid_forced"}]),
            ("Unconfined", "spec/securityContext/seccompProfile/type", "Unconfined"),
            ("Unconfined", context + "seccompProfile/type", "Unconfined"),
            ("Unconfined", context + "appArmorProfile/type", "Unconfined"),
        ]
        for trainer in self.trainers:
            for reason, path, value in cases:
                with self.subTest(path=path, value=value):
                    (message,) = self.refusals(change(trainer, path, value))
                    self.assertIn(reason, message)
        # Each rule has a case, so no misspelled field goes unnoticed.
        reasons = [reason for reason, _, _ in cases] + ["must not be 0, 7417 or 65534"]
        for validation in self.policy["validations"]:
            self.assertTrue(any(reason in validation["message"] for reason in reasons))

    def test_evaluation_finds_faults(self):
        values = {"object": {"spec": {}}, "namespaceObject": {}, "variables": {}}
        for broken in ["object.spec.(", "objekt.spec == 1", "object.spec.all(v)"]:
            with self.assertRaises(RuntimeError):
                self.evaluate(broken, values)
        with self.assertRaises(ValueError):
            self.evaluate("object.spec.containers", values)


if __name__ == "__main__":
    unittest.main()
