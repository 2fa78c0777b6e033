"""What a wrapped module's first steps teach: how often each gradient comes, and in which order."""

from __future__ import annotations

from typing import Any, Mapping, Sequence

import torch

import gradsync
from gradsync.torch._buckets import Buckets
from gradsync.torch._gradients import Slot
from gradsync.torch._state import ModuleState
from gradsync.torch._step import Step


class FirstSteps:
    """Counts each gradient in the first step, and cuts buckets anew in the order that is observed.

    Only a static graph needs the counts. Used on the thread that runs a backward pass.

    Args:
      state: the module's.
      buckets: its parameters' layout; none of its steps has begun yet.
      static_graph: the first step counts how often each gradient comes.

    Attributes:
      counts_known: whether each slot's `expected` is final. Until then a gradient can come again,
        so that no bucket is handed over before the end of the pass.
    """

    def __init__(self, state: ModuleState, buckets: Buckets, static_graph: bool) -> None:
        self.counts_known = not static_graph
        self._state = state
        self._buckets = buckets

    @property
    def over(self) -> bool:
        """Whether buckets and counts are final."""
        return self._buckets.rebuilt and self.counts_known

    def state(self) -> dict[str, Any]:
        """What was learned, for a replacement."""
        expected = {slot.name: slot.expected for slot in self._buckets.slots if slot.expected != 1}
        return {
            "rebuilt": self._buckets.rebuilt,
            "counts_known": self.counts_known,
            "expected": expected,
        }

    def restore(self, state: Mapping[str, Any]) -> None:
        """In a replacement: takes what state() has returned on a survivor."""
        self._buckets.rebuilt = state["rebuilt"]
        self.counts_known = state["counts_known"]
        for slot in self._buckets.slots:
            slot.expected = state["expected"].get(slot.name, 1)

    def learn(self, step: Step) -> Sequence[Slot] | None:
        """The step is complete. Returns the order of its gradients; None if it only counted."""
        if self.counts_known:
            return step.order
        for slot in self._buckets.slots:
            slot.expected = max(1, slot.firings)
        self.counts_known = True
        return None

    def rebuild(self, observed: Sequence[Slot] | None, live_ranks: int) -> None:
        """Cuts buckets anew, in the order of gradients that the lowest live rank observed.

        Args:
          observed: what learn() returned; None changes nothing.
          live_ranks: number of ranks that took part in the step; fewer than all change nothing.
        """
        if observed is None or self._buckets.rebuilt:
            return
        if live_ranks == self._buckets.session.world_size:
            indices = torch.tensor([slot.index for slot in observed], dtype=torch.int32)
            self._state.broadcast([indices], gradsync.LOWEST_LIVE_RANK, "the bucket order")
            self._buckets.rebuild(indices.tolist())
