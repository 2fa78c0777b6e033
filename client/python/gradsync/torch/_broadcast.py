"""Broadcasts of many tensors in few operations."""

from __future__ import annotations

import hashlib
from typing import Iterable, Sequence

import torch

import gradsync

# Tensors are packed into groups of at most this many bytes: a model of many small tensors then
# costs few operations.
_GROUP_BYTES = 32 << 20
# Where each tensor begins in its group: enough for every dtype.
_ALIGNMENT = 16


def broadcast_tensors(
    session: gradsync.Session,
    tensors: Iterable[torch.Tensor],
    root: int,
    tag: str,
    timeout: float | None,
) -> None:
    """Overwrites `tensors` with the root's.

    Args:
      session: every live rank calls this with tensors of the same shapes and dtypes.
      tensors: dense, of any dtype, on any device; they travel through host memory.
      root: a rank, or `gradsync.LOWEST_LIVE_RANK`.
      tag: what the tensors are; a rank whose tag differs from the root's gets an error.
      timeout: seconds to wait for the other ranks; None: 30 min.

    Raises:
      RuntimeError: the root's tag differs from this rank's.
    """
    mark = hashlib.sha256(tag.encode()).digest()[:_ALIGNMENT]
    group: list[torch.Tensor] = []
    size = _ALIGNMENT
    for tensor in tensors:
        nbytes = _padded(tensor)
        if group and size + nbytes > _GROUP_BYTES:
            _broadcast_group(session, group, size, root, mark, tag, timeout)
            group, size = [], _ALIGNMENT
        group.append(tensor)
        size += nbytes
    if group:
        _broadcast_group(session, group, size, root, mark, tag, timeout)


def _padded(tensor: torch.Tensor) -> int:
    return -(-tensor.numel() * tensor.element_size() // _ALIGNMENT) * _ALIGNMENT


def _broadcast_group(
    session: gradsync.Session,
    tensors: Sequence[torch.Tensor],
    size: int,
    root: int,
    mark: bytes,
    tag: str,
    timeout: float | None,
) -> None:
    with torch.no_grad():
        packed = torch.empty(size, dtype=torch.uint8)
        packed[:_ALIGNMENT] = torch.frombuffer(bytearray(mark), dtype=torch.uint8)
        spans = []
        offset = _ALIGNMENT
        for tensor in tensors:
            nbytes = tensor.numel() * tensor.element_size()
            span = packed[offset : offset + nbytes].view(tensor.dtype).view(tensor.size())
            span.copy_(tensor)
            spans.append(span)
            offset += _padded(tensor)
        session.broadcast_address(packed.data_ptr(), size, root, timeout, owner=packed)
        if bytes(packed[:_ALIGNMENT].tolist()) != mark:
            raise RuntimeError(
                f"gradsync: rank {session.rank} synchronizes {tag}, but another rank synchronizes "
                "something else; run the wrapped modules in the same order on every rank"
            )
        for tensor, span in zip(tensors, spans):
            # A tensor with the same bits is not written: another graph may have saved it for its
            # backward pass, which a write would break.
            if not _same_bits(tensor.cpu(), span):
                tensor.copy_(span)


def _same_bits(a: torch.Tensor, b: torch.Tensor) -> bool:
    a, b = (tensor.reshape(-1).contiguous().view(torch.uint8) for tensor in (a, b))
    return torch.equal(a, b)
