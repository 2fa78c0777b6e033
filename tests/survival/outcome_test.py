"""Deaths count with what really happened; the outcome names each fault of a training."""

import itertools

from chain import Link
from faults import COMMITTED, ENDED, FETCH, KILL, MARKED, RAISE, REDUCED, Fault, Round
from outcome import assess
from report import Report

RANKS = 3
STEPS = 8
PLANNED = Round(
    0,
    STEPS,
    (
        Fault(0, 1, 4, REDUCED, KILL),
        Fault(1, 1, 4, FETCH, KILL, after=0),
        Fault(2, 0, 6, COMMITTED, KILL),
    ),
)


def chain(pid=lambda rank, step: 100 + rank, without=()):
    return [
        Link(rank, rank, pid(rank, step), step, "0.0", f"a{step}", f"o{rank}{step}", f"s{step}")
        for rank in range(RANKS)
        for step in range(1, STEPS + 1)
        if (rank, step) not in without
    ]


def pid_with_faults(rank, step):
    return {1: 203 if step >= 4 else 101, 0: 200 if step > 6 else 100}.get(rank, 102)


_times = itertools.count(1_000_000_000, 10_000_000)


def dies(fault, rank, pid, step, reduced=1):
    line = {"event": "dies", "fault": fault, "rank": rank, "pid": pid, "step": step}
    return {**line, "reduced": reduced, "unix_ns": next(_times)}


def begins(rank, pid, step):
    return {"event": "fact", "rank": rank, "pid": pid, "begins": step, "unix_ns": next(_times)}


def good_lines():
    return [
        dies(0, 1, 101, 4),
        dies(1, 1, 202, 4),
        begins(1, 203, 4),
        {"event": "fact", "rank": 1, "pid": 203, "step": 4, "beside_ms": 20.0, "transfer_ms": 5.0},
        dies(2, 0, 100, 6, reduced=0),
        begins(0, 200, 7),
    ]


def good_chain():
    return chain(pid_with_faults, without=[(0, 6)])


def outcome(lines=None, found=None, ends=()):
    return assess(PLANNED, chain(), found or good_chain(), lines or good_lines(), list(ends))


def test_a_good_training_has_no_complaint():
    result = outcome()
    assert (result.difference, result.complaints) == (None, [])
    assert [(d.rank, d.step, d.reduced, d.back_in) for d in result.deaths] == [
        (1, 4, 1, None),
        (1, 4, 1, 4),
        (0, 6, 0, 7),
    ]
    assert [(r.rank, r.step, r.beside_ms) for r in result.returns] == [(1, 4, 20.0)]


def test_a_return_that_waited_for_another_death_does_not_count():
    fetched = {"event": "fact", "rank": 1, "pid": 203, "fetched": 2}
    lines = good_lines()
    assert len(outcome([*lines[:2], fetched, *lines[2:]]).returns) == 1
    assert not outcome([*lines[:2], fetched, dies(2, 0, 100, 4), *lines[2:4]]).returns


def test_the_daemon_s_log_says_when_a_death_was_known():
    lines = good_lines()
    why = f"its process (pid {lines[0]['pid']}) has ended"
    end = {"rank": 1, "why": why, "unix_ns": lines[0]["unix_ns"] + 3_000_000}
    other = {"rank": 1, "why": "its process (pid 7) has ended", "unix_ns": lines[0]["unix_ns"] + 1}
    known = [death.known_ms for death in outcome(lines, ends=[other, end]).deaths]
    assert known == [3.0, None, None]


def test_a_fault_that_did_not_happen_is_said():
    (complaint,) = outcome(good_lines()[:4], chain(pid_with_faults)).complaints[:1]
    assert complaint.startswith("did not happen: fault 2: rank 0, step 6, committed")


def test_a_replacement_that_begins_in_another_step_is_said():
    lines = good_lines()
    lines[-1]["begins"] = 6
    (complaint,) = outcome(lines).complaints
    assert "its replacement began in step 6, not 7" in complaint


def test_a_death_whose_end_step_has_not_arrived_counts_as_marked():
    planned = Round(0, STEPS, (Fault(0, 1, 4, ENDED, KILL),))
    for step, phase in ((5, ENDED), (4, MARKED)):
        lines = [dies(0, 1, 101, 4), begins(1, 203, step)]
        found = assess(planned, chain(), chain(pid_with_faults), lines, [])
        assert [death.phase for death in found.deaths] == [phase]


def test_a_survivor_that_is_another_process_is_said():
    found = chain(lambda rank, step: 300 if rank == 2 and step > 5 else pid_with_faults(rank, step))
    (complaint,) = outcome(found=found).complaints
    assert complaint == "rank 2 had 2 processes and 0 deaths"


def test_void_steps_and_wrong_averages_are_said():
    lines = good_lines()
    lines.append({"event": "fact", "rank": 2, "void": 1})
    lines.append({"event": "fact", "rank": 2, "step": 5, "wrong": "all of it"})
    assert outcome(lines).complaints == ["rank 2 saw 1 void steps", "rank 2, step 5: all of it"]


def test_a_report_names_the_difference_and_the_fault_before_it():
    found = good_chain()
    broken = Link(2, 2, 102, 5, "0.0", "x", "o25", "s5")
    found = [broken if (link.rank, link.step) == (2, 5) else link for link in found]
    report = Report([REDUCED, FETCH, COMMITTED])
    report.add("training 1", outcome(found=found))
    (failure,) = report.failures()
    assert failure == (
        "training 1: the chains differ: rank 2, step 5: averages differ: a5 without faults, x with "
        f"them; before it: fault 1: rank 1, step 4, {FETCH}, SIGKILL"
    )


def test_a_phase_without_a_fault_fails_the_report():
    report = Report([REDUCED, "another phase"])
    report.add("training 1", outcome())
    assert report.failures() == ["no fault happened in the phase 'another phase'"]


def test_a_kind_of_death_that_did_not_happen_fails_the_report():
    report = Report([REDUCED], [KILL, RAISE])
    report.add("training 1", outcome())
    assert report.failures() == ["no trainer died by exception"]


def test_a_training_that_broke_off_is_the_only_failure():
    report = Report([REDUCED, "another phase"])
    report.fail("training 1: rank 2 ended")
    assert report.failures() == ["training 1: rank 2 ended"]


def test_a_report_counts():
    report = Report([REDUCED, FETCH, COMMITTED])
    report.add("training 1", outcome())
    figures = report.json()
    assert report.failures() == []
    assert figures["equal_chains"] == figures["trainings"] == 1
    assert figures["faults"] == 3
    assert figures["faults_by_kind"] == {"SIGKILL": 3, "SIGSTOP": 0, "exception": 0}
    assert figures["faults_by_phase"] == {"reduced": 1, "fetch": 1, "committed": 1}
    assert figures["faults_with_a_reduced_and_a_waiting_bucket"] == 2
    assert figures["join_to_completion_beside_own_passes_ms"]["p50"] == 20.0
    assert any("1 of 1" in line for line in report.table())
