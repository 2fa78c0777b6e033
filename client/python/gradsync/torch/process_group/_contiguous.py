"""Contiguous copies of a collective's tensors."""

from __future__ import annotations

from typing import Any

import torch


class ContiguousArguments:
    """Arguments of a collective, in which every tensor of the host is contiguous.

    Gloo takes the memory of a tensor for its elements in order. With other strides its result is
    wrong, without a word.
    """

    def __init__(self, arguments: tuple[Any, ...], options: dict[str, Any]) -> None:
        self._originals: dict[int, tuple[torch.Tensor, torch.Tensor]] = {}
        self.arguments = tuple(map(self._contiguous, arguments))
        self.options = {name: self._contiguous(value) for name, value in options.items()}

    @property
    def any(self) -> bool:
        """Whether a tensor was replaced by a copy."""
        return bool(self._originals)

    def copy_back(self) -> None:
        """Writes the results into the caller's tensors. Inputs get what they had."""
        for original, copy in self._originals.values():
            original.data.copy_(copy)

    def restore(self, value: Any) -> Any:
        """`value` of the collective's future, with the caller's tensors in place of the copies."""
        if isinstance(value, (list, tuple)):
            return type(value)(map(self.restore, value))
        original, _ = self._originals.get(id(value), (value, None))
        return original

    def _contiguous(self, value: Any) -> Any:
        if isinstance(value, (list, tuple)):
            return [self._contiguous(each) for each in value]
        if (
            not isinstance(value, torch.Tensor)
            or value.layout is not torch.strided
            or value.device.type != "cpu"
            or value.is_contiguous()
        ):
            return value
        copy = value.detach().contiguous()
        self._originals[id(copy)] = value, copy
        return copy
