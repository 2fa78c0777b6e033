"""Random numbers that follow from where a rank is in its data, and from nothing before."""

from __future__ import annotations

import hashlib
import random
import sys

import torch


def number(*parts: object) -> int:
    """A number of 63 bits that follows from `parts`, the same in every process."""
    text = "/".join(map(str, parts)).encode()
    return int.from_bytes(hashlib.sha256(text).digest()[:8], "little") >> 1


def seed_generators(*parts: object) -> None:
    """Seeds the generators of `random`, NumPy (if it is imported) and PyTorch from `parts`."""
    seed = number(*parts)
    random.seed(seed)
    torch.manual_seed(seed)
    numpy = sys.modules.get("numpy")
    if numpy is not None:
        numpy.random.seed(seed & 0xFFFFFFFF)
