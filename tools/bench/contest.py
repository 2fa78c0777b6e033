"""Implementations side by side: they take turns, in rotating order.

The processes of the others sleep meanwhile. On a shared machine whose memory is fast one second and
slow the next, only turns of the same iteration can be compared.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence
from typing import Any, Callable

from launcher import Failed
from quantile import median, quantile
from rank_team import RankTeam
from stage import Stage


@dataclasses.dataclass(frozen=True)
class Turn:
    """One all-reduce.

    Attributes:
      ranks: the answer of each, with its times on CLOCK_MONOTONIC.
      cpu_ns: CPU time of every process that took part. Filling, checking and --busy threads do not
        count.
      worker_ns: the part of it that gradsync's workers on GPUs have used.
    """

    ranks: Sequence[dict[str, Any]]
    cpu_ns: float
    worker_ns: float = 0.0

    @property
    def last(self) -> dict[str, Any]:
        """The answer of the rank that called last."""
        return max(self.ranks, key=lambda rank: rank["call_ns"])

    @property
    def time_ns(self) -> float:
        """From the last rank's call to its return.

        Where rank 0 alone works: what it took. The roofline measures from its first element to its
        last, a GPU by its own clock.
        """
        last = self.last
        time_ns: float = self.ranks[0].get("own_ns") or last["return_ns"] - last["call_ns"]
        return time_ns

    def until(self, key: str) -> list[float]:
        """Microseconds of each rank from its call to one of its times."""
        return [(rank[key] - rank["call_ns"]) / 1e3 for rank in self.ranks]


@dataclasses.dataclass
class Score:
    """The turns of one implementation.

    Attributes:
      name: of the implementation.
      turns: one for each iteration after the warm-up.
      wrong: elements, on any rank, warm-up included.
    """

    name: str
    turns: list[Turn] = dataclasses.field(default_factory=list)
    wrong: int = 0

    @property
    def times_us(self) -> list[float]:
        """Microseconds of each turn."""
        return [turn.time_ns / 1e3 for turn in self.turns]

    def ratios(self, other: Score) -> list[float]:
        """The other's time / this time, in pairs of the same iteration."""
        return [theirs / ours for ours, theirs in zip(self.times_us, other.times_us)]

    def speed(self, other: Score) -> float:
        """How many times as fast as the other this one is: the median over pairs."""
        return median(self.ratios(other))

    def p50(self) -> float:
        """Microseconds."""
        return quantile(self.times_us, 0.5)


def run_size(
    stage: Stage,
    teams: Sequence[RankTeam],
    nbytes: int,
    warmup: int,
    iterations: int,
    at_once: int,
    progress: Callable[[int], None],
) -> dict[str, Score]:
    """Measures all-reduces of buffers of one size.

    Every element is checked in the first and in the last turns, a sample in between.

    Args:
      stage: where the teams are.
      teams: one for each implementation.
      nbytes: of each rank's buffer.
      warmup: iterations before those that count.
      iterations: that count.
      at_once: how many turns a team takes before the next team does. It takes one more before them,
        which wakes its processes and is not timed.
      progress: called with the number of iterations that are done.

    Raises:
      Failed: says what the ranks and the daemons have said last.
    """
    scores = {team.name: Score(team.name) for team in teams}
    total = warmup + iterations
    try:
        for team in teams:
            team.call("set_up", nbytes=nbytes)
        for number, begin in enumerate(range(0, total, at_once)):
            count = min(at_once, total - begin)
            first = number % len(teams)
            check_all = begin == 0 or begin + count == total
            for team in [*teams[first:], *teams[:first]]:
                turns = _take(stage, team, begin + number, count + 1, check_all)
                score = scores[team.name]
                score.wrong += sum(rank["wrong"] for turn in turns for rank in turn.ranks)
                score.turns += turns[1 + max(0, warmup - begin) :]
            progress(count)
        for team in teams:
            team.call("tear_down")
    except Failed as error:
        raise stage.with_daemon_logs(error) from None
    return scores


def _take(stage: Stage, team: RankTeam, begin: int, count: int, check_all: bool) -> list[Turn]:
    is_ours = team.name.startswith("gradsync")
    helpers = stage.daemon_cpu_seconds if is_ours else team.launcher_cpu_seconds
    workers = stage.worker_cpu_seconds if is_ours else float
    before, workers_before = helpers(), workers()
    ranks = team.call("turns", begin=begin, count=count, check_all=check_all)
    helpers_ns = (helpers() - before) * 1e9 / count
    worker_ns = (workers() - workers_before) * 1e9 / count
    return [
        Turn(answers, helpers_ns + sum(rank["cpu_ns"] for rank in answers), worker_ns)
        for answers in zip(*ranks)
    ]
