"""A rank's part in a reduction: what it brings, and what it takes of the result."""

from __future__ import annotations

import dataclasses
from typing import Optional

import torch


@dataclasses.dataclass(frozen=True)
class Transfer:
    """One rank's part in a reduction of `count` elements, which every rank has in common.

    Attributes:
      count: elements of the reduction.
      source: what this rank brings, flat. It brings zeros for all elements before and behind.
      source_begin: place of its first element in the reduction.
      target: what gets this rank's part of the result, flat; can be `source`.
      target_begin: place of its first element in the reduction.
      strided: gets the elements of `target` in the end, where the caller's tensor has gaps.
    """

    count: int
    source: torch.Tensor
    source_begin: int
    target: torch.Tensor
    target_begin: int
    strided: Optional[torch.Tensor] = None

    @property
    def in_place(self) -> bool:
        """Whether the reduction can be done in the memory of `source`."""
        return self.source is self.target

    def fill(self, memory: torch.Tensor, begin: int) -> None:
        """Fills `memory`, the elements from `begin` on, with what this rank brings."""
        first, last = _overlap(self.source, self.source_begin, memory, begin)
        if last - first < memory.numel():
            memory.zero_()
        if first < last:
            _copy(self.source, self.source_begin, memory, begin, first, last)

    def drain(self, memory: torch.Tensor, begin: int) -> None:
        """Takes from `memory`, the elements from `begin` on, what this rank wants."""
        first, last = _overlap(self.target, self.target_begin, memory, begin)
        if first < last:
            _copy(memory, begin, self.target, self.target_begin, first, last)

    def finish(self) -> None:
        """After the last drain()."""
        if self.strided is not None:
            self.strided.copy_(self.target.view(self.strided.dtype).view(self.strided.shape))


def all_reduce(tensor: torch.Tensor) -> Transfer:
    """The result replaces the tensor."""
    # Neither autograd nor its version counters know of collectives, as with Gloo.
    tensor = tensor.data
    flat = tensor.contiguous().view(-1)
    strided = None if tensor.is_contiguous() else tensor
    return Transfer(flat.numel(), flat, 0, flat, 0, strided)


def reduce_scatter(output: torch.Tensor, tensor: torch.Tensor, rank: int) -> Transfer:
    """`output` gets the part of this rank."""
    target, strided = _target(output)
    source = tensor.data.contiguous().view(-1)
    return Transfer(source.numel(), source, 0, target, rank * target.numel(), strided)


def all_gather(output: torch.Tensor, tensor: torch.Tensor, rank: int) -> Transfer:
    """Gathers the ranks' parts in `output`: a sum of bytes, with zeros for the others' parts."""
    target, strided = _target(output)
    target = target.view(torch.uint8)
    source = tensor.data.contiguous().view(-1).view(torch.uint8)
    return Transfer(target.numel(), source, rank * source.numel(), target, 0, strided)


def _target(output: torch.Tensor) -> tuple[torch.Tensor, Optional[torch.Tensor]]:
    output = output.data
    if output.is_contiguous():
        return output.view(-1), None
    return torch.empty(output.numel(), dtype=output.dtype), output


def _overlap(
    part: torch.Tensor, part_begin: int, memory: torch.Tensor, begin: int
) -> tuple[int, int]:
    """First and last place that both have."""
    return (
        max(begin, part_begin),
        min(begin + memory.numel(), part_begin + part.numel()),
    )


def _copy(
    source: torch.Tensor, source_begin: int, to: torch.Tensor, to_begin: int, first: int, last: int
) -> None:
    """Copies the elements in [first, last)."""
    to[first - to_begin : last - to_begin].copy_(source[first - source_begin : last - source_begin])
