"""What modules keep beside parameters and buffers: get_extra_state()."""

from __future__ import annotations

from typing import Any, Mapping

import torch

from gradsync.torch import _flat_state
from gradsync.torch._shared_state import check_same


class ExtraStates:
    """Reads and loads the extra states of a module and of those in it.

    Not thread-safe: read() runs on another thread while the thread that trains waits.

    Args:
      module: bare, not the wrapper.
    """

    def __init__(self, module: torch.nn.Module) -> None:
        self._module = module

    def why_not(self) -> str | None:
        """Why a replacement could not get one of the states; None: it can get all."""
        for name, module in self._modules().items():
            try:
                _flat_state.flatten(name, module.get_extra_state(), {})
            except TypeError as error:
                return str(error)
            if not _overrides(module, "set_extra_state"):
                return f"{type(module).__name__} of '{name}' has no set_extra_state()"
        return None

    def read(self) -> dict[str, Any]:
        """The states by their names in state_dict(), with the tensors themselves."""
        return {name: module.get_extra_state() for name, module in self._modules().items()}

    def copy(self) -> dict[str, Any]:
        """What read() returns, with tensors of its own.

        Raises:
          TypeError: a part cannot travel to a replacement; names it.
        """
        tensors: dict[str, torch.Tensor] = {}
        plain = {n: _flat_state.flatten(n, state, tensors) for n, state in self.read().items()}
        copies = {name: tensor.clone() for name, tensor in tensors.items()}
        return {name: _flat_state.unflatten(part, copies) for name, part in plain.items()}

    def load(self, states: Mapping[str, Any]) -> None:
        """Takes what read() has returned on another rank.

        Raises:
          FailedPreconditionError: STATE_REFUSED: this rank has other states; names one.
        """
        modules = self._modules()
        check_same("extra state", modules.keys(), states.keys())
        for name, module in modules.items():
            module.set_extra_state(states[name])

    def _modules(self) -> dict[str, torch.nn.Module]:
        return {
            f"{name}._extra_state" if name else "_extra_state": module
            for name, module in self._module.named_modules()
            if _overrides(module, "get_extra_state")
        }


def _overrides(module: torch.nn.Module, method: str) -> bool:
    return getattr(type(module), method) is not getattr(torch.nn.Module, method)
