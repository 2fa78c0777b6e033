"""Runs the README's example."""

import pathlib
import re
import subprocess
import sys

from ranks import run_ranks

README = pathlib.Path(__file__).parents[1] / "README.md"


def run_example():
    (example,) = re.findall(r"```python\n(.*?)```", README.read_text(), re.DOTALL)[:1]
    assert len(example.splitlines()) <= 16
    package = str(README.parent)
    return subprocess.run(
        [sys.executable, "-c", f"import sys; sys.path.insert(0, {package!r})\n{example}"],
        capture_output=True,
        text=True,
        check=False,
    )


def test_the_example_runs_as_it_is(daemon):
    for rank, run in enumerate(run_ranks(run_example, 2)):
        assert (run.stdout, run.returncode) == (f"rank {rank}: y = 3.000 x + 2.000\n", 0), run
