"""What a process and its children have of the kernel's things, counted in /proc."""

from __future__ import annotations

import dataclasses
import os
import pathlib
import re
import statistics
from collections.abc import Sequence

# Between two counts: gRPC's pools and malloc's arenas are not the same each time.
_MEMORY_SHARE = 0.10
_MEMORY_KIB = 16 << 10
_FILES = 4
# Two, and three of a user's gRPC server: it lives 30 s longer than the user's connections.
_THREADS = 5
_MAPPINGS = 40


@dataclasses.dataclass(frozen=True)
class Footprint:
    """A process and its children at one moment: a daemon's children are the engines of its jobs.

    Attributes:
      memory_kib: resident. Memory that several of them share counts in each.
      files: open descriptors.
      threads: of them all.
      mappings: lines of /proc/PID/maps.
      processes: how many they are.
      shared_files: files in /dev/shm, of every process.
    """

    memory_kib: int
    files: int
    threads: int
    mappings: int
    processes: int
    shared_files: int


def footprint_of(pid: int) -> Footprint:
    """Counts now.

    Raises:
      OSError: the process has ended.
    """
    all_of = [_counts(pid)]
    for child in _children(pid):
        try:
            all_of.append(_counts(child))
        except OSError:
            pass  # it has ended meanwhile
    memory_kib, files, threads, mappings = (sum(counts) for counts in zip(*all_of))
    return Footprint(
        memory_kib=memory_kib,
        files=files,
        threads=threads,
        mappings=mappings,
        processes=len(all_of),
        shared_files=len(os.listdir("/dev/shm")),
    )


def _counts(pid: int) -> tuple[int, int, int, int]:
    """Memory in KiB, descriptors, threads, mappings."""
    folder = pathlib.Path("/proc", str(pid))
    status = (folder / "status").read_text()

    def number(name: str) -> int:
        found = re.search(rf"^{name}:\s+(\d+)", status, re.MULTILINE)
        return int(found[1]) if found else 0

    return (
        number("VmRSS"),
        len(os.listdir(folder / "fd")),
        number("Threads"),
        (folder / "maps").read_text().count("\n"),
    )


def _children(pid: int) -> list[int]:
    """Processes that a thread of this one has started."""
    found = []
    for thread in pathlib.Path("/proc", str(pid), "task").iterdir():
        try:
            found += [int(word) for word in (thread / "children").read_text().split()]
        except OSError:
            pass  # the thread has ended meanwhile
    return found


def least_of(one: Footprint, other: Footprint) -> Footprint:
    """The less of each number."""
    return Footprint(*map(min, dataclasses.astuple(one), dataclasses.astuple(other)))


def typical(footprints: Sequence[Footprint]) -> Footprint:
    """What stands for several moments: the median of the memory, the most of all else."""
    most = {
        field.name: max(getattr(one, field.name) for one in footprints)
        for field in dataclasses.fields(Footprint)
    }
    most["memory_kib"] = statistics.median_low(one.memory_kib for one in footprints)
    return Footprint(**most)


def grown(first: Footprint, last: Footprint) -> list[str]:
    """What has grown from one moment to the other, as sentences."""
    most = {
        "memory_kib": int(first.memory_kib * (1 + _MEMORY_SHARE)) + _MEMORY_KIB,
        "files": first.files + _FILES,
        "threads": first.threads + _THREADS,
        "mappings": first.mappings + _MAPPINGS,
        "processes": first.processes,
        "shared_files": first.shared_files,
    }
    return [
        f"{name} has grown from {getattr(first, name)} to {getattr(last, name)}; at most {bound}"
        for name, bound in most.items()
        if getattr(last, name) > bound
    ]
