"""Hooks that a wrapper gives to autograd. They do not keep the wrapper alive."""

from __future__ import annotations

import weakref
from typing import Any, Protocol, Sequence

import torch

from gradsync.torch import _autograd
from gradsync.torch._gradients import Slot


class Steps(Protocol):
    """What the hooks call: a synchronizer."""

    @property
    def slots(self) -> Sequence[Slot]:
        """The parameters."""

    @property
    def averages_later(self) -> bool:
        """Whether a gradient that comes now is to be averaged."""

    def begin_step(self) -> None:
        """A backward pass whose gradients are to be averaged is at an output of the module."""

    def on_gradient(self, slot: Slot) -> None:
        """Autograd has added to the gradient of `slot`."""


class GradientHook:
    """Called by autograd each time it has added to the gradient of one parameter."""

    __slots__ = ("_slot", "_steps")

    def __init__(self, steps: weakref.ref[Steps], slot: Slot) -> None:
        self._steps = steps
        self._slot = slot

    def __call__(self, _: torch.Tensor) -> None:
        steps = self._steps()
        if steps is not None:
            steps.on_gradient(self._slot)


class BeginHook:
    """Called when a backward pass is at an output of the module: begins a step."""

    __slots__ = ("_steps",)

    def __init__(self, steps: weakref.ref[Steps]) -> None:
        self._steps = steps

    def __call__(self, output_node: Any, synchronize: bool) -> bool:
        """Begins a step if `synchronize`, and if the pass adds to gradients; returns the latter."""
        steps = self._steps()
        if steps is None:
            return False
        nodes = (slot.node for slot in reversed(steps.slots))
        if not _autograd.reaches_gradients(output_node, nodes):
            return False
        if synchronize:
            steps.begin_step()
        return True


def remove(handles: Sequence[Any]) -> None:
    """Removes hooks by their handles."""
    for handle in handles:
        handle.remove()
