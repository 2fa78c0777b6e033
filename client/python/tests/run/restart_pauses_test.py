"""A rank that fails again and again waits longer and longer; one that has run well does not."""

from gradsync.run.restart_pauses import RestartPauses

LONGEST = 30.0


class Clock:
    """Runs one rank on a clock of its own."""

    def __init__(self, pauses, rank=0):
        self._pauses = pauses
        self._rank = rank
        self.now = 1000.0

    def runs_for(self, seconds):
        """The rank starts, fails after so long, and waits; returns the pause."""
        started = self.now
        self.now += seconds
        pause = self._pauses.after(self._rank, started, self.now)
        self.now += pause
        return pause


def test_pauses_grow_up_to_30_s():
    clock = Clock(RestartPauses(1))
    assert [clock.runs_for(0.1) for _ in range(8)] == [0, 1, 2, 4, 8, 16, 30, 30]


def test_a_rank_that_has_run_well_is_restarted_at_once_and_its_pauses_grow_anew():
    clock = Clock(RestartPauses(1))
    for _ in range(8):
        clock.runs_for(0.1)
    assert clock.runs_for(LONGEST) == LONGEST
    assert clock.runs_for(LONGEST + 0.1) == 0
    assert [clock.runs_for(0.1) for _ in range(3)] == [1, 2, 4]


def test_a_day_of_rare_failures_never_waits():
    clock = Clock(RestartPauses(1))
    assert {clock.runs_for(3600) for _ in range(24)} == {0}


def test_every_rank_has_pauses_of_its_own():
    pauses = RestartPauses(2)
    first, second = Clock(pauses, 0), Clock(pauses, 1)
    assert [first.runs_for(0.1) for _ in range(3)] == [0, 1, 2]
    assert second.runs_for(0.1) == 0


def test_a_rank_that_fails_at_once_is_started_six_times_within_15_s():
    clock = Clock(RestartPauses(1))
    starts = []
    while clock.now <= 1015:
        starts.append(clock.now - 1000)
        clock.runs_for(0.0)
    assert starts == [0, 0, 1, 3, 7, 15]
