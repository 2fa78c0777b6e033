"""Rates of links, as virtual-network takes them."""

from __future__ import annotations

import argparse
import re

_UNITS = {"gbit": 1e9, "mbit": 1e6, "kbit": 1e3, "bit": 1.0}
_RATE = re.compile(r"([1-9]\d{0,9})([gmk]?bit)")


def bits_per_second(rate: str) -> float:
    """Of "1gbit"."""
    match = _RATE.fullmatch(rate)
    if match is None:
        raise ValueError(f"'{rate}' is no rate like 1gbit or 100mbit")
    return int(match[1]) * _UNITS[match[2]]


def parse_bit_rate(text: str) -> str:
    """For add_argument(type=)."""
    try:
        bits_per_second(text)
    except ValueError as error:
        raise argparse.ArgumentTypeError(str(error)) from None
    return text
