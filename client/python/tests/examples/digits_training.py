"""What tests of the example under torchrun share."""

import json
import os
import pathlib
import re
import subprocess
import sys

import torch
from daemon_process import DaemonProcess

# Bazel links to this file.
_TREE = pathlib.Path(__file__).resolve().parents[4]
_CTL = os.environ.get("GRADSYNCCTL") or str(_TREE / "bazel-bin/tools/gradsyncctl/gradsyncctl")
EXAMPLE = str(_TREE / "client/python/examples/train_digits.py")
TORCHRUN = (sys.executable, "-m", "torch.distributed.run")


def jobs(daemon: DaemonProcess):
    """Every running or ended job of the daemon, as gradsyncctl prints it."""
    told = subprocess.run(
        [_CTL, "stats", "--json", "--socket", daemon.socket], capture_output=True, timeout=20
    )
    return json.loads(told.stdout)["jobs"]


def train(run, backend, path, ranks):
    """Trains by `run`; returns the final parameters."""
    said = run("--backend", backend, "--save", str(path))
    right = float(re.search(rf"{ranks} ranks: .* ([\d.]+) % of 360 held-out digits", said).group(1))
    assert 95 < right < 100, said
    return torch.load(path)


def assert_close(parameters, expected):
    assert parameters.keys() == expected.keys()
    for name, value in expected.items():
        assert (parameters[name] - value).abs().max().item() <= 1e-5, name
