"""The figures of step.py: from rounds to a table and rows of JSON."""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping, Sequence
from typing import Any, Optional

from quantile import median, quantile
from units import bits_per_second

# Targets: at most this share of what DDP + Gloo adds to ddp_noop. They apply to one model with 2
# ranks.
TARGETS = {"gradsync": 0.2, "gradsync_hook": 0.5}
_TARGET_MODEL = "communication_heavy"
_TARGET_PARAMETERS = 25_000_000
_TARGET_RANKS = 2

# Target: while no rank is lost, a step with `hold` takes at most this share of one without.
HOLD_TARGET = 1.02

# Parameters are float32.
_GRADIENT_BYTES = 4

# CPU seconds are those of so many steps.
CPU_STEPS = 100

# Target over links of a known rate: a step takes at most this share of its limit, the larger of the
# computation and the wire's time.
LIMIT_TARGET = 1.15
# Linux counts headers for a link's rate: those of Ethernet, IPv4 and TCP with timestamps, around
# 1448 bytes.
_BYTES_WITH_HEADERS = 1514 / 1448


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
        """Adds a round.

        Args:
          steps_ms_of_ranks: the steps of each rank; all have as many.
          outside_ms_of_ranks: the part of each step that is not the backward pass.
          cpu_seconds: of all ranks and the daemon together.
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
        """Whether TARGETS apply."""
        return (
            self.model == _TARGET_MODEL
            and self.nodes == 1
            and self.size.parameters >= _TARGET_PARAMETERS
            and self.ranks == _TARGET_RANKS
        )

    def share_of_gloo(self, implementation: str, beyond: str) -> Optional[list[float]]:
        """What a step adds to one of `beyond`, divided by what DDP + Gloo's adds to it: per round.

        None if one of them was not measured, or if Gloo's adds nothing in some round.
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
        """How long a step's gradients take on a node's link: the fewest bytes, without headers.

        An all-reduce over n nodes sends 2(n-1)/n of its buffer over each link, each way.
        """
        if self.rate is None:
            return None
        gradients = _GRADIENT_BYTES * self.size.parameters
        return 8e3 * gradients * 2 * (self.nodes - 1) / self.nodes / bits_per_second(self.rate)

    def of_limit(self, implementation: str) -> Optional[float]:
        """A step as a share of its limit, the larger of bare's and the wire's: median of rounds."""
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

    def hold_shares(self) -> Optional[list[float]]:
        """A step with `hold` as a share of one without: per round; None: one was not measured."""
        if not {"gradsync", "gradsync_hold"} <= self.measured.keys():
            return None
        pairs = zip(self.measured["gradsync_hold"].rounds_ms, self.measured["gradsync"].rounds_ms)
        return [hold / without for hold, without in pairs]


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
    """What gradsync adds compared with Gloo, and whether the targets are met."""
    lines = []
    for implementation, target in TARGETS.items():
        limit = result.of_limit(implementation)
        if limit is not None:
            bare_ms = result.measured["bare"].step_ms_p50
            met = "met" if limit <= LIMIT_TARGET else "NOT met"
            lines.append(
                f"{result.model}, {implementation}: {limit:.3f} of the larger of computation "
                f"({bare_ms:.0f} ms) and wire ({result.wire_ms:.0f} ms), target at most "
                f"{LIMIT_TARGET}: {met}; no step can be below {result.floor:.3f}"
            )
        texts = []
        for base in ("ddp_noop", "bare"):
            if not {implementation, base, "ddp_gloo"} <= result.measured.keys():
                continue
            shares = result.share_of_gloo(implementation, base)
            if shares is None:
                texts.append(f"beyond {base} no share: DDP + Gloo's step was not longer in a round")
                continue
            text = f"beyond {base} {median(shares):.2f} of DDP + Gloo's"
            text += f" (rounds {min(shares):.2f} to {max(shares):.2f})"
            if base == "ddp_noop" and result.counts:
                met = "met" if median(shares) <= target else "NOT met"
                text += f", target at most {target:.2f}: {met}"
            texts.append(text)
        if texts:
            lines.append(f"{result.model}, {implementation}: {'; '.join(texts)}")
    shares = result.hold_shares()
    if shares is not None:
        text = f"{median(shares):.4f} of gradsync's step"
        text += f" (quartiles {quantile(shares, 0.25):.4f} and {quantile(shares, 0.75):.4f})"
        if result.size.parameters >= _TARGET_PARAMETERS:
            met = "met" if median(shares) <= HOLD_TARGET else "NOT met"
            text += f", target at most {HOLD_TARGET}: {met}"
        lines.append(f"{result.model}, gradsync_hold: {text}")
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
