"""How a trainer's process ends, as another rank sees it: a good end, or a loss."""

import os
import subprocess
import sys
import textwrap
import uuid

import pytest

_SETUP = """
    import os, sys
    import torch
    import gradsync, gradsync.torch
    from gradsync.torch import DistributedDataParallel

    def step(model):
        model(torch.ones(1, 2)).sum().backward()

    def train(rank, ends):
        os.environ["RANK"] = str(rank)
        torch.set_num_threads(1)
        torch.manual_seed(0)
        model = DistributedDataParallel(torch.nn.Linear(2, 1))
        step(model)
        ends()
"""
_OTHER_RANK = """
    import time

    model = DistributedDataParallel(torch.nn.Linear(2, 1))
    step(model)
    deadline = time.monotonic() + 30
    try:
        while True:
            step(model)
            if model.last_step.live_ranks == 1:
                print("alone")
                break
            assert time.monotonic() < deadline
    except gradsync.AbortedError as error:
        print(error.reason, error.rank)
"""


def run(daemon, ending):
    """Rank 1 runs `ending` after a step; returns what rank 0 saw of it, and rank 1's output."""
    environment = {
        **os.environ,
        "GRADSYNC_SOCKET": daemon.socket,
        "WORLD_SIZE": "2",
        "MASTER_ADDR": "127.0.0.1",
        "MASTER_PORT": "1",
        "TORCHELASTIC_RUN_ID": uuid.uuid4().hex,
        "OMP_NUM_THREADS": "1",
    }
    package = [path for path in sys.path if os.path.isdir(os.path.join(path, "gradsync"))]
    environment["PYTHONPATH"] = os.pathsep.join(package)
    programs = [
        textwrap.dedent(_SETUP) + textwrap.dedent(program) for program in (_OTHER_RANK, ending)
    ]
    ranks = [
        subprocess.Popen(
            [sys.executable, "-c", program],
            env={**environment, "RANK": str(rank)},
            stdin=subprocess.DEVNULL,
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
        )
        for rank, program in enumerate(programs)
    ]
    try:
        said = [rank.communicate(timeout=60)[0] for rank in ranks]
    finally:
        for rank in ranks:
            rank.kill()
    return said


@pytest.mark.parametrize(
    "ending",
    ["train(1, lambda: None)", "train(1, sys.exit)", "train(1, lambda: sys.exit(0))"],
    ids=["returns", "sys.exit()", "sys.exit(0)"],
)
def test_a_good_end_leaves_the_job(daemon, ending):
    other, own = run(daemon, ending)
    assert other == "alone\n", other + own


@pytest.mark.parametrize(
    "ending",
    [
        "train(1, lambda: sys.exit(1))",
        "train(1, lambda: sys.exit('failed'))",
        "train(1, lambda: os._exit(0))",
        "train(1, lambda: torch.zeros(1)[2])",
    ],
    ids=["sys.exit(1)", "sys.exit(text)", "os._exit", "exception"],
)
def test_a_bad_end_is_a_loss(daemon, ending):
    other, own = run(daemon, ending)
    assert other == "RANK_LOST 1\n", other + own


def test_an_exception_in_a_spawned_worker_is_a_loss(daemon, tmp_path):
    """torch.multiprocessing.spawn catches it and ends the worker by sys.exit(1)."""
    script = tmp_path / "spawned.py"
    script.write_text(
        textwrap.dedent(_SETUP)
        + textwrap.dedent(
            """
            def fails(rank):
                train(1, lambda: torch.zeros(1)[2])

            if __name__ == "__main__":
                try:
                    torch.multiprocessing.spawn(fails, nprocs=1)
                except Exception as error:
                    print(type(error).__name__)
            """
        )
    )
    other, own = run(daemon, f"import runpy; runpy.run_path({str(script)!r}, run_name='__main__')")
    assert other == "RANK_LOST 1\n", other + own
