"""One synchronized backward pass, from its first gradient to its verdict."""

from __future__ import annotations

import time
from typing import Sequence

import torch

import gradsync
from gradsync.torch._gradients import Slot
from gradsync.torch.step_statistics import StepTimes


class Step:
    """One synchronized backward pass: the gradients that have come, and the unused parameters.

    A new step is a new object. Calls come in this order, on the thread of the backward pass:
    `arrive* end commit?`, without commit() for a void step. leave_out(), which says that the step
    is void, can come at any time.

    Attributes:
      number: the step's.
      backward: the backward pass's number, as of backward_id().
      void: why the step is void, if this is known already and only optimizers need it; else None.
      marked: whether a bucket was handed over, where that is watched.
      order: the parameters, in the order in which their gradients came.
      seen: whether the pass came through an output of the module before its first gradient.
      unused: the parameters without a gradient of this rank: none came in this pass, and none was
        accumulated before it. Each has a copy of the gradient that an earlier step left, or None.
    """

    __slots__ = (
        "_began",
        "_ended",
        "_first_bucket",
        "_waiting",
        "backward",
        "marked",
        "number",
        "order",
        "seen",
        "unused",
        "void",
    )

    def __init__(
        self,
        number: int,
        backward: int | None,
        bucket_sizes: Sequence[int],
        void: gradsync.Error | None,
    ) -> None:
        """A pass begins; `bucket_sizes` says how many gradients each bucket has."""
        self.number = number
        self.backward = backward
        self.void = void
        self.marked = False
        self.seen = True
        self.order: list[Slot] = []
        self.unused: list[tuple[Slot, torch.Tensor | None]] = []
        self._waiting = list(bucket_sizes)  # gradients that have not come
        self._began = time.perf_counter()
        self._first_bucket = 0.0
        self._ended = 0.0

    def arrive(self, slot: Slot) -> bool:
        """The gradient of `slot` is written. Returns whether its bucket is complete now."""
        self.order.append(slot)
        waiting = self._waiting[slot.bucket] - 1
        self._waiting[slot.bucket] = waiting
        if waiting:
            return False
        if self._first_bucket == 0.0:
            self._first_bucket = time.perf_counter()
        return True

    def leave_out(self, error: gradsync.Error) -> None:
        """The step is void because of `error`; the pass continues and hands over nothing."""
        self.void = error

    def end(self, slots: Sequence[Slot]) -> None:
        """The pass has ended. A slot without a gradient from it contributes zeros.

        If earlier passes under no_sync() have accumulated a gradient, it contributes that instead.
        """
        self._ended = time.perf_counter()
        if self.void is not None or len(self.order) == len(slots):
            return
        arrived = set(map(id, self.order))
        with torch.no_grad():
            for slot in slots:
                if id(slot) not in arrived:
                    self._contribute(slot)
                    self.order.append(slot)

    def _contribute(self, slot: Slot) -> None:
        gradient = slot.parameter.grad
        if gradient is None:
            slot.view.zero_()
            self.unused.append((slot, None))
            return
        if gradient is not slot.view:
            slot.bring_home()
        if slot.firings == 0 and not slot.accumulated:
            # Left from an earlier step. It stays, to the bit, if no rank used the parameter.
            self.unused.append((slot, slot.view.clone()))

    def used_flags(self, count: int) -> list[bool] | None:
        """For each of `count` parameters whether this rank used it; None: all of them."""
        if not self.unused:
            return None
        flags = [True] * count
        for slot, _ in self.unused:
            flags[slot.index] = False
        return flags

    def commit(self, result: gradsync.StepResult) -> None:
        """The step is complete: gradients of parameters that no rank used are as before."""
        for slot, before in self.unused:
            if result.used is None or result.used[slot.index]:
                slot.parameter.grad = slot.view
            elif before is not None:
                slot.view.copy_(before)

    def times(self) -> StepTimes:
        """How long the step took until now, when its verdict is known or left on the device."""
        return StepTimes(
            steps=1,
            backward=self._ended - self._began,
            until_first_bucket=(self._first_bucket or self._ended) - self._began,
            exposed=time.perf_counter() - self._ended,
        )
