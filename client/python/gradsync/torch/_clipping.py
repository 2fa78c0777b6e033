"""Scaling averaged gradients: by a fused optimizer while it reads them, or in a separate pass."""

from __future__ import annotations

import math
import weakref
from typing import Any, Iterable, Sequence

import torch

from gradsync.torch import _fused_optimizers
from gradsync.torch._gradients import Slot


class Clipping:
    """Scales one wrapped module's gradients. Used on the thread that trains."""

    def __init__(self) -> None:
        """No optimizer has a scale yet."""
        self._scale_of: tuple[weakref.ref[torch.optim.Optimizer], _NextStepScale] | None = None

    def scale(
        self,
        slots: Sequence[Slot],
        coefficient: float,
        optimizer: torch.optim.Optimizer | None,
    ) -> None:
        """Multiplies the gradients by `coefficient`.

        Args:
          slots: the parameters.
          coefficient: 1 leaves the gradients as they are.
          optimizer: multiplies in its next step, if it is fused and has exactly these parameters.
        """
        self.forget()
        if coefficient == 1.0:
            return
        parameters = [slot.parameter for slot in slots]
        if optimizer is not None and _takes_scale(optimizer, parameters, coefficient):
            if self._scale_of is None or self._scale_of[0]() is not optimizer:
                self._scale_of = weakref.ref(optimizer), _NextStepScale(optimizer)
            self._scale_of[1].set(coefficient)
            return
        with torch.no_grad():
            gradients = [slot.view for slot in slots if slot.parameter.grad is slot.view]
            if gradients:
                torch._foreach_mul_(gradients, coefficient)

    def forget(self) -> None:
        """Drops a scale that no optimizer's step has used: it must not scale a later step."""
        if self._scale_of is not None:
            self._scale_of[1].clear()


class _NextStepScale:
    """Makes one fused optimizer multiply gradients by a number in its next step only.

    Sets its attribute `grad_scale`, by which it divides gradients. Used on the thread that trains.
    """

    def __init__(self, optimizer: torch.optim.Optimizer) -> None:
        """Adds hooks to `optimizer` for its whole life; _takes_scale() must be true of it."""
        self._optimizer = weakref.ref(optimizer)
        self._scale: torch.Tensor | None = None
        optimizer.register_step_pre_hook(self._before)
        optimizer.register_step_post_hook(self._after)

    def set(self, coefficient: float) -> None:
        """The next step multiplies by `coefficient`; a number that was set before is dropped."""
        optimizer: Any = self._optimizer()
        self.clear()
        self._scale = optimizer.grad_scale = torch.tensor(1.0 / coefficient)
        optimizer.found_inf = torch.zeros(())

    def clear(self) -> None:
        """Takes the scale away: the optimizer's next step does not multiply its gradients."""
        optimizer = self._optimizer()
        if optimizer is not None and vars(optimizer).get("grad_scale") is self._scale is not None:
            del optimizer.grad_scale, optimizer.found_inf  # type: ignore[attr-defined]
        self._scale = None

    def _before(self, optimizer: Any, *_: Any) -> None:
        if self._scale is not None and vars(optimizer).get("grad_scale") is not self._scale:
            self._scale = None
            raise RuntimeError(
                "gradsync: clip_grad_norm_() was given an optimizer whose steps GradScaler scales; "
                "call scaler.unscale_(optimizer) first, and clip_grad_norm_() without the optimizer"
            )

    def _after(self, *_: Any) -> None:
        self.clear()


def _takes_scale(
    optimizer: torch.optim.Optimizer, parameters: Iterable[torch.Tensor], coefficient: float
) -> bool:
    """Whether `optimizer` is fused, has exactly these parameters and can divide by the scale."""
    if coefficient <= 0 or not math.isfinite(coefficient):
        return False
    mine = {id(parameter) for parameter in parameters}
    theirs = {id(parameter) for group in optimizer.param_groups for parameter in group["params"]}
    return theirs == mine and _fused_optimizers.refusal(optimizer) is None
