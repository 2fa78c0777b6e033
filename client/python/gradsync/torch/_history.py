"""What this process has trained before: whose state counts when a module is wrapped again.

After a loss every rank joins anew and wraps its module again. A rank that started in between has
no trained state, even if it is rank 0.
"""

from __future__ import annotations

import ctypes
import hashlib
import sys
import weakref
from typing import Any, Sequence

import torch

import gradsync
from gradsync.torch import _session
from gradsync.torch._agreement import check_agreement
from gradsync.torch._gradients import Slot
from gradsync.torch.step_statistics import StepTimes

# The counters of every wrapper that a module has had in this process.
_times: weakref.WeakKeyDictionary[torch.nn.Module, list[StepTimes]] = weakref.WeakKeyDictionary()


def remember(module: torch.nn.Module, times: StepTimes) -> None:
    """Counts the steps in `times`, also those that are still to come, as steps of `module`."""
    _times.setdefault(module, []).append(times)


def root_of(
    session: gradsync.Session, module: torch.nn.Module, timeout: float | None
) -> int | None:
    """The rank with the most complete steps of this module, the lowest of several.

    Args:
      session: every rank of it calls this.
      module: this rank's module; another wrapper may have trained it in this process.
      timeout: seconds to wait for the other ranks; None: 30 min.

    Returns:
      The rank; None if no rank has trained its module.

    Raises:
      gradsync.Error: a rank was lost or did not come.
    """
    steps = torch.zeros(session.world_size, dtype=torch.float64)
    steps[session.rank] = sum(times.steps for times in _times.get(module, []))
    session.all_reduce_address(
        steps.data_ptr(), steps.numel(), gradsync.DataType.FLOAT64, "sum", timeout, owner=steps
    )
    return int(steps.argmax()) if steps.any() else None


class OptimizerCheck:
    """Compares each optimizer's state between the ranks, before its first step.

    Only for modules that some rank has trained before: momentum that one rank lacks would make the
    parameters differ, and nothing else would show it.
    """

    def __init__(self, session: gradsync.Session, slots: Sequence[Slot]) -> None:
        self._session = session
        self._names = {id(slot.parameter): slot.name for slot in slots}
        self._checked: weakref.WeakSet[torch.optim.Optimizer] = weakref.WeakSet()

    def check(self, optimizer: torch.optim.Optimizer) -> None:
        """Checks an optimizer that is about to make a step; once for each.

        Raises:
          ValueError: its state differs; every rank gets the first difference and both ranks.
          gradsync.Error: a rank was lost or did not come.
        """
        if optimizer in self._checked:
            return
        if _is_zero_redundancy(optimizer):
            # It keeps each parameter's state on one rank, in an inner optimizer that steps next.
            zero: Any = optimizer
            self._checked.update((zero, zero.optim))
            return
        if all(group.get("lr") == 0 for group in optimizer.param_groups):
            # It changes no parameter. torch.distributed.checkpoint makes such a step before it
            # loads, on the ranks whose optimizer has no state yet.
            return
        lines = _describe(optimizer, self._names)
        if not lines:
            return  # it has no parameter of this module
        with _session.noting(self._session):
            check_agreement(
                self._session,
                [type(optimizer).__name__, *lines],
                self._session.options.step_timeout,
                subject="optimizers",
                advice="Load the same optimizer state on every rank, for example a checkpoint's, "
                "before the first step after the module is wrapped again.",
            )
        self._checked.add(optimizer)  # not after an error: the next step is refused, too


def _is_zero_redundancy(optimizer: torch.optim.Optimizer) -> bool:
    # Importing it takes most of a second, and a program with this optimizer has imported it.
    module = sys.modules.get("torch.distributed.optim.zero_redundancy_optimizer")
    return module is not None and isinstance(optimizer, module.ZeroRedundancyOptimizer)


def _describe(optimizer: torch.optim.Optimizer, names: dict[int, str]) -> list[str]:
    lines = []
    for group in optimizer.param_groups:
        mine = [p for p in group["params"] if id(p) in names]
        if not mine:
            continue
        options = {k: v for k, v in group.items() if k != "params"}
        lines.append("options " + ", ".join(f"{k}={_value(v)}" for k, v in sorted(options.items())))
        for parameter in mine:
            state = optimizer.state.get(parameter, {})
            values = ", ".join(f"{k} {_value(v)}" for k, v in sorted(state.items()))
            name = names[id(parameter)]
            lines.append(f"state of '{name}': {values}" if state else f"no state of '{name}'")
    return lines


def _value(value: Any) -> str:
    if isinstance(value, torch.Tensor) and value.numel() == 1:
        return repr(value.item())
    if not isinstance(value, torch.Tensor):
        # The text of another object may have its address, which differs between ranks.
        plain = isinstance(value, (bool, int, float, str, tuple, list, type(None)))
        return repr(value) if plain else type(value).__name__
    bits = value.detach().cpu().contiguous().reshape(-1).view(torch.uint8)
    content = (ctypes.c_char * bits.numel()).from_address(bits.data_ptr())
    return "#" + hashlib.sha256(content).hexdigest()[:8]
