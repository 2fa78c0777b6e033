"""The figures of gradsync-bench's collectives: rows, as a table and as JSON."""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping, Sequence
from typing import Any, Optional

from contest import Score
from quantile import quantile
from units import bits_per_second, format_byte_size

ITEM_BYTES = {"float32": 4, "float64": 8, "float16": 2, "bfloat16": 2}
# The implementations with which each of gradsync's is compared below a size's rows.
_COMPARED = ("gloo", "openmpi", "nccl", "gloo_py", "deepspeed")
_LINE = "# {:>10} {:>11} {:>9} {:>14} {:>9} {:>9} {:>9} {:>8} {:>8} {:>8} {:>11} {:>10}"


@dataclasses.dataclass(frozen=True)
class Run:
    """What all rows of a run have in common.

    Attributes:
      ranks: of all nodes.
      nodes: how many.
      gpus: how many; 0: host memory.
      dtype: of the elements.
      rate: of each node's link, each way, as "1gbit"; None: unlimited.
      collective: "all_reduce", "all_gather" or "reduce_scatter".
    """

    ranks: int
    nodes: int = 1
    gpus: int = 0
    dtype: str = "float32"
    rate: Optional[str] = None
    collective: str = "all_reduce"


def table_head(run: Run) -> str:
    """Names and units of the columns."""
    names = ("size", "count", "type", "impl", "time p10", "p50", "p99", "algbw", "busbw", "#wrong")
    units = ("(B)", "(elements)", "", "", "(us)", "(us)", "(us)", "(GB/s)", "(GB/s)", "")
    ratio = ("wire", "") if run.nodes > 1 else ("ratio", "p50  p10")
    return "\n".join(
        _LINE.format(*words) for words in ((*names, ratio[0], "cpu"), (*units, ratio[1], "(s)"))
    )


def rows_of(scores: Mapping[str, Score], nbytes: int, run: Run) -> list[dict[str, Any]]:
    """A row for each implementation, as --json writes it.

    roofline_ratio is the roofline's time / this time, in pairs of the same iteration; null without
    a roofline. wire_utilisation is the share of the p50 for which a node's link must be busy, each
    way, without headers; null where links are unlimited.
    """
    roofline = scores.get("roofline")
    rows = []
    for score in scores.values():
        p50 = score.p50()
        algbw = nbytes / p50 / 1e3
        ratios = None if roofline is None else score.ratios(roofline)
        row = {
            "collective": run.collective,
            "impl": score.name,
            "bytes": nbytes,
            "ranks": run.ranks,
            "nodes": run.nodes,
            "rate": run.rate,
            "dtype": run.dtype,
            "time_us_p10": quantile(score.times_us, 0.1),
            "time_us_p50": p50,
            "time_us_p99": quantile(score.times_us, 0.99),
            "algbw_gbps": algbw,
            "busbw_gbps": algbw * _sent(run.ranks, run.collective),
            "wrong": score.wrong,
            "cpu_seconds": sum(turn.cpu_ns for turn in score.turns) / 1e9 / len(score.turns),
            "roofline_ratio_p50": None if ratios is None else quantile(ratios, 0.5),
            "roofline_ratio_p10": None if ratios is None else quantile(ratios, 0.1),
            "wire_utilisation": _wire_seconds(nbytes, run) / (p50 / 1e6) if run.rate else None,
        }
        if run.gpus:
            # k buffers are read and written; between GPUs staging, too.
            moved = 2 * (run.ranks // run.gpus + (1 if run.gpus > 1 else 0))
            row["gpus"] = run.gpus
            row["moved_gbps"] = algbw * moved if score.name in ("roofline", "kernels") else None
        rows.append(row)
    return rows


def table_row(row: Mapping[str, Any]) -> str:
    """A row as a line of the table."""
    ratio = "-"
    if row["roofline_ratio_p50"] is not None:
        ratio = f"{row['roofline_ratio_p50']:.2f} {row['roofline_ratio_p10']:.2f}"
    if row["wire_utilisation"] is not None:
        ratio = f"{row['wire_utilisation']:.3f}"
    return _LINE.replace("#", " ", 1).format(
        row["bytes"],
        row["bytes"] // ITEM_BYTES[row["dtype"]],
        row["dtype"],
        row["impl"],
        f"{row['time_us_p10']:.1f}",
        f"{row['time_us_p50']:.1f}",
        f"{row['time_us_p99']:.1f}",
        f"{row['algbw_gbps']:.2f}",
        f"{row['busbw_gbps']:.2f}",
        row["wrong"],
        ratio,
        f"{row['cpu_seconds']:.6f}",
    )


def comparisons(scores: Mapping[str, Score], rows: Sequence[Mapping[str, Any]]) -> list[str]:
    """How a GPU's kernels compare with copies, and gradsync with the others."""
    size = format_byte_size(rows[0]["bytes"])
    lines = [
        f"{size}: kernels move {row['moved_gbps']:.1f} GB/s, "
        f"{row['roofline_ratio_p50']:.2f} of what copies do"
        for row in rows
        if row["impl"] == "kernels" and row["roofline_ratio_p50"] is not None
    ]
    for ours in ("gradsync", "gradsync_py", "gradsync_group"):
        if ours not in scores:
            continue
        others = [name for name in _COMPARED if name in scores]
        if others:
            texts = (f"{scores[ours].speed(scores[o]):.2f} times as fast as {o}" for o in others)
            lines.append(
                f"{size}: {ours} is {', '.join(texts)} (median over pairs of the same iteration)"
            )
    return lines


def _sent(members: int, collective: str) -> float:
    """What each of `members` must send, and receive, as a multiple of the larger buffer."""
    return (2 if collective == "all_reduce" else 1) * (members - 1) / members


def _wire_seconds(nbytes: int, run: Run) -> float:
    assert run.rate is not None
    return 8 * nbytes * _sent(run.nodes, run.collective) / bits_per_second(run.rate)
