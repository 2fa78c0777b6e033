"""What wrapped modules have to do with an optimizer's step: their gradients must be averages."""

from __future__ import annotations

import functools
from typing import Any

from gradsync.torch import _found_inf, _hooks, _live


def _before(optimizer: Any, *_: Any) -> None:
    followed = []
    for synchronizer in _live.all_live():
        # Drops gradients that a backward pass left half averaged when it died.
        synchronizer.abandon_stale("its backward pass did not finish")
        if synchronizer.device_verdict and synchronizer.trains(optimizer):
            _found_inf.check(optimizer)
            if synchronizer.followed is not None:
                followed.append(synchronizer.followed)
    if followed and _found_inf.lend(optimizer, [step.verdict for step in followed]):
        for step in followed:
            step.scaled = True


def _after(optimizer: Any, *_: Any) -> None:
    _found_inf.take_back(optimizer)


@functools.lru_cache(maxsize=None)  # once
def watch() -> None:
    """From now on, for every optimizer; before PyTorch 2.0, which has no such hooks, for none."""
    _hooks.around_optimizer_steps(_before, _after)
