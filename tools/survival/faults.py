"""Which trainer dies where: a plan of faults, made from a seed."""

from __future__ import annotations

import dataclasses
import random
from collections import Counter
from collections.abc import Callable, Sequence
from typing import Any, Optional

# Where a trainer dies, in the words of a rank. Every one is a place in a step, except LEAVE.
BEFORE = "before the first mark"
MARKED = "marked"
REDUCED = "one bucket reduced, another waiting"
FLIGHT = "in flight"
ENDED = "ended"
COMMITTED = "committed, not delivered"
FETCH = "healing: fetches"
LOAD = "healing: loads"
CONFIRM = "healing: confirms"
COPY = "copying"
SOURCE = "source in mid-transfer"
LEAVE = "leaving"

PHASES = (
    BEFORE,
    MARKED,
    REDUCED,
    FLIGHT,
    ENDED,
    COMMITTED,
    FETCH,
    LOAD,
    CONFIRM,
    COPY,
    SOURCE,
    LEAVE,
)
# The short names of the command line.
NAMES = dict(
    zip(
        "before marked reduced flight ended committed fetch load confirm copy source leave".split(),
        PHASES,
    )
)
# A replacement, or the rank that heals it, dies in these.
_OF_HEALING = (FETCH, LOAD, CONFIRM, COPY, SOURCE)
# Another rank has to wait for the death, so that the phase lasts until then.
_NEEDS_WAITER = (MARKED, ENDED)
# Ranks can be there at the same time.
_TOGETHER = (BEFORE, REDUCED, ENDED)

# How it dies.
KILL = "SIGKILL"
STOP = "SIGSTOP"
RAISE = "exception"
# One of so many faults is by an exception.
_RAISE_EVERY = 5

# The ranks' buckets are final, and a step is complete: from here on losses are held.
FIRST_STEP = 4
# For faults that missed their place: in flight lasts for milliseconds.
SPARE_STEPS = 4
FAULTS_PER_ROUND = 25


@dataclasses.dataclass(frozen=True)
class Fault:
    """A death.

    Attributes:
      number: in its round, from 0.
      rank: who dies; None: the rank that heals another one.
      step: from which on it dies; as soon as it can, which is mostly this step.
      phase: one of PHASES.
      how: KILL; STOP: the daemon kills the trainer when its lease ends; RAISE: it raises an
        exception, which ends its process.
      after: number of the fault that comes before it in the same step; None: none does.
      waiter: rank that waits for this death at a place of its own; None: none has to.
      together: numbers of the faults at the same moment, with this one; empty: it is alone.
    """

    number: int
    rank: Optional[int]
    step: int
    phase: str
    how: str = KILL
    after: Optional[int] = None
    waiter: Optional[int] = None
    together: tuple[int, ...] = ()

    def json(self) -> dict[str, Any]:
        """As a line of a plan's file."""
        return dataclasses.asdict(self)

    @classmethod
    def of_json(cls, fields: dict[str, Any]) -> Fault:
        """The opposite of json()."""
        return cls(**{**fields, "together": tuple(fields["together"])})

    def __str__(self) -> str:
        """For people."""
        who = "the source" if self.rank is None else f"rank {self.rank}"
        return f"fault {self.number}: {who}, step {self.step}, {self.phase}, {self.how}"


@dataclasses.dataclass(frozen=True)
class Round:
    """The faults of one training.

    Attributes:
      number: from 0.
      steps: how many the training has.
      faults: in the order of their steps.
    """

    number: int
    steps: int
    faults: tuple[Fault, ...]


def plan(
    seed: int,
    faults: int,
    ranks: int,
    phases: Sequence[str] = PHASES,
    stops: bool = True,
    exceptions: bool = True,
) -> list[Round]:
    """Divides faults among trainings of equal length.

    The same arguments give the same plan.

    Args:
      seed: of every choice.
      faults: how many in all, at least 1.
      ranks: at least 3: two die at once, and one has the state.
      phases: that may happen. Faults that lead to one of them happen, too: a rank is lost before
        its replacement dies.
      stops: whether some trainers are stopped instead of killed.
      exceptions: whether some trainers raise an exception instead.
    """
    choices = f"{seed} {faults} {ranks} {sorted(phases)} {stops}"
    random_numbers = random.Random(choices)
    # Numbers of their own: exceptions change how trainers die, but not where.
    of_exceptions = random.Random(f"{choices} exceptions")
    counts = [len(part) for part in _parts(faults)]
    drafts: list[list[_Scene]] = []
    for count in counts:
        had = Counter(death[0] for draft in drafts for scene in draft for death in scene)
        # First what the trainings before had least of.
        ordered = sorted((p for p in PHASES if p in phases), key=lambda p: had[p])
        draft = _draft(random_numbers, count, ranks, ordered, stops)
        if exceptions:
            _raise_some(of_exceptions, draft, count // _RAISE_EVERY)
        drafts.append(draft)
    steps = FIRST_STEP + max(len(draft) for draft in drafts) - 1 + SPARE_STEPS
    return [
        Round(number, steps, _numbered(random_numbers, draft, ranks, steps))
        for number, draft in enumerate(drafts)
    ]


def least_faults(phases: Sequence[str] = PHASES) -> int:
    """The smallest number of faults with which every phase happens."""
    return sum(2 if phase in _OF_HEALING else 1 for phase in phases)


def _parts(faults: int) -> list[range]:
    rounds = -(-faults // FAULTS_PER_ROUND)
    cuts = [faults * i // rounds for i in range(rounds + 1)]
    return [range(start, end) for start, end in zip(cuts, cuts[1:])]


# A scene is what happens in one step: a list of (phase, how, whether at the moment of the one
# before); empty: nothing.
_Scene = list[tuple[str, str, bool]]


def _draft(
    random_numbers: random.Random, count: int, ranks: int, phases: Sequence[str], stops: bool
) -> list[_Scene]:
    """The scenes of one training, `count` faults in all. Earlier phases have precedence."""

    def alone(phase: str) -> _Scene:
        if phase in _OF_HEALING:
            return [(REDUCED, KILL, False), (phase, KILL, False)]
        return [(phase, KILL, False)]

    def together(phase: str) -> _Scene:
        dead = random_numbers.randint(2, max(2, ranks - 2))
        return [(phase, KILL, place > 0) for place in range(dead)]

    # What every training has, if its faults suffice.
    first: list[Callable[[], _Scene]] = [lambda p=p: alone(p) for p in phases]
    if REDUCED in phases:
        first.append(lambda: together(REDUCED))
        if stops:
            first.append(lambda: [(REDUCED, STOP, False)])
    # Half of the faults and more have a reduced bucket and a waiting one.
    often = [p for p in (REDUCED, *_OF_HEALING) if p in phases]
    others = [p for p in phases if p not in often and p != LEAVE] or [*often, BEFORE]

    def any_scene() -> _Scene:
        pick = random_numbers.choice(often or others)
        if random_numbers.random() < 0.2:
            pick = random_numbers.choice(others)
        if pick in _TOGETHER and random_numbers.random() < 0.4:
            return together(pick)
        scene = alone(pick)
        if pick in _OF_HEALING and random_numbers.random() < 0.25:
            scene.append((random_numbers.choice(often), KILL, False))  # lost once more
            if scene[-1][0] == REDUCED:
                scene.pop()
        return scene

    scenes: list[_Scene] = []
    left = count
    for make in first:
        scene = make()
        if len(scene) <= left:
            scenes.append(scene)
            left -= len(scene)
    while left > 0:
        scene = any_scene()
        if len(scene) > left:
            scene = alone(random_numbers.choice([REDUCED] if left < 2 else often or others))
        if len(scene) > left:
            scene = scene[:left]
        scenes.append(scene)
        left -= len(scene)
    random_numbers.shuffle(scenes)
    # Ranks leave once, at the end.
    leaving = [scene for scene in scenes if scene[0][0] == LEAVE]
    return _with_pauses([scene for scene in scenes if scene[0][0] != LEAVE]) + leaving


def _with_pauses(scenes: Sequence[_Scene]) -> list[_Scene]:
    """`scenes` with a step without a fault before each ENDED.

    A rank that is lost in one step may still be replaced in the next one, and the replacement is
    compared with every rank that has begun that step. In ENDED the waiter has begun it, and ends it
    only after the death: both would wait for each other.
    """
    paused: list[_Scene] = []
    for scene in scenes:
        if paused and ENDED in {phase for phase, _, _ in scene}:
            paused.append([])
        paused.append(scene)
    return paused


def _raise_some(random_numbers: random.Random, draft: Sequence[_Scene], count: int) -> None:
    """Lets `count` of the trainers that would be killed raise an exception instead."""
    places = [
        (scene, place)
        for scene in draft
        for place, (phase, how, _) in enumerate(scene)
        # A source's wait raises only when its state is read no more: never in mid-transfer.
        if how == KILL and phase != SOURCE
    ]
    for scene, place in random_numbers.sample(places, min(count, len(places))):
        phase, _, joint = scene[place]
        scene[place] = phase, RAISE, joint


def _numbered(
    random_numbers: random.Random, draft: Sequence[_Scene], ranks: int, steps: int
) -> tuple[Fault, ...]:
    """Gives each death of the scenes its rank and step."""
    faults: list[Fault] = []
    for index, scene in enumerate(draft):
        if not scene:
            continue
        step = steps if scene[0][0] == LEAVE else FIRST_STEP + index
        # Rank 0 is in every training: its buffers are everybody's.
        order = random_numbers.sample(range(ranks), ranks)
        if index == 0:
            order.remove(0)
            order.insert(0, 0)
        first = len(faults)
        group = tuple(first + i for i, (_, _, joint) in enumerate(scene) if joint or i == 0)
        dead = order[: len(group)]
        for place, (phase, how, joint) in enumerate(scene):
            number = first + place
            rank: Optional[int] = order[place] if joint else order[0]
            waiter = order[-1] if phase in _NEEDS_WAITER else None
            assert waiter not in dead
            faults.append(
                Fault(
                    number=number,
                    rank=None if phase == SOURCE else rank,
                    step=step,
                    phase=phase,
                    how=how,
                    after=None if joint or place == 0 else number - 1,
                    waiter=waiter,
                    together=group if len(group) > 1 and number in group else (),
                )
            )
    return tuple(faults)
