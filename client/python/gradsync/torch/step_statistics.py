"""Counters and times of a wrapped module's steps."""

from __future__ import annotations

import dataclasses


@dataclasses.dataclass(frozen=True)
class StepStatistics:
    """Counters and times of a wrapped module's steps.

    Times are sums over the complete steps, in seconds.

    Attributes:
      steps: number of complete steps.
      buckets: number of buckets of the layout.
      bytes: bytes of all buckets on one rank; with `on_rank_loss="hold"` that includes buffers.
      backward: from the first gradient of an output to the end of the backward pass.
      until_first_bucket: the part of `backward` before the first bucket was ready. If it is nearly
        all of `backward`, nothing overlaps. That is so when the whole module is one torch.compile
        graph: compile its blocks separately.
      exposed: from the end of the backward pass to the verdict; no computation hides this time.
        With `device_verdict` it is only what the host spends: the GPU's streams wait instead.
      rebuilt: whether the buckets follow the order in which gradients were observed to be ready.
      void: with `device_verdict`, number of steps whose update was left out.
    """

    steps: int
    buckets: int
    bytes: int
    backward: float
    until_first_bucket: float
    exposed: float
    rebuilt: bool
    void: int


@dataclasses.dataclass
class StepTimes:
    """The sums that `StepStatistics` shows, in seconds."""

    steps: int = 0
    backward: float = 0.0
    until_first_bucket: float = 0.0
    exposed: float = 0.0

    def add(self, other: StepTimes) -> None:
        """Adds the times of other steps."""
        self.steps += other.steps
        self.backward += other.backward
        self.until_first_bucket += other.until_first_bucket
        self.exposed += other.exposed
