"""What the command lines of step.py and allreduce.py have in common."""

from __future__ import annotations

import argparse
import contextlib
import os
import pathlib
import signal
from collections.abc import Iterator
from typing import Callable

_UNITS = "KMG"


def count(least: int, most: int) -> Callable[[str], int]:
    """For add_argument(type=): a number from `least` to `most`."""

    def parse(text: str) -> int:
        if not text.isdecimal() or not least <= int(text) <= most:
            raise argparse.ArgumentTypeError(f"'{text}' is no number from {least} to {most}")
        return int(text)

    return parse


def names_of(allowed: tuple[str, ...]) -> Callable[[str], tuple[str, ...]]:
    """For add_argument(type=): a comma-separated list, put into the order of `allowed`."""

    def parse(text: str) -> tuple[str, ...]:
        names = text.split(",")
        if len(set(names)) < len(names) or not set(names) <= set(allowed):
            raise argparse.ArgumentTypeError(f"'{text}' is no list of {','.join(allowed)}")
        return tuple(name for name in allowed if name in names)

    return parse


def output_file(text: str) -> pathlib.Path:
    """For add_argument(type=): a file that can be written, so that no long run ends in vain."""
    path = pathlib.Path(text)
    if path.is_dir() or not os.access(path if path.exists() else path.parent, os.W_OK):
        raise argparse.ArgumentTypeError(f"{text} cannot be written")
    return path


def parse_byte_size(text: str) -> int:
    """For add_argument(type=): 64K, 25M, 1G are powers of two, as in gradsync-bench."""
    shift = 10 * (_UNITS.find(text[-1:]) + 1) if text[-1:] else 0
    digits = text[:-1] if shift else text
    if not digits.isdecimal() or int(digits) == 0:
        raise argparse.ArgumentTypeError(f"'{text}' is no size like 64K or 25M")
    return int(digits) << shift


def format_byte_size(number: int) -> str:
    """The shortest text that parse_byte_size() understands."""
    unit = ""
    for larger in _UNITS:
        if number == 0 or number % 1024:
            break
        number //= 1024
        unit = larger
    return f"{number}{unit}"


@contextlib.contextmanager
def terminable() -> Iterator[None]:
    """SIGTERM raises KeyboardInterrupt, as Ctrl-C does: whatever was started is ended."""

    def interrupt(*_: object) -> None:
        raise KeyboardInterrupt

    before = signal.signal(signal.SIGTERM, interrupt)
    try:
        yield
    finally:
        signal.signal(signal.SIGTERM, before)
