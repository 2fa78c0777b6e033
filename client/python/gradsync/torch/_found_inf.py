"""Steps' verdicts as the `found_inf` of fused optimizers, which their kernels read."""

from __future__ import annotations

import weakref
from typing import Any, Sequence

import torch

from gradsync.torch import _fused_optimizers

# For each optimizer: GradScaler's `found_inf` before the step (None if it set none), and ours.
_Lent = tuple[Any, torch.Tensor]
_lent: weakref.WeakKeyDictionary[torch.optim.Optimizer, _Lent] = weakref.WeakKeyDictionary()


def check(optimizer: torch.optim.Optimizer) -> None:
    """Raises: TypeError: `optimizer` does not take `found_inf`; says what to do."""
    why = _fused_optimizers.refusal(optimizer)
    if why is not None:
        raise TypeError(
            f"gradsync: {type(optimizer).__name__} {why}, but the module was wrapped with "
            "device_verdict=True, and only `found_inf` keeps an update from taking the gradients "
            "of a void step. Build Adam, AdamW, SGD or Adagrad with fused=True, or wrap the module "
            "without device_verdict"
        )


def is_set(optimizer: torch.optim.Optimizer) -> bool:
    """Whether GradScaler has set a `found_inf` for the next step of `optimizer`."""
    return vars(optimizer).get("found_inf") is not None


def lend(optimizer: torch.optim.Optimizer, verdicts: Sequence[torch.Tensor]) -> None:
    """Makes the next step of `optimizer` leave out its update if a verdict is 1 on the device.

    It also leaves out the update if GradScaler says so. Call take_back() after the step.

    Args:
      optimizer: must pass check().
      verdicts: floats without dimensions, on the GPU, one at least.
    """
    theirs = vars(optimizer).get("found_inf")
    found_inf = verdicts[0]
    others = [*verdicts[1:], *([] if theirs is None else [theirs])]
    for other in others:
        found_inf = torch.maximum(found_inf, other.to(found_inf.device, non_blocking=True))
    _lent[optimizer] = theirs, found_inf
    optimizer.found_inf = found_inf  # type: ignore[attr-defined]


def take_back(optimizer: torch.optim.Optimizer) -> None:
    """Restores `optimizer` as it was before lend()."""
    theirs, ours = _lent.pop(optimizer, (None, None))
    if ours is None or vars(optimizer).get("found_inf") is not ours:
        return
    if theirs is None:
        del optimizer.found_inf  # type: ignore[attr-defined]
    else:
        optimizer.found_inf = theirs  # type: ignore[attr-defined]
