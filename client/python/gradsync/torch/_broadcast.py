"""Broadcasts of many tensors in few operations."""

from __future__ import annotations

import hashlib
import itertools
from typing import Iterable, Sequence

import torch

import gradsync
from gradsync.torch._packed_tensors import ALIGNMENT, PackedTensors, packed_size

# Tensors are packed into groups of at most this many bytes: a model of many small tensors then
# costs few operations.
_GROUP_BYTES = 32 << 20


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
    mark = hashlib.sha256(tag.encode()).digest()[:ALIGNMENT]
    group: list[torch.Tensor] = []
    size = ALIGNMENT
    for tensor in tensors:
        nbytes = packed_size(tensor)
        if group and size + nbytes > _GROUP_BYTES:
            _broadcast_group(session, group, size, root, mark, tag, timeout)
            group, size = [], ALIGNMENT
        group.append(tensor)
        size += nbytes
    if group:
        _broadcast_group(session, group, size, root, mark, tag, timeout)


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
        # Copies between a GPU and page-locked memory are faster. PyTorch keeps that memory for the
        # next time, so a single huge tensor gets none.
        pin = size <= _GROUP_BYTES and any(tensor.is_cuda for tensor in tensors)
        memory = torch.zeros(size, dtype=torch.uint8, pin_memory=pin)
        memory[:ALIGNMENT] = torch.frombuffer(bytearray(mark), dtype=torch.uint8)
        parts = []
        offset = ALIGNMENT
        # Consecutive tensors on one device.
        for _, run in itertools.groupby(tensors, lambda tensor: tensor.device):
            part = list(run)
            end = offset + sum(map(packed_size, part))
            parts.append(PackedTensors(part, memory[offset:end]))
            offset = end
        for packed in parts:
            packed.pack()
        session.broadcast_address(memory.data_ptr(), size, root, timeout, owner=memory)
        if bytes(memory[:ALIGNMENT].tolist()) != mark:
            raise RuntimeError(
                f"gradsync: rank {session.rank} synchronizes {tag}, but another rank synchronizes "
                "something else; run the wrapped modules in the same order on every rank"
            )
        for packed in parts:
            packed.unpack()
