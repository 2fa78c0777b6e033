"""Notices a state that changes between a step's position and its first gradient."""

from __future__ import annotations

from typing import Any, Iterator

import torch

from gradsync.torch import _flat_state
from gradsync.torch._shared_state import SharedState


class FrozenState:
    """Notices a change of the state that all ranks share: `(record changed*)*`.

    It compares tensors' version counters. So it does not see changes through `parameter.data`; the
    digests of a replacement's state show them. If a tensor has been replaced by another one, it
    compares their values: some objects copy their state. It also compares values that are no
    tensors, but not those in the optimizer's state of each parameter.

    Args:
      shared: the state.
    """

    def __init__(self, shared: SharedState) -> None:
        self._shared = shared
        self._tensors: list[tuple[str, torch.Tensor, int]] = []
        self._options: Any = None

    def record(self) -> None:
        """Remembers the present state.

        Raises:
          TypeError: it has a part that a replacement could not get; names it.
        """
        self._options, inside = self._read_options()
        self._tensors = [
            (name, tensor, tensor._version) for name, tensor in self._read_tensors(inside)
        ]

    def changed(self) -> str | None:
        """The name of the first part that has changed since record(); None: nothing has."""
        options, inside = self._read_options()
        difference = _flat_state.first_difference("state", self._options, options)
        if difference is not None:
            return difference
        now = list(self._read_tensors(inside))
        for (name, tensor, version), (name_now, tensor_now) in zip(self._tensors, now):
            if name != name_now:
                return name
            if tensor.data_ptr() == tensor_now.data_ptr():
                if tensor_now._version != version:
                    return name
            elif not torch.equal(tensor, tensor_now):
                return name
        return None if len(now) == len(self._tensors) else "state of the optimizer"

    def _read_options(self) -> tuple[Any, dict[str, torch.Tensor]]:
        tensors: dict[str, torch.Tensor] = {}
        return _flat_state.flatten("state", self._shared.options(), tensors), tensors

    def _read_tensors(self, inside: dict[str, torch.Tensor]) -> Iterator[tuple[str, torch.Tensor]]:
        yield from self._shared.parameters().items()
        yield from inside.items()
        for i, state in enumerate(self._shared.optimizer.state.values()):
            for key, value in state.items():
                if isinstance(value, torch.Tensor):
                    yield f"optimizer state {i}/{key}", value
