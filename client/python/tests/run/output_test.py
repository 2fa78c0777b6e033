"""What the launcher shows of the ranks' output."""

import os
import re

import pytest
from gradsync.run.output import Lines, Output, Speaker


def test_each_line_has_its_rank_and_its_stream(launch):
    script = "print('to out'); print('to err', file=sys.stderr); print()"
    status, out, err = launch("--nproc-per-node", 2, script=script).end()
    assert status == 0
    assert sorted(out.splitlines()) == sorted(
        f"rank {rank} |{text}" for rank in range(2) for text in (" to out", "")
    )
    assert sorted(err.splitlines()) == [f"rank {rank} | to err" for rank in range(2)]


def test_ranks_stand_in_one_column(launch):
    words = "--nnodes 3 --node-rank 2 --master-addr localhost --nproc-per-node 4".split()
    _, out, _ = launch(*words, script="print('x')").end()
    assert sorted(out.splitlines()) == ["rank  8 | x", "rank  9 | x", "rank 10 | x", "rank 11 | x"]


def test_lines_stay_whole(launch):
    """Two ranks write long lines in pieces, at the same time."""
    script = (
        "for i in range(200):\n"
        "  for piece in range(10):\n"
        "    sys.stdout.write(os.environ['RANK'] * 1001); sys.stdout.flush()\n"
        "  print()\n"
        "print('the end', end='')\n"
    )
    status, out, _ = launch("--nproc-per-node", 2, script=script).end()
    assert status == 0
    lines = out.splitlines()
    assert len(lines) == 402
    for line in lines:
        assert re.fullmatch(r"rank 0 \| (0{10010}|the end)|rank 1 \| (1{10010}|the end)", line)


def test_the_output_of_a_reader_that_stops(launch, watch):
    """The launcher still hears signals."""
    # No rank ends before it has printed more than the launcher's pipe holds.
    script = (
        "signal.pthread_sigmask(signal.SIG_BLOCK, [signal.SIGTERM])\n"
        "print('pid', os.getpid())\n"
        "for _ in range(400): print('x' * 1000)\n"
        "signal.pthread_sigmask(signal.SIG_UNBLOCK, [signal.SIGTERM])\n"
        "while True: print('x' * 1000)"
    )
    with launch("--nproc-per-node", 2, script=script) as launched:
        ranks = [watch(pid) for pid in launched.read(r"pid (\d+)$", 2)]
        launched.process.terminate()
        assert all(rank.has_ended() for rank in ranks)
        launched.process.terminate()  # or it would give the reader some seconds
        assert launched.process.wait(60) == 143


def test_output_that_nobody_reads_any_more_ends_the_job(launch):
    with launch(script="print('begun')\nwhile True: print('x' * 1000)") as launched:
        launched.read("begun", 1)
        launched.process.stdout.close()
        assert launched.process.wait(60) == 1
        assert b"cannot write output" in launched.process.stderr.read()


@pytest.mark.parametrize(
    "environment, expected",
    [
        ({}, b"\033[36mrank 0 |\033[0m hello\r\n"),
        ({"NO_COLOR": "1"}, b"rank 0 | hello\r\n"),
        ({"TERM": "dumb"}, b"rank 0 | hello\r\n"),
    ],
)
def test_colours_on_a_terminal_only(launch, environment, expected):
    environment = {"TERM": "xterm", "NO_COLOR": None, **environment}
    ours, theirs = os.openpty()
    with launch(script="print('hello')", environment=environment, stdout=theirs) as launched:
        assert launched.end()[0] == 0
    os.close(theirs)
    assert os.read(ours, 1000) == expected
    os.close(ours)


class Recorded(Output):
    """Keeps lines instead of writing them."""

    def __init__(self):
        super().__init__()
        self.lines = []

    def add(self, descriptor, line):
        self.lines.append(line)


@pytest.fixture
def shown():
    """(lines, what was shown of them)"""
    output = Recorded()
    return Lines(Speaker(output, "r", 0), 1), output.lines


def test_a_progress_bar_shows_now_and_then_and_at_its_end(shown):
    lines, said = shown
    for percent in range(100):
        lines.add(b"\r%d %%" % percent, now=100 + percent / 10)
    assert said == [b"r | 0 %", b"r | 50 %"]
    lines.add(b"\r100 %\nnext\r\n", now=110)
    assert said[2:] == [b"r | 100 %", b"r | next"]


def test_a_progress_bar_whose_carriage_return_comes_last(shown):
    lines, said = shown
    lines.add(b"1 %\r2 %\r", now=100)
    lines.add(b"3 %\r", now=101)
    assert said == [b"r | 1 %"]
    lines.end(now=102)
    assert said[1:] == [b"r | 3 %"]


def test_a_line_without_an_end_is_cut(shown):
    lines, said = shown
    lines.add(b"x" * 100_000, now=0)
    assert [len(line) for line in said] == [4 + (1 << 16)]
    lines.end(now=0)
    assert sum(len(line) - 4 for line in said) == 100_000
