"""What a group tells the daemon of each collective: the same text on every rank."""

from __future__ import annotations

import hashlib
from typing import Any, Optional, Sequence

import torch

# PyTorch has several names of one collective.
_NAMES = {
    "_allgather_base": "all_gather_single",
    "_reduce_scatter_base": "reduce_scatter_single",
    "allgather": "all_gather",
    "allgather_coalesced": "all_gather_coalesced",
    "allgather_into_tensor_coalesced": "all_gather_single_coalesced",
    "alltoall": "all_to_all",
    "alltoall_base": "all_to_all_single",
    "reduce_scatter_tensor_coalesced": "reduce_scatter_single_coalesced",
}
# The argument whose tensors have the same sizes on every rank. The others are lists that some ranks
# leave empty, or follow from it. None: there is no such argument.
_SAME_SIZES: dict[str, Optional[int]] = {
    "all_gather": 1,
    "all_gather_coalesced": 1,
    "all_gather_single": 1,
    "all_gather_single_coalesced": 1,
    "broadcast": 0,
    "gather": 1,
    "reduce": 0,
    "reduce_scatter": 0,
    "reduce_scatter_single": 0,
    "reduce_scatter_single_coalesced": 0,
    "scatter": 0,
}
# The daemon takes at most 256 bytes. A longer list of sizes becomes its hash.
_MOST_SIZES = 8


def describe(name: str, arguments: Sequence[Any], options: dict[str, Any]) -> str:
    """The description of a call of a process group's method."""
    name = _NAMES.get(name, name)
    place = _SAME_SIZES.get(name)
    text = name
    if place is not None and place < len(arguments):
        tensors = arguments[place]
        text += " of " + sizes([tensors] if isinstance(tensors, torch.Tensor) else tensors)
    root, op = _root_and_op(name, arguments, options)
    if op is not None:
        text += f" ({op_name(op)})"
    if root is not None:
        text += f", root {root}"
    return text


def describe_all_reduce(tensors: Sequence[torch.Tensor], op: object) -> str:
    """The description of an all-reduce, also of a coalesced one."""
    return f"all_reduce of {sizes(tensors)} ({op_name(op)})"


def sizes(tensors: Sequence[torch.Tensor]) -> str:
    """Number and type of the elements of each tensor: "3 float32, 5 int64"."""
    texts = [f"{tensor.numel()} {str(tensor.dtype)[6:]}" for tensor in tensors]
    if len(texts) <= _MOST_SIZES:
        return ", ".join(texts)
    digest = hashlib.sha256(",".join(texts).encode()).hexdigest()[:16]
    return f"{len(texts)} tensors ({', '.join(texts[:2])}, ...; hash {digest})"


def op_name(op: object) -> str:
    """The name of a ReduceOp, such as "sum"."""
    return str(getattr(op, "op", op)).rpartition(".")[2].lower()


def _root_and_op(
    name: str, arguments: Sequence[Any], options: dict[str, Any]
) -> tuple[Optional[int], Optional[object]]:
    given = options.get("opts")
    if given is None and arguments and hasattr(arguments[-1], "asyncOp"):
        given = arguments[-1]
    if given is not None:
        return getattr(given, "rootRank", None), getattr(given, "reduceOp", None)
    if name in ("broadcast", "reduce") and len(arguments) > 1 and isinstance(arguments[1], int):
        return arguments[1], None
    return None, None
