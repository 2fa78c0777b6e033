"""The outcome of a training with faults: which happened, in which phase, how long they took."""

from __future__ import annotations

import dataclasses
from collections import Counter
from collections.abc import Mapping, Sequence
from typing import Any, Optional

from chain import Difference, Link, first_difference
from fault_log import DIES, FACT
from faults import COMMITTED, ENDED, LEAVE, MARKED, SOURCE, Fault, Round

# A rank dies after it has ended the step, and before it has written its link of the step.
_AFTER_THE_END = (ENDED, COMMITTED, SOURCE)


@dataclasses.dataclass
class Death:
    """A fault that happened.

    Attributes:
      fault: as planned.
      phase: in which it happened: as planned, but MARKED if its EndStep has not arrived.
      rank: who died.
      pid: likewise.
      step: in which.
      reduced: buckets of the step that were reduced before; at least one was not.
      known_ms: from the signal or exception until the daemon knew that connection or process had
        ended; None: its log does not say.
      back_in: step in which its replacement began; None: there was none, or it died before.
    """

    fault: Fault
    phase: str
    rank: int
    pid: int
    step: int
    reduced: int
    known_ms: Optional[float] = None
    back_in: Optional[int] = None


@dataclasses.dataclass
class Return:
    """A replacement that completed a step, in which no other rank died meanwhile.

    Attributes:
      rank: whose place it took.
      step: its first.
      beside_ms: from its Join to the step's completion, without its own forward and backward pass.
      transfer_ms: of that, while the state came.
    """

    rank: int
    step: int
    beside_ms: float
    transfer_ms: float


@dataclasses.dataclass
class Outcome:
    """What happened in one training with faults.

    Attributes:
      deaths: in order.
      returns: in order.
      difference: the first one from the training without faults; None: none.
      complaints: what else is wrong.
    """

    deaths: list[Death]
    returns: list[Return]
    difference: Optional[Difference]
    complaints: list[str]

    def fault_before(self, step: int) -> str:
        """The last death up to the step, in words."""
        before = [death for death in self.deaths if death.step <= step]
        return str(before[-1].fault) if before else "no fault"


def assess(
    planned: Round,
    wanted: Sequence[Link],
    found: Sequence[Link],
    lines: Sequence[Mapping[str, Any]],
    ends: Sequence[Mapping[str, Any]],
) -> Outcome:
    """Compares a training with its plan and with the training without faults.

    Args:
      planned: what should happen.
      wanted: the chain without faults.
      found: the chain with them.
      lines: of the fault log.
      ends: of the daemon's log: its lines about sessions of this training that ended.
    """
    by_number = {fault.number: fault for fault in planned.faults}
    deaths = [
        Death(
            by_number[line["fault"]],
            by_number[line["fault"]].phase,
            line["rank"],
            line["pid"],
            line["step"],
            line["reduced"],
        )
        for line in lines
        if line["event"] == DIES
    ]
    for death, line in zip(deaths, (line for line in lines if line["event"] == DIES)):
        death.known_ms = _known_ms(line, ends)
    for death in deaths:
        death.back_in = _back_in(death, lines)
        if death.phase == ENDED and death.back_in == death.step:
            death.phase = MARKED
    excused: dict[int, list[int]] = {}
    for death in deaths:
        if death.phase in _AFTER_THE_END:
            excused.setdefault(death.rank, []).append(death.step)
    # The end of the training, which a rank notes before it leaves.
    repeated = {d.rank: [planned.steps + 1] for d in deaths if d.phase == LEAVE}
    return Outcome(
        deaths,
        _returns(lines),
        first_difference(wanted, found, excused, repeated),
        _complaints(planned, deaths, found, lines),
    )


def _known_ms(line: Mapping[str, Any], ends: Sequence[Mapping[str, Any]]) -> Optional[float]:
    for end in ends:
        if f"(pid {line['pid']})" in end["why"] and end["unix_ns"] >= line["unix_ns"]:
            return float(end["unix_ns"] - line["unix_ns"]) / 1e6
    return None


def _back_in(death: Death, lines: Sequence[Mapping[str, Any]]) -> Optional[int]:
    """The first step of the next process of its rank that began one, unless that one died first."""
    found = False
    for line in lines:
        if line["event"] == DIES and line["rank"] == death.rank and found:
            return None
        if line["event"] == DIES and line["pid"] == death.pid:
            found = True
        if found and line["event"] == FACT and "begins" in line and line["rank"] == death.rank:
            step: int = line["begins"]
            return step
    return None


def _returns(lines: Sequence[Mapping[str, Any]]) -> list[Return]:
    """Those that waited for no further death."""
    returns = []
    fetched: dict[int, int] = {}  # by process: which line said that it has the state
    for place, line in enumerate(lines):
        if "fetched" in line:
            fetched[line["pid"]] = place
        if "beside_ms" in line:
            meanwhile = lines[fetched.get(line["pid"], place) : place]
            if not any(other["event"] == DIES for other in meanwhile):
                returns.append(
                    Return(line["rank"], line["step"], line["beside_ms"], line["transfer_ms"])
                )
    return returns


def _complaints(
    planned: Round,
    deaths: Sequence[Death],
    found: Sequence[Link],
    lines: Sequence[Mapping[str, Any]],
) -> list[str]:
    complaints = []
    happened = {death.fault.number for death in deaths}
    for fault in planned.faults:
        if fault.number not in happened:
            complaints.append(f"did not happen: {fault}")
    for death in deaths:
        wanted = death.step + 1 if death.phase in _AFTER_THE_END else death.step
        if death.back_in is not None and death.phase != LEAVE and death.back_in != wanted:
            complaints.append(
                f"{death.fault}: its replacement began in step {death.back_in}, not {wanted}"
            )
    dead = Counter(death.rank for death in deaths)
    pids: dict[int, list[int]] = {}
    for link in found:
        known = pids.setdefault(link.rank, [])
        if link.pid not in known:
            known.append(link.pid)
    for rank, known in pids.items():
        if len(known) > 1 + dead[rank]:
            complaints.append(f"rank {rank} had {len(known)} processes and {dead[rank]} deaths")
    for line in lines:
        if line["event"] == FACT and line.get("void"):
            complaints.append(f"rank {line['rank']} saw {line['void']} void steps")
        if line["event"] == FACT and line.get("wrong"):
            complaints.append(f"rank {line['rank']}, step {line['step']}: {line['wrong']}")
    return complaints
