"""Runs docs/your-script.md, whose Python blocks together are one script, and README.md's script."""

import os
import pathlib
import re
import subprocess
import sys

import gradsync
import pytest
from ranks import free_port

pytest.importorskip("torch")

# Bazel links to this file.
_TREE = pathlib.Path(__file__).resolve().parents[3]
_PACKAGE = pathlib.Path(gradsync.__file__).parents[1]
_PATHS = os.pathsep.join([str(_PACKAGE), os.environ.get("PYTHONPATH", "")])
_LIMIT_S = 200
_NOT_SET = ("RANK", "WORLD_SIZE", "LOCAL_RANK", "LOCAL_WORLD_SIZE", "GRADSYNC_SOCKET")


def written(page, folder):
    """The script of a page. From the tree it needs the import that makes the name known."""
    text = (_TREE / page).read_text()
    blocks = re.findall(r"^```python\n(.*?)^```$", text, re.DOTALL | re.MULTILINE)
    path = folder / "train.py"
    path.write_text("import gradsync.torch\n" + "\n".join(blocks))
    return path


@pytest.fixture
def script(tmp_path):
    return written("docs/your-script.md", tmp_path)


def start(*words, folder, **variables):
    kept = {name: value for name, value in os.environ.items() if name not in _NOT_SET}
    return subprocess.Popen(
        [sys.executable, *map(str, words)],
        cwd=folder,
        env={**kept, "PYTHONPATH": _PATHS, "OMP_NUM_THREADS": "1", **variables},
        stdin=subprocess.DEVNULL,
        stdout=subprocess.PIPE,
        text=True,
    )


def finish(process):
    try:
        said = process.communicate(timeout=_LIMIT_S)[0]
    finally:
        process.kill()
    assert process.returncode == 0, said
    return said


def test_two_ranks(script, tmp_path):
    words = ("-m", "gradsync.run", "--nproc-per-node", "2", script)
    said = finish(start(*words, folder=tmp_path))
    assert re.fullmatch(r"rank [01] \| (\d+ of 32 right)\nrank [01] \| \1\n", said)


def test_the_readmes_script(tmp_path):
    words = ("-m", "gradsync.run", "--nproc-per-node", "2", written("README.md", tmp_path))
    said = finish(start(*words, folder=tmp_path))
    expected = [f"rank {rank} | rank {rank}: y = 3.000 x + 2.000" for rank in range(2)]
    assert sorted(said.splitlines()) == expected


def test_one_rank_without_a_daemon(script, tmp_path):
    address = {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(free_port())}
    alone = start(script, folder=tmp_path, RANK="0", WORLD_SIZE="1", **address)
    assert re.fullmatch(r"\d+ of 16 right\n", finish(alone))


def test_two_ranks_with_sruns_variables(script, tmp_path, own_daemon):
    ranks = [
        start(
            script,
            folder=tmp_path,
            GRADSYNC_SOCKET=own_daemon.socket,
            MASTER_ADDR="127.0.0.1",
            MASTER_PORT=port,
            SLURM_PROCID=rank,
            SLURM_NTASKS="2",
            SLURM_LOCALID=rank,
        )
        for port in [str(free_port())]
        for rank in ("0", "1")
    ]
    said = {finish(rank) for rank in ranks}
    assert len(said) == 1 and re.fullmatch(r"\d+ of 32 right\n", said.pop())
