"""A wheel of what is built, made by tools/wheel."""

import atexit
import functools
import os
import pathlib
import re
import shutil
import subprocess
import tempfile

# Under Bazel this folder has links to the tree's files; otherwise it is the tree.
_TREE = pathlib.Path(__file__).parents[3]


def wheel_tool(*arguments):
    """Runs tools/wheel; returns its subprocess.CompletedProcess."""
    return subprocess.run(
        [_TREE / "tools/wheel", *arguments], capture_output=True, text=True, timeout=300
    )


@functools.cache
def built_wheel():
    """Makes the wheel, once for all tests of this process; returns its path."""
    folder = tempfile.mkdtemp()
    atexit.register(shutil.rmtree, folder)
    library = os.environ.get("GRADSYNC_LIBRARY")
    programs = pathlib.Path(library).parents[1] if library else _TREE / "bazel-bin"
    made = wheel_tool("--programs", programs, "--output", folder)
    assert made.returncode == 0, made.stderr
    (wheel,) = pathlib.Path(folder).iterdir()
    assert re.fullmatch(re.escape(str(wheel)) + r" \(\d+\.\d MB\)\n", made.stdout)
    return wheel
