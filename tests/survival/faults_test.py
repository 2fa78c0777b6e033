"""A plan has every phase, can be repeated, and can happen."""

import collections
import dataclasses

import faults
import pytest
from faults import KILL, PHASES, RAISE, REDUCED, SOURCE, STOP, Fault, least_faults, plan

SEEDS = range(60)


@pytest.mark.parametrize("ranks", [3, 4, 8])
@pytest.mark.parametrize("count", [25, 26, 60, 1000])
def test_a_plan_has_as_many_faults_as_asked_for_and_every_phase(ranks, count):
    rounds = plan(7, count, ranks)
    assert sum(len(r.faults) for r in rounds) == count
    assert len({r.steps for r in rounds}) == 1
    phases = collections.Counter(fault.phase for r in rounds for fault in r.faults)
    assert set(phases) == set(PHASES)


def test_the_same_seed_gives_the_same_plan_and_another_one_another():
    assert plan(1, 100, 4) == plan(1, 100, 4)
    assert plan(1, 100, 4) != plan(2, 100, 4)


@pytest.mark.parametrize("ranks", [3, 4, 8])
def test_every_training_of_25_kills_rank_0_and_several_at_once_and_stops_one(ranks):
    for seed in SEEDS:
        (only,) = plan(seed, 25, ranks)
        assert any(fault.rank == 0 for fault in only.faults)
        assert any(fault.how == STOP for fault in only.faults)
        assert any(len(fault.together) > 1 for fault in only.faults)


@pytest.mark.parametrize("ranks", [3, 4, 8])
def test_one_of_five_faults_is_an_exception(ranks):
    phases = collections.Counter()
    for seed in SEEDS:
        (only,) = plan(seed, 25, ranks)
        raised = [fault for fault in only.faults if fault.how == RAISE]
        assert len(raised) == 5
        phases.update(fault.phase for fault in raised)
    assert set(phases) == set(PHASES) - {SOURCE}


def test_a_plan_can_be_without_stops_and_exceptions():
    for rounds, kinds in [
        (plan(1, 60, 4), {KILL, STOP, RAISE}),
        (plan(1, 60, 4, stops=False), {KILL, RAISE}),
        (plan(1, 60, 4, stops=False, exceptions=False), {KILL}),
    ]:
        assert {fault.how for r in rounds for fault in r.faults} == kinds


def test_exceptions_change_how_trainers_die_but_not_where():
    with_them, without = plan(1, 60, 4), plan(1, 60, 4, exceptions=False)
    assert with_them != without

    def killed(rounds):
        return [
            dataclasses.replace(f, how=KILL if f.how == RAISE else f.how)
            for r in rounds
            for f in r.faults
        ]

    assert killed(with_them) == killed(without)


def test_every_planned_fault_can_happen():
    for seed in SEEDS:
        for ranks in (3, 4, 8):
            (only,) = plan(seed, 25, ranks)
            by_step = collections.defaultdict(list)
            for number, fault in enumerate(only.faults):
                assert fault.number == number
                assert faults.FIRST_STEP <= fault.step <= only.steps
                by_step[fault.step].append(fault)
            for group in by_step.values():
                check_step(group, ranks)


def check_step(group, ranks):
    first, *others = group
    assert first.after is None
    # One rank lives and has the state.
    at_once = [fault for fault in group if fault.after is None]
    assert len(at_once) < ranks
    assert all(fault.together == first.together for fault in at_once)
    assert len({fault.rank for fault in at_once}) == len(at_once)
    for fault in group:
        assert fault.waiter not in {other.rank for other in at_once}
    for before, fault in zip(group, others):
        if fault.after is None:
            continue
        # A replacement needs a loss before, with a reduced bucket to copy.
        assert fault.after == before.number
        assert group[0].phase == REDUCED
        assert (fault.rank is None) == (fault.phase == SOURCE)
        if fault.rank is not None:
            assert fault.rank == first.rank


def test_half_of_the_faults_and_more_have_a_reduced_bucket():
    for seed in SEEDS:
        (only,) = plan(seed, 25, 4)
        with_reduced = [f for f in only.faults if f.phase == REDUCED or f.after is not None]
        assert 2 * len(with_reduced) >= 25


def test_a_plan_can_be_of_some_phases():
    for name, phase in faults.NAMES.items():
        least = least_faults([phase])
        (only,) = plan(1, least, 4, [phase])
        assert phase in {fault.phase for fault in only.faults}, name


def test_a_fault_is_the_same_after_it_was_written_and_read():
    for fault in plan(3, 25, 4)[0].faults:
        assert Fault.of_json(fault.json()) == fault
