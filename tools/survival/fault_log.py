"""What the trainers of one training tell each other and the tool: lines that outlive SIGKILL."""

from __future__ import annotations

import json
import os
import pathlib
import time
from collections.abc import Iterator
from typing import Any

DIES = "dies"  # in the next moment, by the signal of the fault
ARRIVED = "arrived"  # at the place of a fault, and waits for those that die at the same moment
TOUCHED = "touched"  # a rank that reads its state for a replacement has come to the guarded page
FACT = "fact"  # anything else worth keeping


class FaultLog:
    """A file to which every process of a training appends whole lines. One thread each.

    A line is one write() to a file that is open for appending. The kernel has it then, so it stays
    although the writer is killed in the next moment.
    """

    def __init__(self, path: pathlib.Path) -> None:
        """Opens it; makes it if it is new."""
        self._file = os.open(path, os.O_RDWR | os.O_APPEND | os.O_CREAT | os.O_CLOEXEC, 0o600)
        self._read = 0
        self._rest = b""
        self._lines: list[dict[str, Any]] = []

    def close(self) -> None:
        """Afterwards lines() returns what it returned before."""
        os.close(self._file)
        self._file = -1

    def say(self, event: str, **facts: Any) -> None:
        """Appends a line with the time."""
        line = {
            "event": event,
            "pid": os.getpid(),
            "unix_ns": time.time_ns(),
            "ns": time.monotonic_ns(),
            **facts,
        }
        os.write(self._file, json.dumps(line).encode() + b"\n")

    def lines(self) -> list[dict[str, Any]]:
        """Every line so far, in order."""
        while self._file >= 0 and (data := os.pread(self._file, 1 << 16, self._read)):
            self._read += len(data)
            *whole, self._rest = (self._rest + data).split(b"\n")
            self._lines += map(json.loads, whole)
        return self._lines

    def of(self, event: str) -> Iterator[dict[str, Any]]:
        """The lines of one kind, in order."""
        return (line for line in self.lines() if line["event"] == event)

    def dead(self) -> set[int]:
        """The numbers of the faults that have happened."""
        return {line["fault"] for line in self.of(DIES)}

    def reduced_in(self, step: int) -> int:
        """1 if a rank that died in this step had seen a reduced bucket, which stays so; else 0."""
        return max((line["reduced"] for line in self.of(DIES) if line["step"] == step), default=0)
