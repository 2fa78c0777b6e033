"""From `pip install` to averaged gradients in two commands."""

import pathlib
import re
import shutil
import time

from bare_system import wheel_of_installed
from built_wheel import built_wheel

_README = pathlib.Path(__file__).parents[1] / "README.md"


def _provide(system):
    """Puts a virtual environment, a script, and two wheels instead of PyPI into the system."""
    wheels = system.root / "wheels"
    wheels.mkdir()
    shutil.copy(built_wheel(), wheels)
    wheel_of_installed("numpy", wheels)
    (script,) = re.findall(r"```python\n(.*?)```", _README.read_text(), re.DOTALL)[:1]
    (system.home / "train.py").write_text(script)
    made = system.run("python3", "-m", "venv", "env")
    assert made.returncode == 0, made.stdout + made.stderr


def _train_by_two_commands(system):
    """Returns the seconds that the two commands take."""
    begin = time.monotonic()
    words = "install --no-index --find-links=/wheels gradsync"
    installed = system.run("env/bin/pip", *words.split())
    assert installed.returncode == 0, installed.stdout + installed.stderr
    words = "-m gradsync.run --nproc-per-node 2 train.py"
    trained = system.run("env/bin/python", *words.split())
    took = time.monotonic() - begin
    assert trained.returncode == 0, trained.stdout + trained.stderr
    assert sorted(trained.stdout.splitlines()) == [
        f"rank {rank} | rank {rank}: y = 3.000 x + 2.000" for rank in range(2)
    ]
    assert list((system.root / "tmp").iterdir()) == []
    return took


def check(system):
    """Tries them as an ordinary user of a system that has nothing but Python."""
    programs = {path.name for path in (system.root / "usr/bin").iterdir()}
    assert "python3" in programs and not {"cc", "gcc", "g++", "clang", "ld"} & programs
    assert not list(system.root.rglob("libgrpc*")) + list(system.root.rglob("libprotobuf*"))
    _provide(system)
    took = _train_by_two_commands(system)
    print(f"{took:.1f} s")
    assert took < 60
    for command in ("gradsyncd", "gradsyncctl"):
        shown = system.run(f"env/bin/{command}", "--version")
        assert shown.returncode == 0 and shown.stdout.startswith(command + " "), shown.stderr
    # Without a socket of its own an ordinary user's daemon says what to do.
    refused = system.run("env/bin/gradsyncd")
    assert refused.returncode == 1
    assert "/run/gradsync/gradsyncd.sock does not exist" in refused.stderr
