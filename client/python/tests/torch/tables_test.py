"""The tables in the tests' README.md name tests that exist, and how many there are."""

import fnmatch
import functools
import importlib
import pathlib
import re
import sys

HERE = pathlib.Path(__file__).parent
README = HERE.parent / "README.md"


def file_of(word):
    """The name of a file of tests, if a word of the tables means one."""
    file = {"unused": "unused_parameters"}.get(word, word) + "_test"
    return file if any((folder / f"{file}.py").exists() for folder in (HERE, HERE.parent)) else None


@functools.cache
def names_in(file):
    """Its trials, and the tests of pytest."""
    members = vars(importlib.import_module(file)).items()
    return {n for n, member in members if hasattr(member, "wrappers") or n.startswith("test_")}


def test_every_test_in_the_tables_exists(monkeypatch):
    monkeypatch.setattr(sys, "path", [str(HERE), str(HERE.parent), *sys.path])
    sections = re.split(r"^### ", README.read_text(), flags=re.M)
    (tables,) = [s for s in sections if s.startswith("PyTorch's own tests of its wrapper")]
    (more,) = [s for s in sections if s.startswith("What PyTorch's tests lack")]
    missing, checked = [], 0
    for line in re.findall(r"^\|.*\|$", tables + more, flags=re.M):
        file = None
        cell = line.strip("|").split("|")[-1]
        for name, word, count in re.findall(r"`([^`]+)`|(\w+)(?: \((\d+) trials)?", cell):
            if word:
                file = file_of(word) or file
                if count and int(count) != sum(not n.startswith("test") for n in names_in(file)):
                    missing.append(f"{count} trials in {file}")
            elif re.fullmatch(r"[a-z0-9_*]+", name):
                checked += 1
                if file is None or not fnmatch.filter(names_in(file), name):
                    missing.append(f"{name} in {file}")
    assert not missing
    assert checked > 100
