"""The common part of the command lines of gradsync-bench, step.py and the quick start."""

from __future__ import annotations

import argparse
import json
import os
import pathlib
import sys
from collections.abc import Sequence
from typing import Any, Callable

from launcher import Failed, Interrupted
from source_tree import NotBuilt
from units import bits_per_second


class WrongResults(Exception):
    """An implementation computed something wrong."""


def count(least: int, most: int) -> Callable[[str], int]:
    """For add_argument(type=): a number from `least` to `most`."""

    def parse(text: str) -> int:
        if not text.isdecimal() or not least <= int(text) <= most:
            raise argparse.ArgumentTypeError(f"takes a number from {least} to {most}, not '{text}'")
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


def parsed_by(parse: Callable[[str], Any]) -> Callable[[str], Any]:
    """For add_argument(type=): `parse`, whose ValueError becomes the message."""

    def call(text: str) -> Any:
        try:
            return parse(text)
        except ValueError as error:
            raise argparse.ArgumentTypeError(str(error)) from None

    return call


def add_shared_arguments(parser: argparse.ArgumentParser) -> None:
    """Options that have the same meaning everywhere."""
    parser.add_argument(
        "--ranks", type=count(1, 8), default=2, metavar="N", help="on each node; 2 to 8 in all"
    )
    parser.add_argument(
        "--nodes", type=count(1, 8), default=1, metavar="N", help="default 1: no network"
    )
    parser.add_argument(
        "--rate",
        type=rate,
        metavar="RATE",
        help="of each node's link, each way: 1gbit, 100mbit; default: as fast as memory",
    )
    parser.add_argument(
        "--threads",
        type=count(0, 1024),
        default=0,
        metavar="N",
        help="reduce threads of gradsyncd; default: one per core",
    )
    parser.add_argument(
        "--daemon", metavar="PATH", help="gradsyncd; default: the one that Bazel has built"
    )
    parser.add_argument("--json", type=output_file, metavar="FILE", help="the figures as JSON")


def check_shared_arguments(parser: argparse.ArgumentParser, options: argparse.Namespace) -> None:
    """Ends the program with 2 if ranks, nodes and rate do not fit together."""
    ranks = options.ranks * options.nodes
    least = 1 if getattr(options, "gpus", 0) else 2
    if not least <= ranks <= 8:
        parser.error(
            f"--ranks {options.ranks} on --nodes {options.nodes}: {ranks} ranks in all,"
            f" must be {least} to 8 in all"
        )
    if options.rate and options.nodes == 1:
        parser.error("--rate is of the links between nodes: it needs --nodes 2 or more")


def write_json(path: pathlib.Path | None, content: Any) -> None:
    """Writes --json's file, if there is one."""
    if path is not None:
        path.write_text(json.dumps(content, indent=2) + "\n", encoding="utf-8")


def run_bench(name: str, bench: Callable[[], None]) -> int:
    """Runs a benchmark; returns the exit status and reports errors on standard error."""
    try:
        bench()
    except (Interrupted, KeyboardInterrupt):
        print(f"{name}: interrupted", file=sys.stderr)
        return 130
    except NotBuilt as error:
        print(f"{name}: {error}", file=sys.stderr)
        return 2
    except (Failed, WrongResults, OSError) as error:
        print(f"{name}: {error}", file=sys.stderr)
        return 1
    return 0


def say(lines: Sequence[str]) -> None:
    """Prints lines at once, each behind '# '."""
    for line in lines:
        print(f"# {line}", flush=True)


def rate(text: str) -> str:
    """For add_argument(type=): as "1gbit"."""
    parsed_by(bits_per_second)(text)
    return text


def output_file(text: str) -> pathlib.Path:
    """For add_argument(type=): a file that can be written, so that no long run ends in vain."""
    path = pathlib.Path(text)
    if not text or path.is_dir() or not os.access(path if path.exists() else path.parent, os.W_OK):
        raise argparse.ArgumentTypeError(f"{text} cannot be written")
    return path
