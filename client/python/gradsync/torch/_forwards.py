"""A module's forward passes: they tell whether a backward pass is a step or only accumulates."""

from __future__ import annotations

import weakref
from typing import Any, Callable, Iterable

import torch

from gradsync.torch import _autograd


class _Forward:
    """One forward pass. Its outputs' hooks hold it, so it lives as long as its graph."""

    __slots__ = ("__weakref__", "begin", "seen", "synchronize")

    def __init__(self, synchronize: bool, begin: Callable[[Any, bool], bool]) -> None:
        self.synchronize = synchronize
        self.begin = begin
        self.seen = False  # whether a backward pass came through it


class _OutputHook:
    """A hook of an output. It holds the tensor's node: to hold the tensor would keep it alive."""

    __slots__ = ("forward", "forwards", "node")

    def __init__(self, forwards: Forwards, forward: _Forward, node: Any) -> None:
        self.forwards = forwards
        self.forward = forward
        self.node = node

    def __call__(self, gradient: torch.Tensor) -> None:
        if self.forward.begin(self.node, self.forward.synchronize):
            self.forward.seen = True
            if not self.forward.synchronize:
                self.forwards.enter_local_pass()


class Forwards:
    """The forward passes of one module. A backward pass goes through one or several of them.

    A backward pass normally reaches an output, whose hook runs before the first gradient. It
    reaches none if the outputs hide their tensors, or if the loss is made of results of
    torch.autograd.grad, whose graph contains no output. Then it is a step if the forward passes
    that still wait for a backward pass ran outside of no_sync().

    Attributes:
      last_synchronizes: whether a backward pass through the last one is a step; True before any.
    """

    def __init__(self) -> None:
        """No pass yet."""
        self.last_synchronizes = True
        # Number of the last backward pass that went through a forward pass under no_sync(), or
        # through none that is known.
        self._local_pass: int | None = None
        self._alive: list[weakref.ref[_Forward]] = []
        # For each forward pass without a tensor to hook: whether it synchronizes. It is not known
        # which of them a backward pass has gone through.
        self._hidden: list[bool] = []

    def add(
        self, synchronize: bool, outputs: Iterable[Any], begin: Callable[[Any, bool], bool]
    ) -> None:
        """Records a forward pass, and hooks those of its output tensors that have a `grad_fn`.

        A backward pass that reaches such a tensor calls `begin` with its `grad_fn` and
        `synchronize`. `begin` returns whether the pass adds to gradients of the module's
        parameters.
        """
        self.last_synchronizes = synchronize
        forward = _Forward(synchronize, begin)
        found = False
        for tensor in outputs:
            if tensor.grad_fn is not None:
                tensor.register_hook(_OutputHook(self, forward, tensor.grad_fn))
                found = True
        if found:
            self._alive = [ref for ref in self._alive if ref() is not None]
            self._alive.append(weakref.ref(forward))
        else:
            # One backward pass goes through a few of these. The older ones had no backward pass.
            self._hidden = [*self._hidden[-7:], synchronize]

    def unseen_begins(self, backward: int | None, parameter: str) -> bool:
        """Whether a pass that runs without a step begins one with its gradient of `parameter`.

        A pass through an output under no_sync() begins none.

        Raises:
          RuntimeError: forward passes inside and outside of no_sync() wait for a backward pass.
        """
        if backward is not None and self._local_pass == backward:
            return False
        alive = [forward for ref in self._alive if (forward := ref()) is not None]
        waiting = [forward for forward in alive if not forward.seen]
        kinds = {forward.synchronize for forward in waiting} | set(self._hidden)
        if len(kinds) == 2:
            raise RuntimeError(
                f"gradsync: parameter '{parameter}' got a gradient that passed no output of the "
                "wrapped module, while forward passes inside and outside of no_sync() wait for "
                "theirs: it is not clear whether to synchronize. Let forward() return its tensors "
                "in tuples, lists, dictionaries or data classes, or run one backward pass before "
                "the next forward pass"
            )
        if waiting:
            waiting[0].seen = True
        else:
            self._hidden.clear()
        if kinds != {True}:
            self.enter_local_pass()
            return False
        return True

    def enter_local_pass(self) -> None:
        """The running backward pass only accumulates."""
        self._local_pass = _autograd.backward_id()
