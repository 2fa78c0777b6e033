"""The tensors in what a module's forward pass returns."""

from __future__ import annotations

from typing import Any, Iterator, Mapping

import torch

# Enough for the outputs of any model; an object that leads to more is no output.
_MOST_OBJECTS = 10_000


def tensors(output: Any) -> Iterator[torch.Tensor]:
    """The tensors in nested sequences, mappings, data classes and other objects' attributes."""
    seen: set[int] = set()
    stack = [output]
    while stack and len(seen) < _MOST_OBJECTS:
        part = stack.pop()
        if isinstance(part, torch.Tensor):
            yield part
            continue
        if id(part) in seen:
            continue
        seen.add(id(part))
        if isinstance(part, Mapping):
            stack.extend(part.values())
        elif isinstance(part, (list, tuple, set, frozenset)):
            stack.extend(part)
        elif not isinstance(part, (torch.nn.Module, type)):
            stack.extend(_attributes(part))


def _attributes(part: Any) -> list[Any]:
    """The values that the object `part` holds by name."""
    values = list(getattr(part, "__dict__", {}).values())
    for owner in type(part).__mro__:
        slots = owner.__dict__.get("__slots__", ())
        for name in (slots,) if isinstance(slots, str) else slots:
            values.append(getattr(part, name, None))
    return values
