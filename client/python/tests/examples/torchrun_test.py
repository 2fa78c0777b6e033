"""The example under torchrun, as a person would run it."""

import collections
import os
import re
import subprocess

import pytest
from daemon_process import DaemonProcess

pytest.importorskip("torch")  # the example trains with it

from digits_training import EXAMPLE, TORCHRUN, assert_close, jobs, train  # noqa: E402


def torchrun(daemon: DaemonProcess, *arguments, ranks=2, restarts=0):
    """Runs the example; returns what it printed."""
    done = subprocess.run(
        [*TORCHRUN, f"--nproc_per_node={ranks}", f"--max-restarts={restarts}"]
        + [EXAMPLE, *arguments],
        env={**os.environ, "GRADSYNC_SOCKET": daemon.socket, "OMP_NUM_THREADS": "1"},
        stdin=subprocess.DEVNULL,
        capture_output=True,
        text=True,
        timeout=200,
    )
    assert done.returncode == 0, done.stdout + done.stderr
    return done.stdout


def test_backends_end_with_the_same_parameters(own_daemon, tmp_path):
    ends = {
        backend: train(
            lambda *arguments: torchrun(own_daemon, *arguments), backend, tmp_path / backend, 2
        )
        for backend in ("gradsync", "hook", "group", "ddp")
    }
    for backend in ("gradsync", "hook", "group"):
        assert_close(ends[backend], ends["ddp"])
    # All 200 steps went through the daemon, by the wrapper, the hook and the process group.
    steps = collections.Counter()
    for job in jobs(own_daemon):
        for layout in job["layouts"]:
            steps[layout["name"].rstrip("0123456789")] += int(layout["steps_complete"])
    # The process group has slots, each of one bucket's size, and several buckets in a step.
    assert steps.keys() == {"ddp", "hook", "all_reduce"}
    assert steps["ddp"] + steps["hook"] >= 2 * 198 and steps["all_reduce"] >= 2 * 198, steps


def test_restarted_workers_join_at_once(own_daemon):
    said = torchrun(own_daemon, "--steps", "20", "--crash-at", "5", restarts=1)
    joined = float(re.search(r"after ([\d.]+) s to join", said).group(1))
    # The new generation does not wait for the ended one's leases or deadlines.
    assert joined < 10, said
