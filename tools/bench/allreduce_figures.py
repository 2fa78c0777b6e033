"""What allreduce.py makes of its turns: figures, a table, rows of JSON and a picture."""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping, Sequence
from typing import Any, Optional

import bar_chart
from command_line import format_byte_size
from quantile import median, quantile

# How many times as fast as DeepSpeed's gradsync should be, by bytes, with 2 ranks.
REACH = 3.0
_REACH_BYTES = (25 << 20, 100 << 20)
_REACH_RANKS = 2

_LABELS = {"gradsync": "gradsync", "gloo": "Gloo", "deepspeed": "DeepSpeed"}
_FILLS = {
    "gradsync": bar_chart.OURS,
    "gloo": bar_chart.OTHER,
    "deepspeed": bar_chart.OTHER_TOO,
}


@dataclasses.dataclass
class Score:
    """One implementation's turns at one size.

    Attributes:
      times_us: of each iteration, from the last rank's call until that rank has the sum.
      cpu_seconds: of each, all ranks and the daemon together.
      wrong: elements, on any rank.
    """

    times_us: list[float] = dataclasses.field(default_factory=list)
    cpu_seconds: list[float] = dataclasses.field(default_factory=list)
    wrong: int = 0


@dataclasses.dataclass(frozen=True)
class SizeResult:
    """Every implementation's turns at one size.

    Attributes:
      nbytes: of each rank's buffer.
      ranks: how many.
      scores: by implementation; turns of the same iteration at the same place.
    """

    nbytes: int
    ranks: int
    scores: Mapping[str, Score]

    def slower(self, name: str) -> Optional[list[float]]:
        """How many times as long as gradsync it took: of each iteration."""
        if "gradsync" not in self.scores or name == "gradsync":
            return None
        pairs = zip(self.scores[name].times_us, self.scores["gradsync"].times_us)
        return [other / ours for other, ours in pairs]

    def algbw(self, name: str) -> float:
        """Size / median time, in 10^9 bytes a second."""
        return self.nbytes / median(self.scores[name].times_us) / 1e3


def table_head() -> str:
    """Names and units of the columns."""
    names = ("size", "count", "type", "impl", "time p50", "time p99", "algbw", "busbw", "#wrong")
    units = ("(B)", "(elements)", "", "", "(us)", "(us)", "(GB/s)", "(GB/s)", "")
    line = "# {:>10} {:>10} {:>8} {:>10} {:>10} {:>10} {:>8} {:>8} {:>7} {:>12} {:>10}"
    return line.format(*names, "/ gradsync", "cpu") + "\n" + line.format(*units, "p50   p10", "(s)")


def table_rows(result: SizeResult) -> str:
    """A line for each implementation."""
    lines = []
    for name, score in result.scores.items():
        ratios = result.slower(name)
        ratio = "-" if ratios is None else f"{median(ratios):.2f} {quantile(ratios, 0.1):.2f}"
        algbw = result.algbw(name)
        lines.append(
            f"  {result.nbytes:>10} {result.nbytes // 4:>10} {'float32':>8} {name:>10} "
            f"{median(score.times_us):>10.1f} {quantile(score.times_us, 0.99):>10.1f} "
            f"{algbw:>8.2f} {_busbw(algbw, result.ranks):>8.2f} {score.wrong:>7} {ratio:>12} "
            f"{_mean(score.cpu_seconds):>10.6f}"
        )
    return "\n".join(lines)


def verdicts(results: Sequence[SizeResult]) -> list[str]:
    """How much faster gradsync is, and whether that is as much as it should be."""
    lines = []
    for result in results:
        texts = []
        for name in result.scores:
            ratios = result.slower(name)
            if ratios is None:
                continue
            text = f"{median(ratios):.2f} times as fast as {name}"
            counts = result.ranks == _REACH_RANKS and result.nbytes in _REACH_BYTES
            if name == "deepspeed" and counts:
                met = "met" if median(ratios) >= REACH else "NOT met"
                text += f" (reach {REACH:.0f}: {met})"
            texts.append(text)
        if texts:
            lines.append(f"{format_byte_size(result.nbytes)}: gradsync is {', '.join(texts)}")
    return lines


def to_json(result: SizeResult) -> list[dict[str, Any]]:
    """A row for each implementation, with the keys of gradsync-bench's."""
    rows = []
    for name, score in result.scores.items():
        algbw = result.algbw(name)
        ratios = result.slower(name)
        rows.append(
            {
                "impl": name,
                "bytes": result.nbytes,
                "ranks": result.ranks,
                "dtype": "float32",
                "time_us_p50": median(score.times_us),
                "time_us_p99": quantile(score.times_us, 0.99),
                "algbw_gbps": algbw,
                "busbw_gbps": _busbw(algbw, result.ranks),
                "wrong": score.wrong,
                "cpu_seconds": _mean(score.cpu_seconds),
                "gradsync_ratio_p50": None if ratios is None else median(ratios),
                "gradsync_ratio_p10": None if ratios is None else quantile(ratios, 0.1),
            }
        )
    return rows


def picture(results: Sequence[SizeResult], machine: str) -> str:
    """An SVG: a group of bars for each size."""
    groups = []
    for result in results:
        bars = []
        for name, score in result.scores.items():
            p50 = median(score.times_us)
            ratios = result.slower(name)
            bars.append(
                bar_chart.Bar(
                    label=_LABELS[name],
                    value=p50,
                    text=f"{p50 / 1e3:.2f} ms" if p50 >= 1e3 else f"{p50:.0f} us",
                    remark="" if ratios is None else _times(median(ratios)),
                    fill=_FILLS[name],
                    low=quantile(score.times_us, 0.1),
                    high=quantile(score.times_us, 0.9),
                )
            )
        groups.append(bar_chart.Group(_long_byte_size(result.nbytes), "", bars))
    return bar_chart.bar_chart(
        f"All-reduce of float32, {results[0].ranks} ranks",
        "Median; lines from the 10th to the 90th percentile; pale: as a multiple of gradsync",
        groups,
        [machine],
    )


def _times(ratio: float) -> str:
    digits = 1 if ratio >= 1 else 2
    return f"\N{MULTIPLICATION SIGN} {ratio:.{digits}f}"


def _long_byte_size(nbytes: int) -> str:
    short = format_byte_size(nbytes)
    return f"{short} B" if short.isdecimal() else f"{short[:-1]} {short[-1]}iB"


def _busbw(algbw: float, ranks: int) -> float:
    return algbw * 2 * (ranks - 1) / ranks


def _mean(values: Sequence[float]) -> float:
    return sum(values) / len(values)
