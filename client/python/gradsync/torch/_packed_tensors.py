"""Tensors in one piece of host memory, from which a broadcast sends them."""

from __future__ import annotations

import itertools
from typing import Sequence

import torch

# Where each tensor begins: enough for every dtype.
ALIGNMENT = 16


def packed_size(tensor: torch.Tensor) -> int:
    """Bytes that the tensor takes, with the padding behind it."""
    return -(-tensor.numel() * tensor.element_size() // ALIGNMENT) * ALIGNMENT


class PackedTensors:
    """Tensors of one device, one behind the other in a piece of host memory.

    Tensors on a GPU are packed there, and one copy each way carries all of them: a copy for each
    tensor would make the host wait for the GPU each time.

    Args:
      tensors: dense, all on one device.
      memory: bytes for all of them; stays alive as long as this.
    """

    def __init__(self, tensors: Sequence[torch.Tensor], memory: torch.Tensor) -> None:
        self._tensors = tensors
        self._memory = memory
        # On the tensors' own device.
        self._packed = memory
        if not is_on_host(tensors[0]):
            self._packed = tensors[0].new_zeros(memory.numel(), dtype=torch.uint8)
        self._begins = list(itertools.accumulate(map(packed_size, tensors), initial=0))
        self._before: torch.Tensor | None = None

    def pack(self) -> None:
        """Writes the tensors into the memory."""
        _copy(self._spans(self._tensors), self._tensors)
        if self._packed is not self._memory:
            self._memory.copy_(self._packed)
        self._before = self._memory.clone()

    def unpack(self) -> None:
        """Writes what the memory has now into those tensors whose bits differ from it.

        Another graph may have saved a tensor for its backward pass, which a write would break.
        """
        assert self._before is not None, "pack() comes first"
        if torch.equal(self._before, self._memory):
            return
        if self._packed is not self._memory:
            self._packed.copy_(self._memory)
        differs = [
            not torch.equal(self._before[begin:end], self._memory[begin:end])
            for begin, end in zip(self._begins, self._begins[1:])
        ]
        spans = self._spans(self._tensors)
        _copy(
            list(itertools.compress(self._tensors, differs)),
            list(itertools.compress(spans, differs)),
        )

    def _spans(self, tensors: Sequence[torch.Tensor]) -> list[torch.Tensor]:
        """For each tensor its place, on its own device, as a tensor like it."""
        spans = []
        for tensor, begin in zip(tensors, self._begins):
            end = begin + tensor.numel() * tensor.element_size()
            spans.append(self._packed[begin:end].view(tensor.dtype).view(tensor.size()))
        return spans


def is_on_host(tensor: torch.Tensor) -> bool:
    """Whether the CPU can read the tensor's memory."""
    return tensor.device.type == "cpu"


def _copy(targets: Sequence[torch.Tensor], sources: Sequence[torch.Tensor]) -> None:
    """Copies on one device: on a GPU with a few kernels for each dtype, not one for each tensor."""
    by_type: dict[torch.dtype, tuple[list[torch.Tensor], list[torch.Tensor]]] = {}
    for target, source in zip(targets, sources):
        pair = by_type.setdefault(target.dtype, ([], []))
        pair[0].append(target)
        pair[1].append(source)
    for same_type in by_type.values():
        torch._foreach_copy_(*same_type)
