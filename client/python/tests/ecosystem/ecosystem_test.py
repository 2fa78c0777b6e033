"""The examples with other packages that train, as their users run them, with the wheel.

Each one ends with the parameters of the same script on Gloo, and its averages are the daemon's.
"""

import json
import os
import pathlib
import subprocess
import tempfile

import pytest
from built_wheel import built_wheel

torch = pytest.importorskip("torch")

# Bazel links to this file.
_TREE = pathlib.Path(__file__).resolve().parents[4]
_PYTHON = _TREE / ".venv/ecosystem/bin/python"
_EXAMPLES = _TREE / "client/python/examples"
_RANKS = ("-m", "gradsync.run", "--nproc-per-node", "2")
_LIMIT_S = 600  # generous: the packages import for half a minute on a busy machine

# Runs a script, and ends the process without Python's teardown. There PyTorch's Gloo may abort: see
# spare_teardown() of train_digits.py.
_SPARE_TEARDOWN = """\
import os, runpy, sys
del sys.argv[0]
runpy.run_path(sys.argv[0], run_name="__main__")
sys.stdout.flush()
os._exit(0)
"""


@pytest.fixture(scope="module")
def installed(tmp_path_factory):
    """A folder with the wheel's files."""
    assert _PYTHON.exists(), "run tools/setup --ecosystem"
    folder = tmp_path_factory.mktemp("installed")
    pip = [_PYTHON, "-m", "pip", "install", "--no-deps", "--no-index", "--target", folder]
    subprocess.run([*pip, built_wheel()], check=True, timeout=_LIMIT_S)
    return folder


@pytest.fixture
def run(installed, own_daemon, tmp_path):
    """Runs the ecosystem's Python in an empty folder."""
    # Ray's sockets are in its folder, and a socket's path has at most 107 bytes.
    with tempfile.TemporaryDirectory(prefix="ray-", dir="/tmp") as ray:
        environment = {
            **os.environ,
            "GRADSYNC_SOCKET": own_daemon.socket,
            "HF_HUB_OFFLINE": "1",
            "HOME": str(tmp_path),
            "OMP_NUM_THREADS": "1",
            "PYTHONPATH": str(installed),
            "RAY_TMPDIR": ray,
            "RAY_TRAIN_WORKER_GROUP_START_TIMEOUT_S": str(_LIMIT_S),
            "RAY_USAGE_STATS_ENABLED": "0",
        }
        environment.pop("GRADSYNC_LIBRARY", None)  # the wheel has its own

        def run(*words):
            subprocess.run(
                [_PYTHON, *map(str, words)],
                cwd=tmp_path,
                env=environment,
                stdin=subprocess.DEVNULL,
                check=True,
                timeout=_LIMIT_S,
            )

        yield run


@pytest.fixture
def jobs(installed, own_daemon):
    """Asks the daemon for every running or ended job."""

    def jobs():
        program = installed / "gradsync/bin/gradsyncctl"
        told = subprocess.run(
            [program, "stats", "--json", "--socket", own_daemon.socket],
            capture_output=True,
            check=True,
            timeout=60,
        )
        return json.loads(told.stdout)["jobs"]

    return jobs


def tensors(value, path=""):
    """{path: tensor} of every floating-point tensor in a structure."""
    if isinstance(value, torch.Tensor):
        return {path: value} if value.is_floating_point() else {}
    items = value.items() if isinstance(value, dict) else ()
    items = enumerate(value) if isinstance(value, (list, tuple)) else items
    return {p: t for key, v in items for p, t in tensors(v, f"{path}/{key}").items()}


def assert_ends_as_on_gloo(file, gloos_file):
    end, expected = (tensors(torch.load(path)) for path in (file, gloos_file))
    assert end.keys() == expected.keys() and len(expected) >= 4
    for name, value in expected.items():
        assert (end[name] - value).abs().max().item() <= 1e-5, name


def assert_averaged_by_the_daemon(jobs, steps):
    """A step's gradients are one bucket here. The first of a size is an operation of the job."""
    assert jobs, "the daemon saw no job"
    layouts = [layout for job in jobs for layout in job["layouts"]]
    averaged = sum(int(layout["steps_complete"]) for layout in layouts)
    assert averaged >= steps - len(jobs), jobs
    assert not any(int(layout["steps_void"]) for layout in layouts)
    assert not any(int(job["operations_failed"]) for job in jobs)


@pytest.mark.parametrize(
    "name, steps",
    [
        ("accelerate", 32),
        ("fabric", 32),
        ("hugging_face", 16),
        ("lightning", 24),
        ("torchmetrics", 32),
    ],
)
def test_ends_as_on_gloo(name, steps, run, jobs, tmp_path):
    script = _EXAMPLES / f"train_with_{name}.py"
    run(*_RANKS, "--no-python", _PYTHON, "-c", _SPARE_TEARDOWN, script, "gloo", tmp_path / "gloo")
    assert jobs() == []
    run(*_RANKS, script, "gradsync", tmp_path / "gradsync")
    assert_ends_as_on_gloo(tmp_path / "gradsync", tmp_path / "gloo")
    assert_averaged_by_the_daemon(jobs(), steps)


def test_accelerate_with_gradsyncs_wrapper_ends_as_on_gloo(run, jobs, tmp_path):
    """prepare() gets everything but the module."""
    theirs = _EXAMPLES / "train_with_accelerate.py"
    prepares = "model, optimizer, loader, schedule = accelerator.prepare(model, optimizer, "
    wraps = (
        "import gradsync.torch\n"
        "model = gradsync.torch.DistributedDataParallel(model)\n"
        "optimizer, loader, schedule = accelerator.prepare(optimizer, "
    )
    text = theirs.read_text()
    assert text.count(prepares) == 1
    ours = tmp_path / "train.py"
    ours.write_text(text.replace(prepares, wraps) + "model.leave()\n")
    ranks = (*_RANKS, "--no-python", _PYTHON, "-c", _SPARE_TEARDOWN)
    run(*ranks, theirs, "gloo", tmp_path / "gloo")
    assert jobs() == []
    run(*ranks, ours, "gloo", tmp_path / "wrapper")
    assert_ends_as_on_gloo(tmp_path / "wrapper", tmp_path / "gloo")
    assert_averaged_by_the_daemon(jobs(), 32)


def test_a_stateful_loader_goes_on_where_it_stopped(run, jobs, tmp_path):
    script = _EXAMPLES / "train_with_torchdata.py"
    run(*_RANKS, "--no-python", _PYTHON, "-c", _SPARE_TEARDOWN, script, "gloo", tmp_path / "gloo")
    run(*_RANKS, script, "gradsync", tmp_path / "gradsync", 11)  # amid an epoch of 8 batches
    run(*_RANKS, script, "gradsync", tmp_path / "gradsync")
    for rank in ("0", "1"):
        assert_ends_as_on_gloo(tmp_path / f"gradsync.{rank}", tmp_path / f"gloo.{rank}")
    assert_averaged_by_the_daemon(jobs(), 24)


def test_ray_train_ends_as_on_gloo(run, jobs, tmp_path):
    script = _EXAMPLES / "train_with_ray.py"
    run(script, "gloo", tmp_path / "gloo")
    assert jobs() == []
    run(script, "gradsync", tmp_path / "gradsync")
    assert_ends_as_on_gloo(tmp_path / "gradsync", tmp_path / "gloo")
    assert_averaged_by_the_daemon(jobs(), 24)
