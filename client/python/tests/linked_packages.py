"""Packages that are installed here, in another virtual environment: pip's index cannot be asked."""

import importlib.metadata
import pathlib

from packaging.requirements import Requirement


def link(names, packages):
    """Links to these packages and to all that they require, and to nothing else.

    Args:
      names: as pip takes them.
      packages: the other environment's site-packages.
    """
    left = list(names)
    linked = set()
    while left:
        requirement = Requirement(left.pop())
        if requirement.name in linked or not _holds(requirement):
            continue
        linked.add(requirement.name)
        distribution = importlib.metadata.distribution(requirement.name)
        left += distribution.requires or ()
        for top in {file.parts[0] for file in distribution.files} - {"..", "__pycache__"}:
            (packages / top).symlink_to(pathlib.Path(distribution.locate_file(top)).resolve())


def _holds(requirement):
    return requirement.marker is None or requirement.marker.evaluate({"extra": ""})
