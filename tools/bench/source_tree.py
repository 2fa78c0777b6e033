"""Where the benches find gradsync: its programs, and its Python package."""

from __future__ import annotations

import importlib
import importlib.util
import os
import pathlib
import shutil
import sys
from typing import Optional

TREE = pathlib.Path(__file__).resolve().parents[2]


class NotBuilt(Exception):
    """A part of gradsync is missing; the text says what to do."""


def find_program(path: str) -> str:
    """Absolute path of a program.

    Searched for beside the running script as Bazel places both, beside $GRADSYNC_DAEMON, in
    bazel-bin, in the folder bin of a GPU bundle, and in $PATH.

    Args:
      path: below the folder of what Bazel builds.

    Raises:
      NotBuilt: it is not there.
    """
    roots = [pathlib.Path(os.path.dirname(os.path.abspath(sys.argv[0])), "..", "..")]
    if "GRADSYNC_DAEMON" in os.environ:
        roots.append(pathlib.Path(os.environ["GRADSYNC_DAEMON"]).parents[1])
    roots.append(TREE / "bazel-bin")
    folder, _, name = path.rpartition("/")
    bundle = pathlib.Path(__file__).resolve().parents[1] / "bin" / name
    for candidate in [*(root / path for root in roots), bundle]:
        if os.access(candidate, os.X_OK):
            return os.path.normpath(candidate)
    found = shutil.which(name)
    if found is None:
        raise NotBuilt(f"no {name}: run 'bazel build //{folder}:{name}'")
    return found


def find_daemon(path: Optional[str]) -> str:
    """Path of gradsyncd: `path`, else $GRADSYNC_DAEMON, else as find_program().

    Raises:
      NotBuilt: it is not there, or cannot be executed.
    """
    named = path or os.environ.get("GRADSYNC_DAEMON")
    if named is None:
        return find_program("daemon/gradsyncd")
    if not os.access(named, os.X_OK) or os.path.isdir(named):
        raise NotBuilt(f"{named} is no program")
    return os.path.abspath(named)


def make_importable() -> None:
    """Makes `import gradsync` find this tree's package, unless one is installed.

    Raises:
      NotBuilt: there is no package, or PyTorch or libgradsync.so is missing.
    """
    if importlib.util.find_spec("torch") is None:
        raise NotBuilt(
            f"{sys.executable} has no PyTorch: run 'tools/setup --test' and then this script with "
            f"{TREE}/.venv/bin/python"
        )
    if importlib.util.find_spec("gradsync") is None:
        sys.path.insert(0, str(TREE / "client" / "python"))
    try:
        importlib.import_module("gradsync")
    except ImportError as error:
        raise NotBuilt(str(error)) from error
