"""The ranks of a bench, and what the bench says of one that fails."""

import contextlib
import os
import pathlib
import re
import select
import signal
import sys

import pytest

sys.path.insert(0, str(pathlib.Path(__file__).resolve().parents[2] / "tools" / "bench"))

from launcher import Failed, Launcher, Node
from rank_team import RankTeam

# Rank 0 waits for ever, as a rank does whose partner has failed.
_RANK = """
import os, signal, sys
sys.path.insert(0, {bench!r})
from rank_service import serve

class Rank:
    def __init__(self, configuration):
        self.rank = configuration["rank"]

    def double(self, number):
        return self.rank + 2 * number

    def fail(self):
        if self.rank == 1:
            raise ValueError("mine")
        signal.pause()

    def die(self):
        if self.rank == 1:
            os.kill(os.getpid(), signal.SIGKILL)
        signal.pause()

    def close(self):
        pass

serve(Rank)
"""


@pytest.fixture(params=[2, 1], ids=["a_process_each", "one_that_forks"])
def team(request, tmp_path):
    program = tmp_path / "rank.py"
    program.write_text(_RANK.format(bench=sys.path[0]))
    with Launcher() as launcher:
        yield RankTeam(
            launcher,
            "python",
            [(Node(), [sys.executable, str(program)])] * request.param,
            lambda rank: {"rank": rank},
            2,
            {"WORLD_SIZE": "2"},
        )


def test_answers_are_in_rank_order(team):
    assert team.call("double", number=5) == [10, 11]
    team.close()


def test_a_rank_that_fails_says_why_although_another_one_waits(team):
    with pytest.raises(Failed) as raised:
        team.call("fail")
    text = str(raised.value)
    assert "python rank 1" in text
    assert "ValueError: mine" in text


def test_a_rank_that_is_killed_is_named(team):
    with pytest.raises(Failed) as raised:
        team.call("die")
    assert re.search(
        r"rank 1 \(pid \d+\) (was killed by signal 9|ended: status 9)", str(raised.value)
    )


def test_ranks_end_with_the_process_that_has_forked_them(team):
    (first, *others) = team._children
    with contextlib.ExitStack() as stack:
        ending = {}
        for pid in set(team._pids) - {other.pid for other in others}:
            ending[pid] = os.pidfd_open(pid)
            stack.callback(os.close, ending[pid])
        os.kill(first.pid, signal.SIGTERM)
        for pid, pidfd in ending.items():
            assert select.select([pidfd], [], [], 60)[0], f"process {pid} has not ended"
    assert all(other.process.poll() is None for other in others)
