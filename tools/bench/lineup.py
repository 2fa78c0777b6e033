"""The implementations of gradsync-bench, and how each is started."""

from __future__ import annotations

import contextlib
import importlib.util
import json
import os
import pathlib
import shutil
import subprocess
import sys
import tempfile
from collections.abc import Iterator
from typing import Any, Optional

from machine import usable_cores
from rank_team import RankTeam
from source_tree import NotBuilt, find_program, make_importable
from stage import Stage

# In the order of the tables.
HOST = ("roofline", "gradsync", "gloo", "openmpi", "faulty")
PYTHON = ("gradsync_py", "gradsync_group", "gloo_py", "deepspeed")
# Process groups of PyTorch: these have the other collectives, too.
GROUPS = ("gradsync_group", "gloo_py")
GPU = ("roofline", "kernels", "gradsync", "nccl")
IMPLEMENTATIONS = ("roofline", "kernels", *HOST[1:], "nccl", *PYTHON)
# Over a network; the others are of one node.
SPAN_NODES = ("gradsync", "gloo", "faulty", *PYTHON)

# DeepSpeed's port is a part of the name of its shared memory, and nothing else here.
_ADDRESS, _PORT = "127.0.0.1", str(os.getpid())


def faults(names: tuple[str, ...], nodes: int, ranks: int, gpus: int) -> list[str]:
    """Why some of the implementations named cannot take part."""
    texts = []
    for name in names:
        if name not in (GPU if gpus else HOST + PYTHON):
            texts.append(f"--impl {name} is not of {'GPUs' if gpus else 'host memory'}")
        elif name == "nccl" and ranks != gpus:
            texts.append("--impl nccl needs a GPU for each rank: --gpus as --ranks")
        elif nodes > 1 and name not in SPAN_NODES:
            texts.append(f"--impl {name} is of one node alone")
    return texts


def default_names(nodes: int, ranks: int, gpus: int) -> tuple[tuple[str, ...], list[str]]:
    """Every implementation that this machine has, and notes about those that it lacks."""
    if gpus:
        return (GPU if ranks == gpus else GPU[:-1]), []
    if nodes > 1:
        return ("gradsync", "gloo"), []
    missing = _missing_openmpi()
    if missing is None:
        return HOST[:-1], []
    return HOST[:-2], [f"without openmpi: {missing}"]


def check_available(names: tuple[str, ...]) -> None:
    """NotBuilt if this machine lacks what an implementation needs."""
    missing = _missing_openmpi() if "openmpi" in names else None
    if missing is not None:
        raise NotBuilt(f"--impl openmpi: {missing}")
    if set(names) & set(PYTHON):
        make_importable()
    if "deepspeed" in names and importlib.util.find_spec("deepspeed") is None:
        raise NotBuilt(f"--impl deepspeed: {sys.executable} has no DeepSpeed (see --help)")


@contextlib.contextmanager
def no_deepspeed_memory() -> Iterator[None]:
    """Removes the files by which DeepSpeed's ranks meet, and which they leave behind."""
    try:
        yield
    finally:
        name = f"deepspeed_allreduce_buffer_{os.getuid()}_{_ADDRESS}_{_PORT}_*"
        for leftover in pathlib.Path("/dev/shm").glob(name):
            leftover.unlink(missing_ok=True)


def start(stage: Stage, name: str, options: dict[str, Any]) -> RankTeam:
    """Starts the ranks of one implementation.

    Args:
      stage: whose daemons run, if it is gradsync.
      name: of the implementation.
      options: for bench-rank, and `collective` for ranks in Python.

    Raises:
      Failed: a rank did not become ready.
    """
    if name in PYTHON:
        environment = {
            "DS_ACCELERATOR": "cpu",
            "LOCAL_SIZE": str(stage.ranks),
            "MASTER_ADDR": _ADDRESS,
            "MASTER_PORT": _PORT,
            # Where pip puts ninja.
            "PATH": os.path.dirname(sys.executable) + os.pathsep + os.environ.get("PATH", ""),
        }
        threads = max(1, usable_cores() // stage.ranks)
        with no_deepspeed_memory():  # all ranks have mapped it
            shared = {"collective": options["collective"]}
            script = "collective_rank.py"
            return stage.start_python_team(name, script, shared, threads, environment)
    options = {**options, "memory": stage.memory(name)}
    program = [find_program("tools/bench/bench-rank")]
    if name != "openmpi":
        return stage.start_team(name, program, options)
    # Open MPI's shared memory has a name until every rank has mapped it. Removed then: it would
    # outlive a bench that is killed.
    with tempfile.TemporaryDirectory(prefix="gradsync-bench-", dir="/dev/shm") as shared:
        launcher = _mpirun(stage.ranks, str(stage.directory), shared)
        return stage.start_team(name, program, options, launcher)


def _missing_openmpi() -> Optional[str]:
    program = find_program("tools/bench/bench-rank")
    asked = subprocess.run([program], capture_output=True, text=True, check=False)
    if not json.loads(asked.stdout)["openmpi"]:
        return "built without Open MPI, which was not installed"
    return None if _find_mpirun() else "mpirun is not installed"


def _find_mpirun() -> Optional[str]:
    # Debian's name first, for its "mpirun" may be another MPI's.
    found = shutil.which("mpirun.openmpi") or shutil.which("mpirun")
    if found is None:
        return None
    # mpirun takes its installation's folder from its own path, which may not be a link (/bin).
    return os.path.join(os.path.realpath(os.path.dirname(found)), os.path.basename(found))


def _mpirun(ranks: int, directory: str, shared_directory: str) -> list[str]:
    """The command up to the ranks' own; shared memory lies in `shared_directory`."""
    mpirun = _find_mpirun()
    assert mpirun is not None
    # Containers and build machines run as root and have fewer cores than ranks.
    flags = ["--allow-run-as-root", "--oversubscribe", "--bind-to", "none", "--noprefix"]
    parameters = {
        "plm": "isolated",  # this machine alone: no ssh
        "pml": "ob1",
        "btl": "self,vader",  # shared memory
        "orte_tmpdir_base": directory,
        "btl_vader_backing_directory": shared_directory,
    }
    for name, value in parameters.items():
        flags += ["--mca", name, value]
    return [mpirun, "-n", str(ranks), *flags]
