"""Finds gradsyncd and gradsyncctl, and runs them as commands of this package."""

from __future__ import annotations

import os
import pathlib
import sys
from typing import NoReturn

# In the source tree.
_BUILT = {"gradsyncd": "daemon/gradsyncd", "gradsyncctl": "tools/gradsyncctl/gradsyncctl"}


def find(name: str) -> str:
    """Path of a program: in the package, else in the source tree.

    Args:
      name: "gradsyncd" or "gradsyncctl".

    Raises:
      FileNotFoundError: it is in neither place.
    """
    package = pathlib.Path(__file__).parent
    candidates = [package / "bin" / name]
    if len(package.parents) > 2:
        candidates.append(package.parents[2] / "bazel-bin" / _BUILT[name])
    for candidate in candidates:
        if candidate.exists():
            return str(candidate)
    raise FileNotFoundError(
        f"gradsync finds no {name}: install the wheel that tools/wheel makes; looked for "
        + " and ".join(map(str, candidates))
    )


def gradsyncd() -> NoReturn:
    """The command gradsyncd."""
    _become("gradsyncd")


def gradsyncctl() -> NoReturn:
    """The command gradsyncctl."""
    _become("gradsyncctl")


def _become(name: str) -> NoReturn:
    try:
        os.execv(find(name), [name, *sys.argv[1:]])
    except OSError as error:
        sys.exit(str(error))
