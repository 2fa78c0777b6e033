"""Checks that all ranks have the same module, and says where they differ."""

from __future__ import annotations

import json
from typing import Sequence

import torch

import gradsync

_MESSAGE_BYTES = 1024


def check_agreement(
    session: gradsync.Session,
    description: Sequence[str],
    timeout: float | None,
    subject: str = "modules",
    advice: str = "Build the same model, in the same order, on every rank.",
) -> None:
    """Checks that every rank gives the same description.

    Args:
      session: every rank of it calls this.
      description: a line for each option, parameter and buffer.
      timeout: seconds to wait for the other ranks; None: 30 min.
      subject: what is described, in the error.
      advice: the error's last sentence.

    Raises:
      ValueError: they differ; every rank gets the first difference and both ranks.
    """
    mine = json.dumps(list(description)).encode()
    length = bytearray(len(mine).to_bytes(8, "little"))
    session.broadcast(length, 0, timeout)
    text = bytearray(int.from_bytes(length, "little"))
    text[: len(mine)] = mine[: len(text)]
    session.broadcast(text, 0, timeout)
    differs = torch.zeros(session.world_size)
    message = bytearray(_MESSAGE_BYTES)
    if bytes(text) != mine:
        differs[session.rank] = 1
        difference = _difference(json.loads(text), description, session.rank)
        said = f"gradsync: the {subject} differ: {difference}. {advice}".encode()
        message[: len(said)] = said[:_MESSAGE_BYTES]
    session.all_reduce_address(
        differs.data_ptr(),
        differs.numel(),
        gradsync.DataType.FLOAT32,
        "sum",
        timeout,
        owner=differs,
    )
    ranks = differs.nonzero().flatten().tolist()
    if not ranks:
        return
    session.broadcast(message, ranks[0], timeout)
    raise ValueError(message.rstrip(b"\0").decode(errors="replace"))


def _difference(theirs: Sequence[str], mine: Sequence[str], rank: int) -> str:
    for a, b in zip(theirs, mine):
        if a != b:
            return f"rank 0 has {a}, but rank {rank} has {b}"
    longer, first_extra = (
        (0, theirs[len(mine)]) if len(theirs) > len(mine) else (rank, mine[len(theirs)])
    )
    return f"rank {longer} has {first_extra}, which rank {rank - longer} does not have"


def describe(kind: str, name: str, tensor: torch.Tensor) -> str:
    """A line for check_agreement(), as `parameter 'fc.weight' of shape [2, 3], float32`."""
    dtype = str(tensor.dtype).replace("torch.", "")
    # Ranks' gradients are added in the order of memory, so strides must be the same.
    strides = "" if tensor.is_contiguous() else f", strides {list(tensor.stride())}"
    return f"{kind} '{name}' of shape {list(tensor.size())}{strides}, {dtype}"
