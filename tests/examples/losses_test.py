"""Which ranks tools/quickstart --kill kills."""

import json
import pathlib
import signal
import subprocess
import sys

import pytest

sys.path.insert(0, str(pathlib.Path(__file__).parents[2] / "tools" / "quick_start"))
from losses import Losses  # noqa: E402

_STEPS = 200


@pytest.fixture
def rank():
    """A process that ends when it is killed."""
    process = subprocess.Popen(["cat"], stdin=subprocess.PIPE)
    yield process
    process.kill()
    process.wait()
    process.stdin.close()


def _losses(folder, rank, steps):
    """One rank that is to be killed at step 160. Each time it is asked, the daemon names the next
    of `steps`; None: the job has ended."""
    for number, step in enumerate(steps):
        jobs = []
        if step is not None:
            session = {"rank": 0, "pid": rank.pid, "state": "live"}
            layouts = [{"step": step}]
            jobs = [{"state": "running", "layouts": layouts, "sessions": [session]}]
            jobs[0]["held_ranks"] = []
        (folder / str(number)).write_text(json.dumps({"jobs": jobs}))
    program = folder / "gradsyncctl"
    # Each answer is given once.
    program.write_text(
        f'#!/bin/sh\ncd {folder}\nfirst=$(ls [0-9] | head -1)\ncat "$first"\nrm "$first"\n'
    )
    program.chmod(0o755)
    return Losses(str(program), "socket", 1, [160], _STEPS, lambda line: None)


def test_kills_a_rank_that_has_steps_before_it(tmp_path, rank):
    losses = _losses(tmp_path, rank, [161, 170])
    losses.look()
    assert rank.wait(timeout=60) == -signal.SIGKILL
    assert [(loss.rank, loss.step) for loss in losses.losses] == [(0, 170)]


@pytest.mark.parametrize("now", [_STEPS, None])
def test_lets_a_rank_go_on_that_is_in_its_last_step(tmp_path, rank, now):
    losses = _losses(tmp_path, rank, [191, now])
    losses.look()
    assert losses.losses == []
    rank.stdin.close()
    assert rank.wait(timeout=60) == 0  # it is not stopped
