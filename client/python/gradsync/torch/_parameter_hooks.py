"""Hooks that users put on parameters, such as an optimizer that runs in the backward pass."""

from __future__ import annotations

import sys
import weakref
from typing import Any, Callable, Sequence

import torch

from gradsync.torch._gradients import Slot
from gradsync.torch._module_hooks import GradientHook, Steps


class _AfterAverage:
    """Stands in for a user's hook on one parameter, which runs when the gradient is an average.

    A gradient that is not synchronized, as under no_sync(), goes to the hook at once.
    """

    __slots__ = ("_steps", "hook")

    def __init__(self, steps: weakref.ref[Steps], hook: Callable[[torch.Tensor], None]) -> None:
        self._steps = steps
        self.hook = hook

    def __call__(self, parameter: torch.Tensor) -> None:
        steps = self._steps()
        if steps is None or not steps.averages_later:
            self.hook(parameter)


class ParameterHooks:
    """The users' post-accumulate-grad hooks of a wrapped module's parameters.

    Autograd would run them as soon as this rank's own gradient is written. They run after the step
    instead, in the order of the parameters, on every rank that runs the step. The optimizers of
    `torch.distributed.optim._apply_optimizer_in_backward` do so, too.

    Args:
      slots: the parameters, with the wrapper's own hooks.
      steps: the synchronizer.

    Attributes:
      present: whether there were any at the last look.
    """

    def __init__(self, slots: Sequence[Slot], steps: weakref.ref[Steps]) -> None:
        self._slots = list(slots)
        self._steps = steps
        for slot in self._slots:
            hooks = _hooks(slot)
            theirs = [(key, hook) for key, hook in hooks.items() if key != slot.handle.id]
            # The wrapper's own hook comes first: it begins the step if no output's hook has.
            # Autograd calls them in the order in which the dictionary got them.
            own = hooks[slot.handle.id]
            hooks.clear()
            hooks[slot.handle.id] = own
            for key, hook in theirs:  # of an earlier wrapper, or the user's
                hooks[key] = hook.hook if isinstance(hook, _AfterAverage) else hook
        self.look()

    def look(self) -> None:
        """Takes over the hooks that users have registered since the last look."""
        self.present = False
        for slot in self._slots:
            if hasattr(slot.parameter, "_in_backward_optimizers"):
                _remove_hooks_of_optimizers(slot.parameter)
                self.present = True
            hooks = _hooks(slot)
            self.present = self.present or len(hooks) > 1
            # New hooks are at the end.
            if type(next(reversed(hooks.values()))) in (GradientHook, _AfterAverage):
                continue
            for key, hook in hooks.items():
                if type(hook) not in (GradientHook, _AfterAverage):
                    hooks[key] = _AfterAverage(self._steps, hook)

    def run(self, used: Sequence[bool] | None) -> None:
        """Calls the hooks of the parameters that a rank used in the step; None: all of them."""
        for slot in self._slots:
            if used is not None and not used[slot.index]:
                continue
            hooks = _hooks(slot)
            if len(hooks) > 1:
                for hook in list(hooks.values()):
                    if isinstance(hook, _AfterAverage):
                        hook.hook(slot.parameter)
            for optimizer in getattr(slot.parameter, "_in_backward_optimizers", ()):
                optimizer.step()
                optimizer.zero_grad()

    def give_back(self) -> None:
        """The wrapper has ended: autograd calls the users' hooks itself again."""
        for slot in self._slots:
            hooks = _hooks(slot)
            for key, hook in hooks.items():
                if isinstance(hook, _AfterAverage):
                    hooks[key] = hook.hook


def _remove_hooks_of_optimizers(parameter: torch.Tensor) -> None:
    """Removes the hooks of _apply_optimizer_in_backward, as PyTorch's wrapper does."""
    handles = sys.modules[
        "torch.distributed.optim.apply_optimizer_in_backward"
    ].param_to_optim_hook_handle_map
    for handle in handles.get(parameter, ()):
        handle.remove()


def _hooks(slot: Slot) -> Any:
    """The parameter's hooks by their handles' numbers, in the order of their calls."""
    hooks: Any = slot.parameter._post_accumulate_grad_hooks
    return hooks if hooks is not None else {}
