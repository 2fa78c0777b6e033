"""Nested states, such as an optimizer's, as named tensors and plain data that JSON can hold."""

from __future__ import annotations

import json
from typing import Any, Mapping, NamedTuple

import torch

from gradsync.torch._gradients import is_dense

# Marks what JSON does not have: a tensor, a tuple, a mapping whose keys are not all text.
_TENSOR, _TUPLE, _MAP = "$tensor", "$tuple", "$map"
_TAGS = (_TENSOR, _TUPLE, _MAP)
_KEYS = (str, int, float, bool, type(None))


class Kind(NamedTuple):
    """What a tensor is besides its bytes.

    Attributes:
      dtype: type of the elements.
      shape: elements per dimension.
      strides: a dense tensor's own; its bytes are taken as they lie in memory. If the tensor is not
        dense: those of a contiguous copy. An optimizer may need tensors with the strides of its
        parameters.
    """

    dtype: torch.dtype
    shape: tuple[int, ...]
    strides: tuple[int, ...]


def flatten(name: str, value: Any, tensors: dict[str, torch.Tensor]) -> Any:
    """Returns `value` as plain data, and adds its tensors to `tensors`.

    Args:
      name: of the value, such as "optimizer"; a part's name is "optimizer/state/0/exp_avg".
      value: tensors, None, booleans, numbers and text, in mappings, lists and tuples.
      tensors: by name.

    Raises:
      TypeError: a part is something else; names it.
    """
    if value is None or isinstance(value, (bool, int, float, str)):
        return value
    if isinstance(value, torch.Tensor):
        return {_TENSOR: _add(name, value, tensors), **_kind(value)}
    if isinstance(value, (list, tuple)):
        parts = [flatten(f"{name}/{i}", part, tensors) for i, part in enumerate(value)]
        return {_TUPLE: parts} if isinstance(value, tuple) else parts
    if isinstance(value, Mapping):
        if all(isinstance(key, str) and key not in _TAGS for key in value):
            return {key: flatten(f"{name}/{key}", part, tensors) for key, part in value.items()}
        for key in value:
            if not isinstance(key, _KEYS):
                raise _refused(f"{name}/{key!r}", key)
        pairs = [[key, flatten(f"{name}/{key}", part, tensors)] for key, part in value.items()]
        return {_MAP: sorted(pairs, key=lambda pair: _order(pair[0]))}
    raise _refused(name, value)


def unflatten(plain: Any, tensors: Mapping[str, torch.Tensor]) -> Any:
    """The value of which flatten() returned `plain`. It has the given tensors themselves."""
    if isinstance(plain, list):
        return [unflatten(part, tensors) for part in plain]
    if not isinstance(plain, dict):
        return plain
    if _TENSOR in plain:
        return tensors[plain[_TENSOR]]
    if _TUPLE in plain:
        return tuple(unflatten(part, tensors) for part in plain[_TUPLE])
    if _MAP in plain:
        return {key: unflatten(part, tensors) for key, part in plain[_MAP]}
    return {key: unflatten(part, tensors) for key, part in plain.items()}


def to_json(plain: Any) -> bytes:
    """The canonical text of this data: equal data have equal text. Numbers keep every bit."""
    return json.dumps(plain, sort_keys=True, separators=(",", ":")).encode()


def kinds(plain: Any) -> dict[str, Kind]:
    """What each tensor is that flatten() found."""
    found = {}
    stack = [plain]
    while stack:
        part = stack.pop()
        if isinstance(part, list):
            stack.extend(part)
        elif isinstance(part, dict):
            if _TENSOR in part:
                dtype = getattr(torch, part["dtype"])
                found[part[_TENSOR]] = Kind(dtype, tuple(part["shape"]), tuple(part["strides"]))
            else:
                stack.extend(part.values())
    return found


def first_difference(name: str, a: Any, b: Any) -> str | None:
    """The name of the first part in which two plain data differ; None if they are equal."""
    if isinstance(a, dict) and isinstance(b, dict) and a.keys() == b.keys():
        parts = [(str(key), a[key], b[key]) for key in a]
    elif isinstance(a, list) and isinstance(b, list) and len(a) == len(b):
        parts = [(str(i), *pair) for i, pair in enumerate(zip(a, b))]
    else:
        # repr() also compares types, and NaN with itself.
        return None if repr(a) == repr(b) else name
    for key, of_a, of_b in parts:
        inner = name if key in _TAGS else f"{name}/{key}"
        difference = first_difference(inner, of_a, of_b)
        if difference is not None:
            return difference
    return None


def _order(key: Any) -> tuple[str, float, str]:
    """Key to sort by. Numbers sort as numbers: an optimizer's states normally keep their order."""
    return type(key).__name__, key if isinstance(key, (int, float)) else 0.0, str(key)


def _add(name: str, tensor: torch.Tensor, tensors: dict[str, torch.Tensor]) -> str:
    if name in tensors:
        raise TypeError(f"gradsync: two parts of the state are named '{name}'; rename one")
    if tensor.layout is not torch.strided or tensor.is_quantized or tensor.device.type != "cpu":
        raise TypeError(
            f"gradsync: '{name}' is a {tensor.layout} tensor on {tensor.device}; a replacement can "
            "get only dense tensors in host memory"
        )
    tensors[name] = tensor.detach()
    return name


def _kind(tensor: torch.Tensor) -> dict[str, Any]:
    dtype = str(tensor.dtype).replace("torch.", "")
    strides = tensor.stride() if is_dense(tensor) else tensor.contiguous().stride()
    return {"dtype": dtype, "shape": list(tensor.size()), "strides": list(strides)}


def _refused(name: str, value: Any) -> TypeError:
    return TypeError(
        f"gradsync: '{name}' is a {type(value).__name__}; the state of a replacement can have "
        "tensors, numbers, booleans, text and None, in mappings, lists and tuples"
    )
