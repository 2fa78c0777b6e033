"""What wrapped modules do around an optimizer's step: its gradients must be averages."""

from __future__ import annotations

import functools
import weakref
from typing import Any

import torch
from torch.optim.optimizer import (
    register_optimizer_step_post_hook,
    register_optimizer_step_pre_hook,
)

from gradsync.torch import _found_inf, _live

# Optimizers that have made a step. The first step must not be left out on the device: SGD's
# momentum would keep what its new memory happened to hold.
_begun: weakref.WeakSet[torch.optim.Optimizer] = weakref.WeakSet()


def _before(optimizer: Any, *_: Any) -> None:
    _found_inf.take_back(optimizer)  # if the last step raised an exception
    scaled = _found_inf.is_set(optimizer)
    verdicts = []
    for synchronizer in _live.all_live():
        synchronizer.before_update(optimizer)
        if synchronizer.device_verdict and synchronizer.trains(optimizer):
            _found_inf.check(optimizer)
            outcomes = synchronizer.outcomes
            if outcomes.followed is not None and scaled:
                outcomes.followed.scaled = True
            if optimizer not in _begun:
                outcomes.drop_if_void()
            if outcomes.followed is not None:
                verdicts.append(outcomes.followed.verdict)
    _begun.add(optimizer)
    if verdicts:
        _found_inf.lend(optimizer, verdicts)


def _after(optimizer: Any, *_: Any) -> None:
    _found_inf.take_back(optimizer)


@functools.lru_cache(maxsize=None)  # once
def watch() -> None:
    """Watches every optimizer's step from now on. A step that raises does not call `_after`."""
    register_optimizer_step_pre_hook(_before)
    register_optimizer_step_post_hook(_after)
