"""What a wrapped module's steps have given: the last result, its norm, and counters."""

from __future__ import annotations

import torch

import gradsync
from gradsync.torch._buckets import Buckets
from gradsync.torch._clipping import Clipping
from gradsync.torch._outcomes import Outcomes
from gradsync.torch.step_statistics import StepStatistics


class Results:
    """Answers what users ask about a module's steps, and clips gradients by their norm.

    Used on the thread that trains, between backward passes.

    Args:
      buckets: the module's.
      outcomes: of its steps.
    """

    def __init__(self, buckets: Buckets, outcomes: Outcomes) -> None:
        self._buckets = buckets
        self._outcomes = outcomes
        self._verdicts = outcomes.verdicts
        self._clipping = Clipping()

    @property
    def last_step(self) -> gradsync.StepResult | None:
        """The last complete step; None before the first."""
        self._outcomes.settle()
        return self._verdicts.last_result

    @property
    def gradient_norm(self) -> float:
        """L2 norm of the averaged gradients as the last step left them."""
        error = self._outcomes.drop_if_void()
        if error is not None:
            try:
                raise error
            finally:
                del error  # it refers to this frame, which would keep the error alive
        result = self._verdicts.last_result
        if result is None:
            raise RuntimeError(
                "gradsync: there is no gradient norm before the first synchronized step"
            )
        return result.gradient_norm

    def clip(self, max_norm: float, optimizer: torch.optim.Optimizer | None) -> float:
        """As DistributedDataParallel.clip_grad_norm_()."""
        norm = self.gradient_norm
        coefficient = gradsync.clip_coefficient(norm, max_norm)
        self._clipping.scale(self._buckets.slots, coefficient, optimizer)
        return norm

    def drop_scale(self) -> None:
        """Drops an optimizer's scale that no update has used: it must not scale a later step."""
        self._clipping.forget()

    def statistics(self) -> StepStatistics:
        """Counters since the module was wrapped."""
        times = self._verdicts.times
        return StepStatistics(
            steps=times.steps,
            buckets=self._buckets.layout.bucket_count,
            bytes=self._buckets.nbytes,
            backward=times.backward,
            until_first_bucket=times.until_first_bucket,
            exposed=times.exposed,
            rebuilt=self._buckets.rebuilt,
            void=self._verdicts.void,
        )
