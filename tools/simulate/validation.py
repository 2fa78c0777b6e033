"""Predicted against measured: rows of the real benchmarks, and how far off the model is.

Two kinds of rows are understood, as `gradsync-bench allreduce --json` and `tools/bench/step.py
--json` write them:

  all-reduce   impl, bytes, ranks, time_us_p50 (or time_us, a number or an object with p50); nodes
               (1 where it is missing), rate ("1gbit") and placement (of the ranks of a ring,
               "block" where it is missing)
  step         model, impl, step_ms_p50, parameters, ranks; nodes and rate as well

A step is predicted from what the same file says of the module alone: "ddp_noop", whose copies into
buckets are in every wrapper's step, or "bare". Rows of other implementations are passed over.
"""

from __future__ import annotations

import dataclasses
import json
import math
import pathlib
import re
import statistics
from collections.abc import Sequence
from typing import Any, Optional

from .bucket_layout import MIB
from .collective import PLACEMENTS, ring_all_reduce
from .model import uniform
from .profile import Compute, Profile, Refused
from .training_run import Setup, run

_RATE = re.compile(r"(\d+(?:\.\d+)?)\s*([mg])bit", re.IGNORECASE)
# What step.py calls them.
_STEP_BACKENDS = {"gradsync": "gradsync", "gradsync_hook": "gradsync", "ddp_gloo": "gloo"}
_ALONE = ("ddp_noop", "bare")
# The rows do not say how a model's parameters are cut: they count as equal tensors.
_TENSOR_BYTES = 4 * MIB


@dataclasses.dataclass(frozen=True)
class Compared:
    """One row.

    Attributes:
      what: for people.
      unit: of both numbers.
      predicted: by the model.
      measured: by the benchmark.
    """

    what: str
    unit: str
    predicted: float
    measured: float

    @property
    def error(self) -> float:
        """In per cent of what was measured; above 0 where the model is too slow."""
        return (self.predicted / self.measured - 1) * 100


@dataclasses.dataclass(frozen=True)
class Validation:
    """All rows that could be compared, and why others could not."""

    compared: tuple[Compared, ...]
    passed_over: tuple[str, ...]

    @property
    def median_error(self) -> float:
        """Of the errors' absolute values, in per cent."""
        return statistics.median(abs(row.error) for row in self.compared)

    @property
    def worst_error(self) -> float:
        """The largest absolute value, in per cent."""
        return max(abs(row.error) for row in self.compared)


def read_rows(path: pathlib.Path) -> list[dict[str, Any]]:
    """A list of rows, or an object with `rows`. Refused if it is neither."""
    try:
        content = json.loads(path.read_text(encoding="utf-8"))
    except (OSError, ValueError) as error:
        raise Refused(f"{path} cannot be read: {error}") from error
    rows = content.get("rows") if isinstance(content, dict) else content
    if not isinstance(rows, list) or not all(isinstance(row, dict) for row in rows):
        raise Refused(f"{path} is no list of rows")
    return rows


def parse_rate(text: str) -> Optional[float]:
    """ "1gbit" in Gbit/s; None if it is no rate."""
    match = _RATE.fullmatch(text.strip())
    if match is None:
        return None
    return float(match[1]) * (1.0 if match[2].lower() == "g" else 1e-3)


def all_reduce_seconds(
    profile: Profile,
    backend: str,
    nbytes: float,
    ranks_of_node: Sequence[int],
    placement: str = "block",
) -> float:
    """From the last rank's call until it has the result, with nothing else going on."""
    ring = profile.ring(backend)
    if backend != "gradsync":
        return ring_all_reduce(nbytes, ranks_of_node, ring, placement).seconds
    ranks = max(ranks_of_node)

    def reduce(traffic: float) -> float:
        if not traffic:
            return 0.0
        return profile.get("gradsync.wake") + traffic / profile.get("gradsync.reduce")

    seconds = profile.get("gradsync.empty")
    if len(ranks_of_node) == 1:
        return seconds + reduce(2 * ranks * nbytes)
    # To the coordinator, its launch back, and the other nodes' words that they are done.
    seconds += 1.5 * profile.get("gradsync.peer")
    exchange = ring_all_reduce(nbytes, [1] * len(ranks_of_node), ring).seconds
    if ranks == 1:
        return seconds + exchange
    chunk = min(nbytes, profile.get("gradsync.chunk", math.inf))
    beside = reduce(2 * (ranks + 1) * (nbytes - chunk))
    return seconds + 2 * reduce((ranks + 1) * chunk) + max(exchange, beside)


def validate(
    rows: Sequence[dict[str, Any]],
    profile: Profile,
    least_bytes: int = 0,
    one_machine: bool = True,
    ranks_per_node: bool = False,
) -> Validation:
    """Compares what can be compared.

    Args:
      rows: of read_rows().
      profile: the machine's.
      least_bytes: all-reduces of fewer are passed over.
      one_machine: several nodes are namespaces of one machine, which share its memory.
      ranks_per_node: the rows count the ranks of a node, not of all nodes.

    Raises:
      Refused: nothing could be compared, or a row lacks what it needs.
    """
    if ranks_per_node:
        rows = [
            {**row, "ranks": row["ranks"] * row.get("nodes", 1)} if "ranks" in row else row
            for row in rows
        ]
    compared = []
    passed_over = []
    for number, row in enumerate(rows, start=1):
        name = f"row {number} ({row.get('impl', '?')})"
        try:
            reason, result = _compare(row, rows, profile, least_bytes, one_machine)
        except (KeyError, TypeError, ValueError) as error:
            raise Refused(f"{name} is no measurement: {error!r}") from error
        if result is None:
            passed_over.append(f"{name}: {reason}")
        else:
            compared.append(result)
    if not compared:
        raise Refused("nothing to compare: " + ("; ".join(passed_over) or "no rows"))
    return Validation(tuple(compared), tuple(passed_over))


def _compare(
    row: dict[str, Any],
    rows: Sequence[dict[str, Any]],
    profile: Profile,
    least_bytes: int,
    one_machine: bool,
) -> tuple[str, Optional[Compared]]:
    nodes, ranks = int(row.get("nodes", 1)), int(row["ranks"])
    if nodes < 1 or ranks % nodes:
        raise ValueError(f"{ranks} ranks do not fill {nodes} nodes evenly")
    where = profile
    rate = row.get("rate")
    if rate is not None:
        gbits = parse_rate(str(rate))
        if gbits is None:
            raise ValueError(f"'{rate}' is no rate like 1gbit")
        # Of payload: 1448 of 1538 bytes on an Ethernet, of 1514 in a shaper of namespaces.
        efficiency = profile.get("link.efficiency", 1448 / 1514 if one_machine else 0.9415)
        where = profile.with_values({"link.rate": gbits, "link.efficiency": efficiency}, "the row")
    if one_machine and nodes > 1 and "gradsync.reduce" in where.values:
        shared = where.values["gradsync.reduce"].value / nodes
        where = where.with_values({"gradsync.reduce": shared}, "nodes share the memory")
    place = f"{ranks} ranks on {nodes} node{'s' if nodes > 1 else ''}"
    place += f" at {rate}" if rate is not None else ""
    if "step_ms_p50" in row:
        return _compare_step(row, rows, where, place, nodes)
    return _compare_all_reduce(row, where, place, nodes, least_bytes)


def _compare_all_reduce(
    row: dict[str, Any], profile: Profile, place: str, nodes: int, least_bytes: int
) -> tuple[str, Optional[Compared]]:
    if row.get("op", "allreduce") != "allreduce":
        return f"no all-reduce but {row['op']}", None
    backend, nbytes = row["impl"], int(row["bytes"])
    if backend not in profile.backends:
        return "not in the profile", None
    if nbytes < least_bytes:
        return f"{nbytes} bytes are fewer than {least_bytes}", None
    placed = [int(row["ranks"]) // nodes] * nodes
    measured = _positive(_median_us(row))
    placement = str(row.get("placement", PLACEMENTS[0]))
    if placement not in PLACEMENTS:
        raise ValueError(f"'{placement}' is none of {', '.join(PLACEMENTS)}")
    place += ", alternating" if placement == "alternate" else ""
    predicted = all_reduce_seconds(profile, backend, nbytes, placed, placement) * 1e6
    return "", Compared(f"{backend} {_size(nbytes)}, {place}", "us", predicted, measured)


def _compare_step(
    row: dict[str, Any],
    rows: Sequence[dict[str, Any]],
    profile: Profile,
    place: str,
    nodes: int,
) -> tuple[str, Optional[Compared]]:
    backend = _STEP_BACKENDS.get(row["impl"])
    if backend is None:
        return "nothing to predict", None
    if backend not in profile.backends:
        return "not in the profile", None
    same = [
        other
        for other in rows
        if (other.get("model"), other.get("ranks")) == (row["model"], row["ranks"])
        and "step_ms_p50" in other
    ]
    alone = [other for impl in _ALONE for other in same if other.get("impl") == impl]
    if not alone:
        return "no row of the module alone", None
    tensors = max(1, round(int(row["parameters"]) * 4 / _TENSOR_BYTES))
    model = uniform(row["model"], [int(row["parameters"]) * 4 // tensors] * tensors)
    predicted = run(
        Setup(
            model,
            profile,
            backend,
            int(row["ranks"]),
            compute=Compute(_positive(alone[0]["step_ms_p50"]) * 1e-3, 0.0),
            ranks_of_node=int(row["ranks"]) // nodes,
        )
    ).step
    what = f"step of {row['model']} with {row['impl']}, {place}"
    return "", Compared(what, "ms", predicted * 1e3, _positive(row["step_ms_p50"]))


def _median_us(row: dict[str, Any]) -> Any:
    if "time_us_p50" in row:
        return row["time_us_p50"]
    time = row["time_us"]
    return time["p50"] if isinstance(time, dict) else time


def _positive(value: Any) -> float:
    number = float(value)
    if not number > 0:
        raise ValueError(f"{value} is no time")
    return number


def _size(nbytes: int) -> str:
    for unit, factor in (("MiB", MIB), ("KiB", 1024)):
        if nbytes >= factor and nbytes % factor == 0:
            return f"{nbytes // factor} {unit}"
    return f"{nbytes} B"
