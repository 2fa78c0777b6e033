"""The example under torchrun, as a person would run it."""

import json
import os
import pathlib
import re
import subprocess
import sys

import pytest
from daemon_process import DaemonProcess

torch = pytest.importorskip("torch")

# Bazel links to this file.
_TREE = pathlib.Path(__file__).resolve().parents[4]
_EXAMPLE = _TREE / "client/python/examples/train_digits.py"
_CTL = os.environ.get("GRADSYNCCTL") or str(_TREE / "bazel-bin/tools/gradsyncctl/gradsyncctl")


def torchrun(daemon: DaemonProcess, *arguments, ranks=2, restarts=0):
    """Runs the example; returns what it printed."""
    done = subprocess.run(
        [sys.executable, "-m", "torch.distributed.run", f"--nproc_per_node={ranks}"]
        + [f"--max-restarts={restarts}", str(_EXAMPLE), *arguments],
        env={**os.environ, "GRADSYNC_SOCKET": daemon.socket, "OMP_NUM_THREADS": "1"},
        stdin=subprocess.DEVNULL,
        capture_output=True,
        text=True,
        timeout=200,
    )
    assert done.returncode == 0, done.stdout + done.stderr
    return done.stdout


def jobs(daemon: DaemonProcess):
    """Every job that the daemon knows or knew, as gradsyncctl tells it."""
    told = subprocess.run(
        [_CTL, "stats", "--json", "--socket", daemon.socket], capture_output=True, timeout=20
    )
    return json.loads(told.stdout)["jobs"]


def test_backends_end_with_the_same_parameters(own_daemon, tmp_path):
    ends = {}
    for backend in ("gradsync", "hook", "ddp"):
        path = tmp_path / f"{backend}.pt"
        said = torchrun(own_daemon, "--backend", backend, "--save", str(path))
        right = float(re.search(r"([\d.]+) % of 360 held-out digits right", said).group(1))
        assert 95 < right < 100, said
        ends[backend] = torch.load(path)
    for backend in ("gradsync", "hook"):
        assert ends[backend].keys() == ends["ddp"].keys()
        for name, expected in ends["ddp"].items():
            difference = (ends[backend][name] - expected).abs().max().item()
            assert difference <= 1e-5, (backend, name)
    # All 200 steps went through the daemon, by the wrapper and by the hook.
    steps = sorted(
        (layout["name"], int(layout["steps_complete"]))
        for job in jobs(own_daemon)
        for layout in job["layouts"]
    )
    assert {name for name, _ in steps} == {"ddp0", "hook0"}
    assert sum(count for _, count in steps) >= 2 * 198, steps


def test_restarted_workers_join_at_once(own_daemon):
    said = torchrun(own_daemon, "--steps", "20", "--crash-at", "5", restarts=1)
    joined = float(re.search(r"after ([\d.]+) s to join", said).group(1))
    # The dead generation's ranks are in nobody's way: no lease, no deadline is waited for.
    assert joined < 10, said
