"""Where the scripts of this folder find gradsync: its daemon, and its Python package."""

from __future__ import annotations

import importlib.util
import os
import pathlib
import shutil
import sys

TREE = pathlib.Path(__file__).resolve().parents[2]


class NotBuilt(Exception):
    """Something of gradsync is nowhere; says what to do."""


def find_daemon(path: str | None) -> str:
    """Path of gradsyncd: `path`, else GRADSYNC_DAEMON, else what Bazel built, else PATH's.

    Raises:
      NotBuilt: it is nowhere, or cannot be executed.
    """
    named = path or os.environ.get("GRADSYNC_DAEMON")
    if named:
        if not os.access(named, os.X_OK) or os.path.isdir(named):
            raise NotBuilt(f"{named} is no program")
        return os.path.abspath(named)
    built = TREE / "bazel-bin" / "daemon" / "gradsyncd"
    if os.access(built, os.X_OK):
        return str(built)
    found = shutil.which("gradsyncd")
    if found is None:
        raise NotBuilt(
            "no gradsyncd: run 'bazel build //daemon:gradsyncd //client:libgradsync.so', or name "
            "one with --daemon"
        )
    return found


def find_beside(daemon: str, path: str) -> str:
    """Path of another program that Bazel built together with that daemon.

    Args:
      daemon: of find_daemon().
      path: below the folder of what Bazel builds.

    Raises:
      NotBuilt: it is not there.
    """
    program = pathlib.Path(daemon).parents[1] / path
    if not os.access(program, os.X_OK):
        folder, _, name = path.rpartition("/")
        raise NotBuilt(f"no {program}: run 'bazel build //{folder}:{name}'")
    return str(program)


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
