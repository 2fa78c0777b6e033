"""The quick start as a user runs it: its figures, and that nothing stays behind however it ends."""

import json
import os
import re
import shutil
import signal
import subprocess
import tempfile

import pytest

_LIMIT_S = 300


class _QuickStart:
    """tools/quickstart with the programs of this test.

    Attributes:
      pids: of the processes that it names, such as "rank 0" or "gradsyncd of node 1".
      output: what it printed to standard output so far.
    """

    def __init__(self):
        # Short: sockets lie in it.
        self.temporary = tempfile.mkdtemp(prefix="quickstart-test-", dir="/tmp")
        self.pids = {}
        self.output = ""
        self.process = None

    def start(self, *flags, programs=".", **environment):
        self.process = subprocess.Popen(
            ["tools/quickstart", f"--programs={programs}", *flags],
            env={**os.environ, "TMPDIR": self.temporary, **environment},
            stdin=subprocess.DEVNULL,
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            text=True,
        )

    def await_line(self, text):
        """Reads until a line contains the text."""
        for line in self.process.stdout:
            self._read(line)
            if text in line:
                return
        pytest.fail(f"ended before it printed '{text}'\n{self.output}{self.process.stderr.read()}")

    def end(self):
        """Returns the exit status and what it printed to standard error."""
        rest, errors = self.process.communicate(timeout=_LIMIT_S)
        for line in rest.splitlines(keepends=True):
            self._read(line)
        print(self.output, errors)
        return self.process.returncode, errors

    def run(self, *flags, **more):
        self.start(*flags, **more)
        return self.end()

    def _read(self, line):
        self.output += line
        named = re.match(r"  (gradsyncd|rank \d+) +pid (\d+)(?:.* on node (\d+))?", line)
        if named:
            name = named[1]
            if name == "gradsyncd" and named[3]:
                name += f" of node {named[3]}"
            self.pids[name] = int(named[2])


@pytest.fixture
def quickstart():
    """Fails the test if a process or a file is left behind."""
    run = _QuickStart()
    yield run
    if run.process is not None and run.process.poll() is None:
        run.process.kill()
        run.process.wait()
    left = os.listdir(run.temporary)
    shutil.rmtree(run.temporary)
    assert left == []
    for name, pid in run.pids.items():
        assert not os.path.exists(f"/proc/{pid}"), f"{name} is still there"


def test_ranks_learn_what_one_process_learns(quickstart, tmp_path):
    path = tmp_path / "figures.json"
    assert quickstart.run("--json", str(path)) == (0, "")
    assert len(quickstart.pids) == 2 + 1

    figures = json.loads(path.read_text())
    assert figures["ranks"] == 2
    assert figures["test_accuracy"] >= 96
    assert figures["max_difference_sharded"] == 0
    assert figures["max_difference_whole"] <= 1e-5
    assert figures["steps"] == 240
    # At least every parameter in every step, at most some padding on top.
    assert 240 * 396_490 * 4 <= figures["bytes_reduced"] <= 240 * 397_490 * 4
    assert figures["reduce_gbps"] > 0
    assert 0 <= figures["overlap_percent"] <= 100
    assert figures["step_ms"] > 0
    assert figures["failures"] == []

    # The picture of gradsyncctl: a line for each of the 5 buckets.
    assert "One step as it happened" in quickstart.output
    assert len(re.findall(r"(?m)^ +[0-4]  .*#+d ", quickstart.output)) == 5
    assert "3 fc2 578 KiB" in quickstart.output
    assert re.search(r"Overlap (makes|gains)", quickstart.output)
    assert "grpcurl -plaintext -unix SOCKET" in quickstart.output


def test_nodes_learn_what_one_process_learns(quickstart, tmp_path):
    path = tmp_path / "nodes.json"
    flags = ("--nodes=2", "--ranks=2", "--rate=1gbit", f"--json={path}")
    assert quickstart.run(*flags) == (0, "")
    assert len(quickstart.pids) == 2 + 4

    figures = json.loads(path.read_text())
    assert (figures["nodes"], figures["ranks"]) == (2, 4)
    assert figures["test_accuracy"] >= 96
    assert figures["max_difference_sharded"] == 0
    assert figures["max_difference_whole"] <= 1e-5
    assert figures["steps"] == 240
    assert figures["reduce_gbps"] > 0
    (network,) = re.findall(r"(?m)^  network +(.*)$", quickstart.output)
    limited = "namespaces, links of 1gbit" in network
    assert limited or "127.0.0" in network or "loopback" in network
    # A link that keeps its rate is part of what was gained.
    assert ("the link alone: 12.7 ms" in quickstart.output) == limited


def assert_only_the_accuracy_is_wrong(status, errors, path):
    assert status == 1
    assert "the test accuracy is " in errors
    figures = json.loads(path.read_text())
    assert figures["max_difference_sharded"] == 0
    assert figures["max_difference_whole"] <= 1e-5
    assert len(figures["failures"]) == 1
    return figures


def test_an_untrained_model_is_a_failure(quickstart, tmp_path):
    path = tmp_path / "untrained.json"
    status, errors = quickstart.run("--ranks=3", "--steps=3", f"--json={path}")
    figures = assert_only_the_accuracy_is_wrong(status, errors, path)
    assert (figures["nodes"], figures["ranks"], figures["steps"]) == (1, 3, 3)
    assert len(quickstart.pids) == 3 + 1


def test_nodes_meet_on_loopback_where_there_are_no_namespaces(quickstart, tmp_path):
    path = tmp_path / "loopback.json"
    status, errors = quickstart.run(
        "--nodes=2",
        "--ranks=1",
        "--steps=3",
        f"--json={path}",
        GRADSYNC_VIRTUAL_NETWORK="loopback",
    )
    figures = assert_only_the_accuracy_is_wrong(status, errors, path)
    assert (figures["nodes"], figures["ranks"], figures["steps"]) == (2, 2, 3)
    (network,) = re.findall(r"(?m)^  network +(.*)$", quickstart.output)
    assert "127.0.0" in network or "loopback" in network


def test_a_daemon_of_another_node_that_was_killed_is_named(quickstart):
    quickstart.start("--nodes=3", "--ranks=1", "--steps=1000000")
    quickstart.await_line("step ")
    killed = quickstart.pids["gradsyncd of node 2"]
    os.kill(killed, signal.SIGKILL)
    status, errors = quickstart.end()
    assert status == 1
    assert errors.startswith(
        f"\ntools/quickstart: gradsyncd of node 2 (pid {killed}) was killed by signal 9 (Killed)\n"
    )
    # The ranks' errors, which their daemons report: they name the lost node.
    for text in ("rank 0 (pid ", "rank 1 (pid ", "node-2"):
        assert text in errors


@pytest.mark.parametrize(
    "name, told", [("rank 1", "ABORTED: step "), ("gradsyncd", "UNAVAILABLE: step ")]
)
def test_a_process_that_was_killed_is_named_first(quickstart, name, told):
    quickstart.start("--ranks=3", "--steps=1000000")
    quickstart.await_line("step ")
    killed = quickstart.pids[name]
    os.kill(killed, signal.SIGKILL)
    status, errors = quickstart.end()
    assert status == 1
    assert errors.startswith(
        f"\ntools/quickstart: {name} (pid {killed}) was killed by signal 9 (Killed)\n"
    )
    for text in (told, "rank 0 (pid ", "rank 2 (pid ", name):
        assert text in errors


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM])
def test_a_signal_ends_everything(quickstart, number):
    quickstart.start("--steps=1000000")
    quickstart.await_line("step ")
    quickstart.process.send_signal(number)
    status, errors = quickstart.end()
    assert status == 128 + number
    assert "everything is cleaned up" in errors


def test_keep_leaves_daemon_and_trainers_until_a_signal(quickstart):
    quickstart.start("--keep", "--steps=80")
    quickstart.await_line("Press Enter")
    for name in ("gradsyncd", "rank 0", "rank 1"):
        os.kill(quickstart.pids[name], 0)
    assert f"status --socket {quickstart.temporary}/gradsync-" in quickstart.output
    quickstart.process.send_signal(signal.SIGINT)
    assert quickstart.end() == (0, "")


def test_a_daemon_that_cannot_be_run_is_named(quickstart, tmp_path):
    program = tmp_path / "daemon" / "gradsyncd"
    assert quickstart.run(programs=tmp_path) == (
        1,
        f"\ntools/quickstart: gradsyncd: cannot run {program}: No such file or directory\n",
    )


def test_the_last_lines_of_a_daemon_that_ended_are_shown(quickstart, tmp_path):
    (tmp_path / "daemon").mkdir()
    # cat does not know --socket.
    (tmp_path / "daemon" / "gradsyncd").symlink_to("/bin/cat")
    status, errors = quickstart.run(programs=tmp_path)
    assert status == 1
    assert "exited with code 1\n" in errors
    assert "unrecognized option '--socket" in errors


@pytest.mark.parametrize(
    "flags, wanted",
    [
        (["--ranks", "9"], "--ranks takes a number from 1 to 8, not '9'"),
        (["--ranks=0"], "--ranks takes a number from 1 to 8, not '0'"),
        (["--keep", "--ranks=two"], "--ranks takes a number from 1 to 8, not 'two'"),
        (["--nodes", "5"], "--nodes takes a number from 1 to 4, not '5'"),
        (["--nodes=3", "--ranks=3"], "--nodes times --ranks is 9, more than 8"),
        (["--ranks"], "--ranks expected one argument"),
        (["--json"], "--json expected one argument"),
        (["--steps=-1"], "--steps takes a number from 1 to 1000000, not '-1'"),
        (["--rank", "2"], "unrecognized arguments: --rank 2"),
        (["2"], "unrecognized arguments: 2"),
        (["--rate", "1gbit"], "--rate needs --nodes 2 or more: one node has no link"),
        (
            ["--kill", "--nodes=2"],
            "--kill runs on one node, and keeps nothing: leave out --nodes and --keep",
        ),
        (
            ["--kill", "--ranks=1"],
            "--kill needs --ranks 2 or more: another rank has the state of a lost one",
        ),
        (["--nodes=2", "--rate=fast"], "--rate takes a rate such as 1gbit or 100mbit, not 'fast'"),
    ],
)
def test_wrong_usage_is_refused_before_anything_is_built(flags, wanted):
    refused = subprocess.run(["tools/quickstart", *flags], capture_output=True, text=True)
    assert refused.returncode == 2
    assert refused.stdout == ""
    assert refused.stderr.startswith(f"tools/quickstart: {wanted}\n")


def test_help_teaches():
    shown = subprocess.run(["tools/quickstart", "--help"], capture_output=True, text=True)
    assert shown.returncode == 0
    for option in ("--nodes N", "--ranks N", "--rate RATE", "--keep", "--kill", "--json FILE"):
        assert option in shown.stdout
    for text in ("Exit status:", "SIGKILL"):
        assert text in shown.stdout


def test_killed_ranks_change_no_bit(quickstart, tmp_path):
    path = tmp_path / "kill.json"
    flags = ("--kill", "--ranks=3", "--steps=200", f"--json={path}")
    assert quickstart.run(*flags) == (0, "")
    figures = json.loads(path.read_text())
    assert (figures["ranks"], figures["steps"]) == (3, 200)
    assert figures["same_bits"]
    assert figures["tensors"] == 11
    assert figures["test_accuracy"] >= 90
    assert figures["failures"] == []
    losses = figures["losses"]
    assert losses
    for loss in losses:
        assert loss["held_s"] > 0
        assert loss["new_pid"] not in (0, loss["pid"])
        killed = f"rank {loss['rank']} (pid {loss['pid']}) is killed by SIGKILL"
        back = f"rank {loss['rank']} is back (pid {loss['new_pid']}); the others waited"
        assert killed in quickstart.output and back in quickstart.output
    assert "Who was lost, and when" in quickstart.output
    assert quickstart.output.count("\u2717") >= len(losses)
    assert "same bits" in quickstart.output
