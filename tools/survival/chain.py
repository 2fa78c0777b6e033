"""The chain of a training: what every rank had after every step, and how two chains differ."""

from __future__ import annotations

import dataclasses
import os
import pathlib
from collections.abc import Mapping, Sequence
from typing import Optional

# What a link holds, in the order in which differences are named: the cause first.
_HASHES = ("position", "averages", "own", "state")


@dataclasses.dataclass(frozen=True)
class Link:
    """A rank after one complete step.

    Attributes:
      rank: whose.
      incarnation: of its session.
      pid: of its process.
      step: number of the step. One more than the last: the end of the training.
      position: where it was in its data, as "epoch.batch".
      averages: SHA-256 of all averaged gradients.
      own: SHA-256 of what is this rank's alone: its data, its random numbers, its loss.
      state: SHA-256 of parameters, buffers, optimizer and scheduler after the step.
    """

    rank: int
    incarnation: int
    pid: int
    step: int
    position: str
    averages: str
    own: str
    state: str

    def line(self) -> str:
        """As a line of a file."""
        return " ".join(str(value) for value in dataclasses.astuple(self)) + "\n"

    @classmethod
    def of_line(cls, line: str) -> Link:
        """The opposite of line()."""
        rank, incarnation, pid, step, *texts = line.split()
        return cls(int(rank), int(incarnation), int(pid), int(step), *texts)


class ChainWriter:
    """Appends the links of one rank to its file: one write() each, which outlives SIGKILL."""

    def __init__(self, folder: pathlib.Path, rank: int) -> None:
        self._file = os.open(
            folder / f"chain-{rank}", os.O_WRONLY | os.O_APPEND | os.O_CREAT | os.O_CLOEXEC, 0o600
        )

    def add(self, link: Link) -> None:
        """Appends it."""
        os.write(self._file, link.line().encode())


def read_chain(folder: pathlib.Path, ranks: int) -> list[Link]:
    """All links of a training, by rank and in the order in which they were written.

    A line that is being written is left out.
    """
    links = []
    for rank in range(ranks):
        path = folder / f"chain-{rank}"
        if path.exists():
            whole, _, _ = path.read_text().rpartition("\n")
            links += [Link.of_line(line) for line in whole.splitlines()]
    return links


@dataclasses.dataclass(frozen=True)
class Difference:
    """The first one between two chains.

    Attributes:
      rank: whose link differs.
      step: after which step.
      what: which of the hashes, or what is wrong otherwise.
    """

    rank: int
    step: int
    what: str

    def __str__(self) -> str:
        """For people."""
        return f"rank {self.rank}, step {self.step}: {self.what}"


def first_difference(
    wanted: Sequence[Link],
    found: Sequence[Link],
    excused: Mapping[int, Sequence[int]],
    repeated: Mapping[int, Sequence[int]],
) -> Optional[Difference]:
    """Compares every link; None: the chains are equal.

    Args:
      wanted: of the training without faults.
      found: of the training with them.
      excused: for a rank, the steps whose link may be missing: it died between the step's end and
        the link.
      repeated: for a rank, the steps whose link may be there twice: it died after the link, and its
        replacement wrote it again.
    """
    expected = {(link.rank, link.step): link for link in wanted}
    seen: dict[tuple[int, int], Link] = {}
    differences = []
    for link in found:
        key = link.rank, link.step
        other = expected.get(key)
        if other is None:
            differences.append(Difference(*key, "the training without faults has no such step"))
        elif key in seen and link.step not in repeated.get(link.rank, ()):
            differences.append(Difference(*key, f"twice, by pids {seen[key].pid} and {link.pid}"))
        else:
            for name in _HASHES:
                a, b = getattr(other, name), getattr(link, name)
                if a != b:
                    text = f"{name} differ: {a[:16]} without faults, {b[:16]} with them"
                    differences.append(Difference(*key, text))
                    break
        seen[key] = link
    for rank, step in expected:
        if (rank, step) not in seen and step not in excused.get(rank, ()):
            differences.append(Difference(rank, step, "is missing"))
    return min(differences, key=lambda d: (d.step, d.what == "is missing", d.rank), default=None)
