"""Undoes one line of the product after the other, and checks that a test fails each time.

For the scripts beside it that have a list of mutations; see their --help.
"""

import argparse
import os
import queue
import re
import subprocess
import tempfile
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import NamedTuple

FLAGS = (
    "--config=opt",
    "--spawn_strategy=local",
    "--nocache_test_results",
    "--test_env=GTEST_FAIL_FAST=1",
    "--test_output=all",
)
# Only what the tree as it is needs comes from the disk cache and goes into it.
NO_CACHE = "--disk_cache="
NOT_ONCE = "NOT IN THE TREE, OR NOT ONCE"


class Mutation(NamedTuple):
    """`line` occurs in `file` once. With `instead` in its place, a case of `test` fails."""

    name: str
    file: str
    line: str
    instead: str = ""
    # A target of Bazel; after a space, the filter of its cases.
    test: str = ""


class Copy:
    """A copy of the committed tree, and what Bazel has built of it. For one thread at a time."""

    def __init__(self, tree: Path, folder: Path) -> None:
        self._tree = folder / "gradsync"
        self._bazel = ("bazel", f"--output_base={folder}/output", "--max_idle_secs=60")
        subprocess.run(["git", "clone", "-q", "--shared", tree, self._tree], check=True)
        (self._tree / ".venv").symlink_to(tree / ".venv")

    def test(self, test: str, timeout_s: int, *flags: str) -> str:
        """The first case of a Mutation.test that fails; "" if all pass."""
        target, _, cases = test.partition(" ")
        # An empty filter would leave out all cases.
        some = (f"--test_filter={cases}",) if cases else ()
        run = self._run("test", *FLAGS, f"--test_timeout={timeout_s}", *some, *flags, target)
        if run.returncode == 0:
            return ""
        if run.returncode != 3:  # 3: a test has failed, 1: the build
            return "DOES NOT BUILD" if run.returncode == 1 else f"BAZEL ENDS {run.returncode}"
        failed = re.findall(r"^\[  FAILED  \] ([^\s,]+)", run.stdout, re.MULTILINE)
        if failed:
            return failed[0]
        begun = re.findall(r"^\[ RUN      \] (\S+)", run.stdout, re.MULTILINE)
        return f"{begun[-1] if begun else target} crashes or hangs"

    def outcome(self, mutation: Mutation, timeout_s: int) -> str:
        """The first test that fails after the mutation, or what is wrong in capitals."""
        file = self._tree / mutation.file
        text = file.read_text()
        if text.count(mutation.line) != 1:
            return NOT_ONCE
        file.write_text(text.replace(mutation.line, mutation.instead, 1))
        result = self.test(mutation.test, timeout_s, NO_CACHE)
        file.write_text(text)
        return result or "NO TEST FAILS"

    def remove(self) -> None:
        """Removes what Bazel has built, which is read-only in part."""
        self._run("clean", "--expunge")

    def _run(self, *arguments: str) -> subprocess.CompletedProcess[str]:
        return subprocess.run(
            [*self._bazel, *arguments],
            cwd=self._tree,
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
            errors="replace",
        )


def check(tree: Path, chosen: list[Mutation]) -> int:
    bad = [m for m in chosen if (tree / m.file).read_text().count(m.line) != 1]
    for mutation in bad:
        print(f"{mutation.file}: {mutation.name:50}  {NOT_ONCE}")
    return 1 if bad else 0


def run(tree: Path, chosen: list[Mutation], timeout_s: int) -> int:
    tests = dict.fromkeys(mutation.test for mutation in chosen)  # each once, in order
    bad = 0
    with tempfile.TemporaryDirectory(prefix="gradsync-mutations-") as folder:
        copies = [Copy(tree, Path(folder) / str(i)) for i in range(os.cpu_count() or 1)]
        idle: queue.SimpleQueue[Copy] = queue.SimpleQueue()

        def outcome(mutation: Mutation) -> str:
            copy = idle.get()
            try:
                return copy.outcome(mutation, timeout_s)
            finally:
                idle.put(copy)

        try:
            for copy in copies:
                for test in tests:
                    failing = copy.test(test, timeout_s)
                    print(f"{'the tree as it is: ' + test:50}  {failing or 'passes'}", flush=True)
                    if failing:
                        return 1
                idle.put(copy)
            with ThreadPoolExecutor(len(copies)) as pool:
                for mutation, result in zip(chosen, pool.map(outcome, chosen)):
                    bad += result.isupper()
                    print(f"{mutation.name:50}  {result}", flush=True)
        finally:
            for copy in copies:
                copy.remove()
    return 1 if bad else 0


def main(help_text: str | None, mutations: Sequence[Mutation], timeout_s: int) -> int:
    """Runs the script whose docstring is `help_text`. `timeout_s`: of one test."""
    parser = argparse.ArgumentParser(
        description=help_text, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--check", action="store_true")
    parser.add_argument("words", nargs="*", metavar="WORD")
    options = parser.parse_args()
    words = options.words
    chosen = [
        m for m in mutations if not words or any(word in m.name or word in m.file for word in words)
    ]
    tree = Path(__file__).resolve().parents[2]
    return check(tree, chosen) if options.check else run(tree, chosen, timeout_s)
