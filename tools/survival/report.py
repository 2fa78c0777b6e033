"""The figures of all trainings together: a table, and the same as JSON."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import Any, Optional

from faults import KILL, NAMES, PHASES, RAISE, STOP
from outcome import Death, Outcome, Return
from quantile import quantile

_NAME_OF = {phase: name for name, phase in NAMES.items()}


class Report:
    """Sums up outcomes.

    Attributes:
      trainings: with faults, so far.

    Args:
      phases: each of which must have had a fault.
      kinds: of deaths, each of which must have happened.
      quotas: whether to check that, and that half of the faults had a reduced bucket.
    """

    def __init__(
        self,
        phases: Sequence[str] = PHASES,
        kinds: Sequence[str] = (KILL,),
        quotas: bool = True,
    ) -> None:
        self._phases = phases
        self._kinds = kinds
        self._quotas = quotas
        self.trainings = 0
        self._equal = 0
        self._deaths: list[Death] = []
        self._returns: list[Return] = []
        self._failures: list[str] = []
        self._seen: dict[str, str] = {}
        self._broke_off = False

    def add(self, name: str, outcome: Outcome) -> None:
        """One training with faults; `name` says which."""
        self.trainings += 1
        self._deaths += outcome.deaths
        self._returns += outcome.returns
        if outcome.difference is None:
            self._equal += 1
        else:
            self._failures.append(
                f"{name}: the chains differ: {outcome.difference}; before it: "
                + outcome.fault_before(outcome.difference.step)
            )
        self._failures += [f"{name}: {text}" for text in outcome.complaints]

    def see(self, broken: str, difference: str) -> None:
        """A part was broken on purpose, and the chain has shown it."""
        self._seen[broken] = difference

    def fail(self, text: str) -> None:
        """A training broke off, or something else is wrong: phases do not count any more."""
        self._failures.append(text)
        self._broke_off = True

    def failures(self) -> list[str]:
        """What is wrong, in words."""
        failures = list(self._failures)
        if not self._quotas or self._broke_off:
            return failures
        for phase in self._phases:
            if not self._in(phase):
                failures.append(f"no fault happened in the phase '{phase}'")
        for kind in self._kinds:
            if not self._by(kind):
                failures.append(f"no trainer died by {kind}")
        if self._deaths and 2 * self._with_reduced() < len(self._deaths):
            failures.append(
                f"only {self._with_reduced()} of {len(self._deaths)} faults had a reduced bucket "
                "and a waiting one; half of them must"
            )
        return failures

    def json(self) -> dict[str, Any]:
        """Every figure."""
        return {
            "trainings": self.trainings,
            "equal_chains": self._equal,
            "faults": len(self._deaths),
            "faults_by_phase": {_NAME_OF[phase]: self._in(phase) for phase in self._phases},
            "faults_with_a_reduced_and_a_waiting_bucket": self._with_reduced(),
            "faults_by_kind": {kind: self._by(kind) for kind in (KILL, STOP, RAISE)},
            "faults_of_rank_0": sum(d.rank == 0 for d in self._deaths),
            "faults_at_one_moment": sum(len(d.fault.together) > 1 for d in self._deaths),
            "death_known_ms": _quantiles(self._known(KILL)),
            "closed_after_exception_known_ms": _quantiles(self._known(RAISE)),
            "join_to_completion_beside_own_passes_ms": _quantiles(
                [r.beside_ms for r in self._returns]
            ),
            "transfer_ms": _quantiles([r.transfer_ms for r in self._returns]),
            "breaks_seen": self._seen,
            "failures": self.failures(),
        }

    def table(self) -> list[str]:
        """For people."""
        figures = self.json()
        lines = [f"{'phase':38} faults"]
        lines += [f"  {phase:36} {self._in(phase):6}" for phase in self._phases]
        lines += [
            f"{'all':38} {figures['faults']:6}",
            f"  {'with a reduced and a waiting bucket':36} {self._with_reduced():6}",
            f"  {'of rank 0':36} {figures['faults_of_rank_0']:6}",
            f"  {'of several ranks at one moment':36} {figures['faults_at_one_moment']:6}",
            f"  {'by SIGSTOP':36} {self._by(STOP):6}",
            f"  {'by an exception':36} {self._by(RAISE):6}",
            "",
            f"{'milliseconds':38}    p50      p99      max      n",
            _row("death known (SIGKILL)", self._known(KILL)),
            _row("closed connection known (exception)", self._known(RAISE)),
            _row("Join to completion, beside own passes", [r.beside_ms for r in self._returns]),
            _row("of that, the state's transfer", [r.transfer_ms for r in self._returns]),
            "",
            f"chains equal to the one without faults: {self._equal} of {self.trainings}",
        ]
        lines += [f"break '{name}' is seen: {what}" for name, what in self._seen.items()]
        return lines

    def _in(self, phase: str) -> int:
        return sum(death.phase == phase for death in self._deaths)

    def _with_reduced(self) -> int:
        return sum(death.reduced > 0 for death in self._deaths)

    def _by(self, kind: str) -> int:
        return sum(death.fault.how == kind for death in self._deaths)

    def _known(self, kind: str) -> list[float]:
        return [
            death.known_ms
            for death in self._deaths
            if death.known_ms is not None and death.fault.how == kind
        ]


def _quantiles(samples: Sequence[float]) -> Optional[dict[str, float]]:
    if not samples:
        return None
    return {
        "p50": round(quantile(samples, 0.5), 3),
        "p99": round(quantile(samples, 0.99), 3),
        "max": round(max(samples), 3),
        "n": len(samples),
    }


def _row(name: str, samples: Iterable[float]) -> str:
    found = _quantiles(list(samples))
    if found is None:
        return f"  {name:36}      -"
    return (
        f"  {name:36} {found['p50']:6.1f}   {found['p99']:6.1f}   {found['max']:6.1f} "
        f"{found['n']:6.0f}"
    )
