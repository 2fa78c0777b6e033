"""What a process has of the kernel's things, counted in /proc."""

from __future__ import annotations

import dataclasses
import os
import pathlib
import re

# Between two counts: gRPC's pools and malloc's arenas are not the same each time.
_MEMORY_SHARE = 0.10
_MEMORY_KIB = 16 << 10
_FILES = 4
# Two, and three of a user's gRPC server: it lives 30 s longer than the user's connections.
_THREADS = 5
_MAPPINGS = 40


@dataclasses.dataclass(frozen=True)
class Footprint:
    """One process at one moment.

    Attributes:
      memory_kib: resident, shared memory included.
      files: open descriptors.
      threads: of the process.
      mappings: lines of /proc/PID/maps.
      shared_files: files in /dev/shm, of every process.
    """

    memory_kib: int
    files: int
    threads: int
    mappings: int
    shared_files: int


def footprint_of(pid: int) -> Footprint:
    """Counts now."""
    folder = pathlib.Path("/proc", str(pid))
    status = (folder / "status").read_text()

    def number(name: str) -> int:
        found = re.search(rf"^{name}:\s+(\d+)", status, re.MULTILINE)
        return int(found[1]) if found else 0

    return Footprint(
        memory_kib=number("VmRSS"),
        files=len(os.listdir(folder / "fd")),
        threads=number("Threads"),
        mappings=(folder / "maps").read_text().count("\n"),
        shared_files=len(os.listdir("/dev/shm")),
    )


def grown(first: Footprint, last: Footprint) -> list[str]:
    """What has grown from one moment to the other, as sentences."""
    most = {
        "memory_kib": int(first.memory_kib * (1 + _MEMORY_SHARE)) + _MEMORY_KIB,
        "files": first.files + _FILES,
        "threads": first.threads + _THREADS,
        "mappings": first.mappings + _MAPPINGS,
        "shared_files": first.shared_files,
    }
    return [
        f"{name} has grown from {getattr(first, name)} to {getattr(last, name)}; at most {bound}"
        for name, bound in most.items()
        if getattr(last, name) > bound
    ]
