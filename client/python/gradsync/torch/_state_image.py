"""A state as the items that travel to a replacement: tensors' bytes, and one JSON text."""

from __future__ import annotations

import ctypes
import json
import math
from typing import Any, Mapping

import torch

import gradsync
from gradsync.torch import _flat_state
from gradsync.torch._gradients import is_dense

_JSON = "state.json"


def to_items(state: Mapping[str, Any]) -> list[tuple[str, gradsync.StateMemory]]:
    """The items of a state, in an order of their names.

    A tensor is copied only if it is not dense.

    Raises:
      TypeError: a part can be no item; names it.
    """
    tensors: dict[str, torch.Tensor] = {}
    plain = {key: _flat_state.flatten(key, state[key], tensors) for key in sorted(state)}
    text = torch.frombuffer(bytearray(_flat_state.to_json(plain)), dtype=torch.uint8)
    items = [(name, _memory(tensor)) for name, tensor in sorted(tensors.items())]
    return [(_JSON, _memory(text)), *items]


def from_items(items: Mapping[str, Any]) -> dict[str, Any]:
    """The state whose items these are, with tensors of its own.

    Raises:
      ValueError: the items do not belong together.
    """
    if _JSON not in items:
        raise ValueError(f"gradsync: the state of the model has no item '{_JSON}'")
    plain = json.loads(bytes(items[_JSON]))
    kinds = _flat_state.kinds(plain)
    if kinds.keys() != items.keys() - {_JSON}:
        name = min(kinds.keys() ^ (items.keys() - {_JSON}))
        raise ValueError(f"gradsync: the state of the model has a wrong item '{name}'")
    tensors = {name: _tensor(name, items[name], kind) for name, kind in kinds.items()}
    state: dict[str, Any] = _flat_state.unflatten(plain, tensors)
    return state


def _memory(tensor: torch.Tensor) -> gradsync.StateMemory:
    if not is_dense(tensor):
        tensor = tensor.contiguous()
    nbytes = tensor.numel() * tensor.element_size()
    return gradsync.StateMemory(tensor.data_ptr(), nbytes, tensor)


def _tensor(name: str, memory: Any, kind: _flat_state.Kind) -> torch.Tensor:
    data = memoryview(memory).cast("B")
    # Memory of PyTorch's own has the alignment with which the survivors compute.
    flat = torch.empty(math.prod(kind.shape), dtype=kind.dtype)
    nbytes = flat.numel() * flat.element_size()
    if data.nbytes != nbytes:
        raise ValueError(
            f"gradsync: '{name}' of the state of the model has {data.nbytes} bytes, not {nbytes}"
        )
    if nbytes:
        memoryview((ctypes.c_char * nbytes).from_address(flat.data_ptr())).cast("B")[:] = data
    return flat.as_strided(kind.shape, kind.strides)
