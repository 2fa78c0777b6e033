"""What wrapped modules have to do with an optimizer's step: their gradients must be averages."""

from __future__ import annotations

import functools
import weakref
from typing import Any

import torch

from gradsync.torch import _found_inf, _hooks, _live

# Optimizers that have made a step. The first one shall not be left out on the device: the momentum
# of SGD would begin as whatever its memory held.
_begun: weakref.WeakSet[torch.optim.Optimizer] = weakref.WeakSet()


def _before(optimizer: Any, *_: Any) -> None:
    _found_inf.take_back(optimizer)  # of a step that raised
    scaled = _found_inf.is_set(optimizer)
    verdicts = []
    for synchronizer in _live.all_live():
        # Drops gradients that a backward pass left half averaged when it died.
        synchronizer.abandon_stale("its backward pass did not finish")
        if synchronizer.device_verdict and synchronizer.trains(optimizer):
            _found_inf.check(optimizer)
            if synchronizer.followed is not None and scaled:
                synchronizer.followed.scaled = True
            if optimizer not in _begun:
                synchronizer.drop_if_void()
            if synchronizer.followed is not None:
                verdicts.append(synchronizer.followed.verdict)
    _begun.add(optimizer)
    if verdicts:
        _found_inf.lend(optimizer, verdicts)


def _after(optimizer: Any, *_: Any) -> None:
    _found_inf.take_back(optimizer)


@functools.lru_cache(maxsize=None)  # once
def watch() -> None:
    """From now on, for every optimizer; before PyTorch 2.0, which has no such hooks, for none."""
    _hooks.around_optimizer_steps(_before, _after)
