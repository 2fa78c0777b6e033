"""What a run measured, and whether it is right."""

from __future__ import annotations

import array
import dataclasses
import math
import pathlib
import statistics
from collections.abc import Sequence
from typing import Any

LEAST_ACCURACY = 96.0  # percent
LARGEST_WHOLE_DIFFERENCE = 1e-5
# Differences of step times below this are noise.
_LEAST_GAIN = 0.05


@dataclasses.dataclass
class Figures:
    """The figures of --json.

    Attributes:
      ranks: on all nodes.
      test_accuracy: percent.
      max_difference_sharded: of the final parameters from those of one process that adds the same
        shards in the order of ranks and nodes.
      max_difference_whole: from those of one process that computes whole batches.
      bytes_reduced: of the gradients of one rank.
      reduce_gbps: 10^9 bytes per second.
      step_ms: median over all ranks; step_ms_without_overlap likewise.
      unequal_ranks: whose parameters are not those of rank 0.
    """

    nodes: int
    ranks: int
    rate: str = ""
    test_accuracy: float = math.nan
    max_difference_sharded: float = math.nan
    max_difference_whole: float = math.nan
    steps: int = 0
    bytes_reduced: int = 0
    reduce_gbps: float = 0
    overlap_percent: float = 0
    step_ms: float = 0
    step_ms_without_overlap: float = 0
    unequal_ranks: list[int] = dataclasses.field(default_factory=list)

    def failures(self) -> list[str]:
        """What is wrong, in words. NaN is always wrong."""
        failures = []
        if not self.test_accuracy >= LEAST_ACCURACY:
            failures.append(
                f"the test accuracy is {self.test_accuracy:.2f} %, below {LEAST_ACCURACY:g} %"
            )
        if self.max_difference_sharded != 0:
            failures.append(
                f"the parameters differ by {self.max_difference_sharded:g} from those of one "
                "process that adds the same shards in the same order; they have to be equal bit "
                "by bit"
            )
        if not self.max_difference_whole <= LARGEST_WHOLE_DIFFERENCE:
            failures.append(
                f"the parameters differ by {self.max_difference_whole:g} from those of one process "
                f"on the whole batches, more than {LARGEST_WHOLE_DIFFERENCE:g}"
            )
        if self.unequal_ranks:
            ranks = ", ".join(map(str, self.unequal_ranks))
            failures.append(f"the parameters of rank {ranks} are not those of rank 0")
        return failures

    def json(self) -> dict[str, Any]:
        """Every figure by its name, and "failures"."""
        return {**dataclasses.asdict(self), "failures": self.failures()}


def largest_difference(first: pathlib.Path, second: pathlib.Path) -> float:
    """Between two files of float32; infinite if their sizes differ or a value is not a number."""
    a, b = array.array("f", first.read_bytes()), array.array("f", second.read_bytes())
    if len(a) != len(b) or not a:
        return math.inf
    differences = [abs(x - y) for x, y in zip(a, b)]
    return math.inf if any(map(math.isnan, differences)) else max(differences)


def overlap(step: dict[str, Any]) -> float:
    """The part of one step's synchronization that the backward pass hides, 0 to 1.

    Args:
      step: of `gradsyncctl timeline --json`.

    The synchronization of a bucket is the time from its last rank's ready to its end. The part
    between the last ready of all and the commit is not hidden.
    """
    buckets = [
        (max(map(int, bucket["ready_ns"])), int(bucket["finish_ns"])) for bucket in step["buckets"]
    ]
    synchronization = sum(max(0, finish - ready) for ready, finish in buckets)
    exposed = int(step["commit_ns"]) - max(ready for ready, _ in buckets)
    return max(0.0, 1 - exposed / synchronization) if synchronization else 0.0


def typical_step(steps: Sequence[dict[str, Any]]) -> dict[str, Any]:
    """The step whose length and overlap are nearest to the medians."""

    def length(step: dict[str, Any]) -> int:
        ready = [int(ns) for bucket in step["buckets"] for ns in bucket["ready_ns"]]
        return int(step["commit_ns"]) - min(ready)

    usual_length = statistics.median(map(length, steps))
    usual_overlap = statistics.median(map(overlap, steps))

    def oddity(step: dict[str, Any]) -> float:
        return abs(length(step) / usual_length - 1) + abs(overlap(step) - usual_overlap)

    return min(steps, key=oddity)


def what_overlap_gains(figures: Figures, link_ms: float, cpus: int) -> str:
    """One sentence, and a reason if it gains nothing.

    Args:
      figures: of the run.
      link_ms: how long a link needs for the gradients of a step; 0: links are as fast as memory.
      cpus: of this machine.
    """
    on, off = figures.step_ms, figures.step_ms_without_overlap
    link = f" (the link alone: {link_ms:.1f} ms)" if link_ms else ""
    if off > on * (1 + _LEAST_GAIN):
        return (
            f"Overlap makes a step {off / on:.2f} times as fast: {on:.2f} ms instead of "
            f"{off:.2f} ms{link}."
        )
    text = f"Overlap gains nothing here: {on:.2f} ms with it, {off:.2f} ms without it{link}."
    if figures.ranks >= cpus:
        text += f"\n{figures.ranks} trainers keep the {cpus} CPUs busy, which averaging needs too."
        if not link_ms:
            text += " To see a gain: --nodes 2 --rate 1gbit."
    return text
