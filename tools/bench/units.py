"""Sizes and rates as the command lines take them."""

from __future__ import annotations

import re

_SIZES = "KMG"
_RATES = {"gbit": 1e9, "mbit": 1e6, "kbit": 1e3, "bit": 1.0}
_RATE = re.compile(r"([1-9]\d{0,9})([gmk]?bit)")


def parse_byte_size(text: str) -> int:
    """64K, 25M and 1G are powers of two, as in nccl-tests; ValueError for anything else."""
    match = re.fullmatch(r"([0-9]+)([KMG]?)", text)
    if match is None or int(match[1]) == 0:
        raise ValueError(f"'{text}' is no size like 64K or 25M")
    return int(match[1]) << 10 * (_SIZES.find(match[2]) + 1 if match[2] else 0)


def format_byte_size(number: int) -> str:
    """The shortest text that parse_byte_size() understands."""
    unit = ""
    for larger in _SIZES:
        if number == 0 or number % 1024:
            break
        number //= 1024
        unit = larger
    return f"{number}{unit}"


def bits_per_second(rate: str) -> float:
    """ "1gbit" as a number; ValueError for anything else."""
    match = _RATE.fullmatch(rate)
    if match is None:
        raise ValueError(f"takes a rate such as 1gbit or 100mbit, not '{rate}'")
    return int(match[1]) * _RATES[match[2]]
