"""What a wrapped module's synchronized steps were like."""

from __future__ import annotations

import dataclasses


@dataclasses.dataclass(frozen=True)
class StepStatistics:
    """What a wrapped module's synchronized steps were like.

    Times are sums over the steps, in seconds.

    Attributes:
      steps: synchronized backward passes that were committed.
      buckets: of the layout.
      bytes: of gradients per step and rank.
      backward: from the first gradient of an output to the last gradient of a parameter.
      until_first_bucket: the part of `backward` before the first bucket was ready. Near all of it:
        nothing overlaps, as when the whole module is one torch.compile graph (compile its blocks
        separately).
      exposed: from the end of backward to the commit, which nothing hides. With `device_verdict`
        only what the host spends there: the GPU's streams wait for the commit, and it does not.
      rebuilt: whether the buckets follow the order in which gradients were observed to be ready.
      void: steps whose update was left out, with `device_verdict`.
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
    """The sums that `StepStatistics` shows, in seconds; see there."""

    steps: int = 0
    backward: float = 0.0
    until_first_bucket: float = 0.0
    exposed: float = 0.0

    def add(self, began: float, first_bucket: float, ended: float, committed: float) -> None:
        """A step was committed.

        Args:
          began, first_bucket, ended, committed: when, in seconds of one clock; `first_bucket` is 0
            if no bucket was ready before the end.
        """
        self.steps += 1
        self.backward += ended - began
        self.until_first_bucket += (first_bucket or ended) - began
        self.exposed += committed - ended
