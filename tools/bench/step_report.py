"""What step.py makes of its rounds: figures, a table, rows of JSON and a picture."""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping, Sequence
from typing import Any, Optional

import bar_chart
from bit_rate import bits_per_second
from quantile import median, quantile

# Of DDP + Gloo's step beyond ddp_noop, at most: of a model that is large enough, with 2 ranks.
REACHES = {"gradsync": 0.2, "gradsync_hook": 0.5}
_REACH_MODEL = "communication_heavy"
_REACH_PARAMETERS = 25_000_000
_REACH_RANKS = 2

# Parameters are float32.
_GRADIENT_BYTES = 4

# What the CPU seconds are of.
CPU_STEPS = 100

# Of the larger of the computation and the wire's time, at most: a step over links of a known rate.
LIMIT_REACH = 1.15
# What Linux counts for a link's rate: Ethernet's and IPv4's and TCP's headers, timestamps, around
# 1448 bytes.
_BYTES_WITH_HEADERS = 1514 / 1448

_LABELS = {
    "bare": "module alone",
    "ddp_noop": "DDP, no communication",
    "gradsync": "gradsync",
    "gradsync_hook": "DDP + gradsync's hook",
    "ddp_gloo": "DDP + Gloo",
}
_FILLS = {
    "gradsync": bar_chart.OURS,
    "gradsync_hook": bar_chart.OURS_TOO,
    "ddp_gloo": bar_chart.OTHER,
}


@dataclasses.dataclass
class Measured:
    """One implementation's steps of one model.

    Attributes:
      rounds_ms: per round, the slowest rank's median step.
      steps_ms: every step of every rank and round.
      cpu: per round, CPU seconds of CPU_STEPS steps, of all ranks and the daemon together.
      outside_ms: per round, the slowest rank's median of what is not the backward pass.
    """

    rounds_ms: list[float] = dataclasses.field(default_factory=list)
    steps_ms: list[float] = dataclasses.field(default_factory=list)
    cpu: list[float] = dataclasses.field(default_factory=list)
    outside_ms: list[float] = dataclasses.field(default_factory=list)

    def add_round(
        self,
        steps_ms_of_ranks: Sequence[Sequence[float]],
        outside_ms_of_ranks: Sequence[Sequence[float]],
        cpu_seconds: float,
    ) -> None:
        """Adds one.

        Args:
          steps_ms_of_ranks: as many of each rank.
          outside_ms_of_ranks: of each step, what is not the backward pass.
          cpu_seconds: of all of them together.
        """
        self.rounds_ms.append(max(median(steps) for steps in steps_ms_of_ranks))
        self.outside_ms.append(max(median(times) for times in outside_ms_of_ranks))
        for steps in steps_ms_of_ranks:
            self.steps_ms.extend(steps)
        self.cpu.append(cpu_seconds / len(steps_ms_of_ranks[0]) * CPU_STEPS)

    @property
    def step_ms_p50(self) -> float:
        """The median over the rounds."""
        return median(self.rounds_ms)

    @property
    def cpu_seconds(self) -> float:
        """The median over the rounds."""
        return median(self.cpu)


@dataclasses.dataclass(frozen=True)
class ModelSize:
    """What a model is.

    Attributes:
      what: in a few words.
      parameters: how many it has.
      batch: samples per rank and step.
    """

    what: str
    parameters: int
    batch: int


@dataclasses.dataclass(frozen=True)
class ModelResult:
    """Every implementation's steps of one model.

    Attributes:
      model: its name.
      size: what it is.
      ranks: how many trained it.
      measured: by implementation, in the table's order.
      difference: the greatest one between parameters that must be the same.
      nodes: how many the ranks were on.
      rate: of each node's link, each way, as "1gbit"; None: as fast as memory, or no link.
    """

    model: str
    size: ModelSize
    ranks: int
    measured: Mapping[str, Measured]
    difference: float
    nodes: int = 1
    rate: Optional[str] = None

    @property
    def counts(self) -> bool:
        """Whether it is what REACHES are about."""
        return (
            self.model == _REACH_MODEL
            and self.nodes == 1
            and self.size.parameters >= _REACH_PARAMETERS
            and self.ranks == _REACH_RANKS
        )

    def share_of_gloo(self, implementation: str, beyond: str) -> Optional[list[float]]:
        """How long a step takes beyond `beyond`, as a share of what DDP + Gloo's does: per round.

        None where one of them was not measured, or Gloo's is not beyond in some round.
        """
        if not {implementation, beyond, "ddp_gloo"} <= self.measured.keys():
            return None
        shares = []
        for step, base, gloo in zip(
            self.measured[implementation].rounds_ms,
            self.measured[beyond].rounds_ms,
            self.measured["ddp_gloo"].rounds_ms,
        ):
            if gloo <= base:
                return None
            shares.append((step - base) / (gloo - base))
        return shares

    def beyond_ms(self, implementation: str, base: str) -> Optional[float]:
        """Milliseconds of a step beyond another implementation's: median over the rounds."""
        if implementation not in self.measured or base not in self.measured:
            return None
        pairs = zip(self.measured[implementation].rounds_ms, self.measured[base].rounds_ms)
        return median(step - other for step, other in pairs)

    @property
    def wire_ms(self) -> Optional[float]:
        """What a step's gradients take on a node's link: the fewest bytes, without headers.

        An all-reduce over n nodes sends 2(n-1)/n of its buffer over each link, each way.
        """
        if self.rate is None:
            return None
        gradients = _GRADIENT_BYTES * self.size.parameters
        return 8e3 * gradients * 2 * (self.nodes - 1) / self.nodes / bits_per_second(self.rate)

    def of_limit(self, implementation: str) -> Optional[float]:
        """A step as a share of the larger of the module's own and the wire's: median of rounds."""
        wire_ms = self.wire_ms
        if wire_ms is None or not {implementation, "bare"} <= self.measured.keys():
            return None
        pairs = zip(self.measured[implementation].rounds_ms, self.measured["bare"].rounds_ms)
        return median(step / max(bare, wire_ms) for step, bare in pairs)

    @property
    def floor(self) -> Optional[float]:
        """The least that of_limit can be: median of rounds."""
        wire_ms = self.wire_ms
        if wire_ms is None or "bare" not in self.measured:
            return None
        bare = self.measured["bare"]
        on_wire_ms = wire_ms * _BYTES_WITH_HEADERS
        pairs = zip(bare.rounds_ms, bare.outside_ms)
        return median(
            max(step, outside + on_wire_ms) / max(step, wire_ms) for step, outside in pairs
        )

    def of_gloo(self, implementation: str) -> Optional[float]:
        """A step's time as a share of DDP + Gloo's: median over the rounds."""
        if "ddp_gloo" not in self.measured:
            return None
        pairs = zip(self.measured[implementation].rounds_ms, self.measured["ddp_gloo"].rounds_ms)
        return median(step / gloo for step, gloo in pairs)


def _number(value: Optional[float], digits: int) -> str:
    return "-" if value is None else f"{value:.{digits}f}"


def table_head() -> str:
    """Names and units of the columns."""
    names = ("model", "impl", "step p50", "p10", "p90", "of gloo", "> bare", "> noop", "cpu")
    units = ("", "", "(ms)", "(ms)", "(ms)", "", "(ms)", "(ms)", f"(s/{CPU_STEPS})")
    return "\n".join(
        "# {:<20} {:<14} {:>9} {:>8} {:>8} {:>8} {:>8} {:>8} {:>9}".format(*words)
        for words in (names, units)
    )


def table_rows(result: ModelResult) -> str:
    """A line for each implementation."""
    return "\n".join(
        f"  {result.model:<20} {name:<14} {measured.step_ms_p50:>9.2f} "
        f"{quantile(measured.steps_ms, 0.1):>8.2f} {quantile(measured.steps_ms, 0.9):>8.2f} "
        f"{_number(result.of_gloo(name), 3):>8} {_number(result.beyond_ms(name, 'bare'), 2):>8} "
        f"{_number(result.beyond_ms(name, 'ddp_noop'), 2):>8} {measured.cpu_seconds:>9.3f}"
        for name, measured in result.measured.items()
    )


def verdicts(result: ModelResult) -> list[str]:
    """What gradsync costs compared with Gloo, and whether that is as little as it should be."""
    lines = []
    for implementation, reach in REACHES.items():
        limit = result.of_limit(implementation)
        if limit is not None:
            bare_ms = result.measured["bare"].step_ms_p50
            met = "met" if limit <= LIMIT_REACH else "NOT met"
            lines.append(
                f"{result.model}, {implementation}: {limit:.3f} of the larger of computation "
                f"({bare_ms:.0f} ms) and wire ({result.wire_ms:.0f} ms), reach at most "
                f"{LIMIT_REACH}: {met}; no step can be below {result.floor:.3f}"
            )
        texts = []
        for base in ("ddp_noop", "bare"):
            shares = result.share_of_gloo(implementation, base)
            if shares is None:
                continue
            text = f"beyond {base} {median(shares):.2f} of DDP + Gloo's"
            text += f" (rounds {min(shares):.2f} to {max(shares):.2f})"
            if base == "ddp_noop" and result.counts:
                met = "met" if median(shares) <= reach else "NOT met"
                text += f", reach at most {reach:.2f}: {met}"
            texts.append(text)
        if texts:
            lines.append(f"{result.model}, {implementation}: {'; '.join(texts)}")
    return lines


def to_json(result: ModelResult) -> list[dict[str, Any]]:
    """A row for each implementation."""
    rows = []
    for name, measured in result.measured.items():
        beyond_noop = result.share_of_gloo(name, "ddp_noop")
        beyond_bare = result.share_of_gloo(name, "bare")
        rows.append(
            {
                "model": result.model,
                "impl": name,
                "step_ms_p50": measured.step_ms_p50,
                "cpu_seconds": measured.cpu_seconds,
                "step_ms_p10": quantile(measured.steps_ms, 0.1),
                "step_ms_p90": quantile(measured.steps_ms, 0.9),
                "rounds_ms": measured.rounds_ms,
                "of_ddp_gloo": result.of_gloo(name),
                "share_beyond_ddp_noop": None if beyond_noop is None else median(beyond_noop),
                "share_beyond_bare": None if beyond_bare is None else median(beyond_bare),
                "of_limit": result.of_limit(name),
                "floor": result.floor,
                "wire_ms": result.wire_ms,
                "ranks": result.ranks,
                "nodes": result.nodes,
                "rate": result.rate,
                "parameters": result.size.parameters,
                "batch": result.size.batch,
            }
        )
    return rows


def picture(results: Sequence[ModelResult], machine: str) -> str:
    """An SVG: a group of bars for each model."""
    groups = []
    for result in results:
        bars = []
        for name, measured in result.measured.items():
            beyond = result.beyond_ms(name, "bare")
            bars.append(
                bar_chart.Bar(
                    label=_LABELS[name],
                    value=measured.step_ms_p50,
                    text=f"{measured.step_ms_p50:.1f} ms",
                    remark="" if name == "bare" or beyond is None else f"{beyond:+.1f} ms",
                    fill=_FILLS.get(name, bar_chart.REFERENCE),
                    low=quantile(measured.steps_ms, 0.1),
                    high=quantile(measured.steps_ms, 0.9),
                )
            )
        size = result.size
        text = f"{size.parameters / 1e6:.1f} M parameters, batch {size.batch}: {size.what}"
        groups.append(bar_chart.Group(result.model.replace("_", " "), text, bars))
    where = f"{results[0].ranks} ranks"
    if results[0].nodes > 1:
        where += f" on {results[0].nodes} nodes"
    if results[0].rate is not None:
        where += f", links of {results[0].rate}"
    return bar_chart.bar_chart(
        f"One training step, {where}",
        "Median; lines from the 10th to the 90th percentile; pale figures: beyond the module alone",
        groups,
        [machine],
    )
