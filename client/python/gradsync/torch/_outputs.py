"""The tensors in what a module's forward pass returns."""

from __future__ import annotations

import dataclasses
from typing import Any, Iterator, Mapping

import torch


def tensors(output: Any) -> Iterator[torch.Tensor]:
    """The tensors in nested sequences, mappings and data classes."""
    if isinstance(output, torch.Tensor):
        yield output
    elif isinstance(output, Mapping):
        for value in output.values():
            yield from tensors(value)
    elif isinstance(output, (list, tuple, set, frozenset)):
        for value in output:
            yield from tensors(value)
    elif dataclasses.is_dataclass(output) and not isinstance(output, type):
        for field in dataclasses.fields(output):
            yield from tensors(getattr(output, field.name, None))
