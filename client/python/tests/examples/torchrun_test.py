"""The example under torchrun, as a person would run it."""

import os
import pathlib
import re
import subprocess
import sys

import gradsync
import pytest
from daemon_process import DaemonProcess

torch = pytest.importorskip("torch")  # the example trains with it

PACKAGE = str(pathlib.Path(gradsync.__file__).parents[1])

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


# wheel_test trains by the hook and the process group, too, with the same variables.
def test_both_wrappers_end_with_the_same_parameters(own_daemon, tmp_path):
    ends = [
        train(lambda *arguments: torchrun(own_daemon, *arguments), backend, tmp_path / backend, 2)
        for backend in ("gradsync", "ddp")
    ]
    assert_close(*ends)
    # All 200 steps of ours went through the daemon.
    (job,) = jobs(own_daemon)
    assert [int(layout["steps_complete"]) for layout in job["layouts"]] == [200]


def test_a_rank_that_is_lost_under_hold_changes_no_bit(own_daemon, tmp_path):
    def train_with(*arguments, path):
        done = subprocess.run(
            [sys.executable, "-m", "gradsync.run", "--nproc-per-node=2", "--max-restarts=1"]
            + [EXAMPLE, "--steps=30", "--save", path, *arguments],
            env={**os.environ, "PYTHONPATH": PACKAGE, "GRADSYNC_SOCKET": own_daemon.socket},
            stdin=subprocess.DEVNULL,
            capture_output=True,
            text=True,
            timeout=200,
        )
        assert done.returncode == 0, done.stdout + done.stderr
        return done.stdout, torch.load(path)

    _, expected = train_with(path=tmp_path / "abort")
    said, end = train_with("--on-rank-loss=hold", "--crash-at=12", path=tmp_path / "hold")
    assert "rank 1 | rank 1 is back in step 12\n" in said
    assert all(torch.equal(end[name], value) for name, value in expected.items())


def test_restarted_workers_join_at_once(own_daemon):
    said = torchrun(own_daemon, "--steps", "20", "--crash-at", "5", restarts=1)
    joined = float(re.search(r"after ([\d.]+) s to join", said).group(1))
    # The new generation does not wait for the ended one's leases or deadlines.
    assert joined < 10, said
