"""The wheel that tools/wheel makes, installed into an empty virtual environment. No network."""

import os
import pathlib
import re
import subprocess
import sys
import uuid
import zipfile

import numpy
import pytest

# Under Bazel this folder has links to the tree's files; otherwise it is the tree.
TREE = pathlib.Path(__file__).parents[3]
# What manylinux_2_36 lets a wheel leave to the system.
SYSTEM = {
    "ld-linux-x86-64.so.2",
    "libc.so.6",
    "libgcc_s.so.1",
    "libm.so.6",
    "libstdc++.so.6",
    "libz.so.1",
    "linux-vdso.so.1",
}


def tool(*arguments):
    return subprocess.run(
        [TREE / "tools/wheel", *arguments], capture_output=True, text=True, timeout=120
    )


@pytest.fixture(scope="module")
def wheel(tmp_path_factory):
    output = tmp_path_factory.mktemp("wheel")
    library = os.environ.get("GRADSYNC_LIBRARY") or TREE / "bazel-bin/client/libgradsync.so"
    made = tool("--library", library, "--output", output)
    assert made.returncode == 0, made.stderr
    (wheel,) = output.iterdir()
    assert re.fullmatch(re.escape(str(wheel)) + r" \(\d+\.\d MB\)\n", made.stdout)
    return wheel


@pytest.fixture(scope="module")
def environment(wheel, tmp_path_factory):
    """A virtual environment with the wheel and a link to NumPy."""
    folder = tmp_path_factory.mktemp("environment")
    clean(sys.executable, "-m", "venv", folder)
    clean(folder / "bin/pip", "install", "--no-deps", "--no-index", wheel)
    (packages,) = folder.glob("lib/python3*/site-packages")
    installed = pathlib.Path(numpy.__file__).parents[1]
    for name in ("numpy", "numpy.libs"):
        (packages / name).symlink_to(installed / name)
    return folder, packages


def clean(*command, **variables):
    """Runs a command that cannot see the tree; returns what it prints."""
    run = subprocess.run(
        command, cwd="/", capture_output=True, text=True, timeout=120, env=variables
    )
    assert run.returncode == 0, run.stdout + run.stderr
    return run.stdout


def test_the_name_has_the_platforms_tag(wheel):
    assert re.fullmatch(r"gradsync-[0-9.]+-py3-none-manylinux_2_36_x86_64\.whl", wheel.name)


def test_it_contains_only_the_typed_package(wheel):
    names = zipfile.ZipFile(wheel).namelist()
    assert "gradsync/py.typed" in names and "gradsync/libgradsync.so" in names
    tops = {name.split("/")[0] for name in names}
    assert {re.sub(r"-.*\.", "-0.", top) for top in tops} == {
        "gradsync",
        "gradsync.libs",
        "gradsync-0.dist-info",
        "gradsync_torch_backend.py",
    }
    assert not [name for name in names if "test" in name or "__pycache__" in name]


def test_it_contains_every_library_that_systems_may_lack(environment):
    _, packages = environment
    lines = clean("/usr/bin/ldd", packages / "gradsync/libgradsync.so").splitlines()
    assert len(lines) > len(SYSTEM)
    for line in lines:
        name, _, path = line.partition(" => ")
        name = pathlib.Path(name.split(" (")[0].strip()).name
        path = path.split(" (")[0]
        if name not in SYSTEM:
            assert os.path.dirname(os.path.realpath(path)) == str(packages / "gradsync.libs"), line


TRAINER = """
import sys, gradsync, gradsync._library
assert gradsync._library.library.path.startswith(sys.prefix), gradsync._library.library.path
with gradsync.Session.join() as session:
    layout = session.register_layout(parameters=[gradsync.Parameter("weight", (3,))])
    gradient = layout.gradient(0).numpy()
    gradient[:] = session.rank
    layout.mark_ready(1, 0)
    layout.end_step(1)
    layout.wait_step(1)
    print(gradient, "torch" in sys.modules)
"""


def test_two_ranks_train_with_it(environment, daemon):
    folder, _ = environment
    run_id = uuid.uuid4().hex
    ranks = [
        subprocess.Popen(
            [folder / "bin/python", "-c", TRAINER],
            cwd="/",
            stdout=subprocess.PIPE,
            text=True,
            env={
                "RANK": str(rank),
                "WORLD_SIZE": "2",
                "MASTER_ADDR": "127.0.0.1",
                "MASTER_PORT": "1",
                "TORCHELASTIC_RUN_ID": run_id,
                "GRADSYNC_SOCKET": daemon.socket,
            },
        )
        for rank in range(2)
    ]
    assert [rank.communicate(timeout=60)[0] for rank in ranks] == ["[0.5 0.5 0.5] False\n"] * 2


def test_help_exits_with_0_and_wrong_usage_with_2():
    assert "manylinux_2_36_x86_64" in tool("--help").stdout
    for wrong in (["--output"], ["--library", ""], ["here"]):
        used = tool(*wrong)
        assert used.returncode == 2 and "tools/wheel: " in used.stderr
    assert tool("--library", "/nonexistent").returncode == 1
