"""How a trainer's process ends, as another rank sees it: it leaves, finishes or is lost."""

import json
import os
import select
import signal
import subprocess
import sys
import textwrap
import uuid

import pytest

_SETUP = """
    import logging, os, sys
    import torch
    import gradsync, gradsync.torch
    from gradsync.torch import DistributedDataParallel

    # On a busy machine rank 1 may start so late that rank 0 says so.
    logging.getLogger("gradsync").setLevel(logging.ERROR)

    def step(model):
        model(torch.ones(1, 2)).sum().backward()

    def train(rank, ends):
        os.environ["RANK"] = str(rank)
        torch.set_num_threads(1)
        torch.manual_seed(0)
        model = DistributedDataParallel(torch.nn.Linear(2, 1))
        step(model)
        ends(model)
"""
_OTHER_RANK = """
    import time

    model = DistributedDataParallel(torch.nn.Linear(2, 1))
    step(model)
    deadline = time.monotonic() + 60
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
_CAUGHT = """
train(1, lambda model: None)
try:
    sys.exit(2)
except SystemExit as error:
    {}
"""


# Runs the programs of a case, each in a fork of an interpreter that has imported PyTorch already:
# that takes seconds. A program is this script's last statement, so the interpreter ends as it does
# for a script of its own: with the functions of atexit and the traceback of an exception. Python's
# collector leaves out PyTorch's million objects, but not the program's.
_LAUNCHER = """
import gc, json, os, sys
import torch

gc.freeze()
program = None
while program is None and (line := sys.stdin.readline()):
    request = json.loads(line)
    os.environ.update(request["environment"])
    ranks = []
    for rank, output in enumerate(request["outputs"]):
        ranks.append(os.fork())
        if ranks[-1] == 0:
            os.environ["RANK"] = str(rank)
            os.dup2(os.open(output, os.O_WRONLY | os.O_CREAT, 0o600), 1)
            os.dup2(1, 2)
            os.dup2(os.open(os.devnull, os.O_RDONLY), 0)
            program = request["programs"][rank]
            break
    else:
        for pid in ranks:
            os.waitpid(pid, 0)
        print("ended", flush=True)
if program is not None:
    exec(program)
"""


class Launcher:
    """The process that runs _LAUNCHER."""

    def __init__(self):
        package = [path for path in sys.path if os.path.isdir(os.path.join(path, "gradsync"))]
        self._process = subprocess.Popen(
            [sys.executable, "-c", _LAUNCHER],
            env={**os.environ, "PYTHONPATH": os.pathsep.join(package), "OMP_NUM_THREADS": "1"},
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            text=True,
            start_new_session=True,
        )

    def run(self, programs, environment, directory):
        """Runs `programs` as ranks of a job, and returns what each printed."""
        outputs = [directory / f"rank{rank}" for rank in range(len(programs))]
        request = {
            "environment": environment,
            "programs": [textwrap.dedent(_SETUP) + textwrap.dedent(p) for p in programs],
            "outputs": list(map(str, outputs)),
        }
        self._process.stdin.write(json.dumps(request) + "\n")
        self._process.stdin.flush()
        ended, _, _ = select.select([self._process.stdout], [], [], 120)
        said = [output.read_text() if output.exists() else "" for output in outputs]
        assert ended and self._process.stdout.readline() == "ended\n", said
        return said

    def close(self):
        os.killpg(self._process.pid, signal.SIGKILL)
        self._process.communicate()


@pytest.fixture(scope="module")
def launcher():
    process = Launcher()
    yield process
    process.close()


@pytest.fixture
def run(daemon, launcher, tmp_path):
    """run(ending) runs it on rank 1 after a step, and returns what rank 0 and rank 1 printed."""
    environment = {
        "GRADSYNC_SOCKET": daemon.socket,
        "WORLD_SIZE": "2",
        "MASTER_ADDR": "127.0.0.1",
        "MASTER_PORT": "1",
        "TORCHELASTIC_RUN_ID": uuid.uuid4().hex,
    }
    return lambda ending: launcher.run([_OTHER_RANK, ending], environment, tmp_path)


@pytest.mark.parametrize(
    "ending",
    [
        "train(1, lambda model: None)",
        "train(1, lambda model: sys.exit())",
        "train(1, lambda model: sys.exit(0))",
        "train(1, lambda model: None); sys.ps1 = 'In: '; sys.last_type = ValueError",
        _CAUGHT.format("pass"),
        _CAUGHT.format("sys.ps1, kept = 'In: ', error"),
        "train(1, lambda model: None); import threading\n"
        "thread = threading.Thread(target=sys.exit, args=(2,)); thread.start(); thread.join()",
    ],
    ids=[
        "returns",
        "sys.exit()",
        "sys.exit(0)",
        "a notebook with a failed cell",
        "a caught sys.exit(2)",
        "a notebook with a caught sys.exit(2)",
        "a thread's sys.exit(2)",
    ],
)
def test_a_good_end_ends_the_job_for_a_rank_that_begins_another_step(run, ending):
    other, own = run(ending)
    assert other == "RANK_FINISHED 1\n", other + own


def test_other_ranks_go_on_alone_after_leave(run):
    other, own = run("train(1, lambda model: model.leave())")
    assert other == "alone\n", other + own


@pytest.mark.parametrize(
    "ending",
    [
        "train(1, lambda model: sys.exit(1))",
        "train(1, lambda model: sys.exit('failed'))",
        "try: train(1, lambda model: sys.exit(1))\nexcept SystemExit: raise",
        "try: train(1, lambda model: sys.exit(1))\nexcept SystemExit: sys.exit(2)",
        "train(1, lambda model: exit(1))",
        "train(1, lambda model: quit('failed'))",
        "train(1, lambda model: os._exit(0))",
        "train(1, lambda model: torch.zeros(1)[2])",
    ],
    ids=[
        "sys.exit(1)",
        "sys.exit(text)",
        "raised again",
        "another",
        "exit(1)",
        "quit(text)",
        "os._exit",
        "exception",
    ],
)
def test_a_bad_end_is_a_loss(run, ending):
    other, own = run(ending)
    assert other == "RANK_LOST 1\n", other + own


def test_an_exception_in_a_spawned_worker_is_a_loss(run, tmp_path):
    """torch.multiprocessing.spawn catches it and ends the worker by sys.exit(1)."""
    script = tmp_path / "spawned.py"
    script.write_text(
        textwrap.dedent(_SETUP)
        + textwrap.dedent(
            """
            def fails(rank):
                train(1, lambda model: torch.zeros(1)[2])

            if __name__ == "__main__":
                try:
                    torch.multiprocessing.spawn(fails, nprocs=1)
                except Exception as error:
                    print(type(error).__name__)
            """
        )
    )
    other, own = run(f"import runpy; runpy.run_path({str(script)!r}, run_name='__main__')")
    assert other == "RANK_LOST 1\n", other + own
