"""A rank that fails ends the others, and the launcher says which one failed first, and how."""

import os

import pytest


def test_an_exit_status_is_passed_on_with_the_last_lines(launch):
    script = (
        "if os.environ['RANK'] == '0': signal.pause()\n"
        "for line in range(30): print('line', line)\n"
        "sys.exit(3)\n"
    )
    status, _, err = launch("--nproc-per-node", 2, script=script).end()
    assert status == 3
    assert "failed first: exit status 3\n" in err
    shown = err[err.index("the last lines of rank 1:") :].split("\n")[1:-1]
    assert [line.split()[-1] for line in shown] == [str(line) for line in range(10, 30)]


@pytest.mark.parametrize("name, status", [("SIGSEGV", 139), ("SIGABRT", 134), ("SIGKILL", 137)])
def test_a_signal_is_named(launch, name, status):
    script = f"if os.environ['RANK'] == '0': signal.pause()\nos.kill(os.getpid(), signal.{name})\n"
    ended, _, err = launch("--nproc-per-node", 2, script=script).end()
    assert ended == status
    assert f"failed first: {name} (" in err and "rank 1 printed nothing" in err
    assert ("memory" in err) == (name == "SIGKILL")


def test_the_rank_that_raised_first_counts_though_another_one_ended_first(launch, tmp_path):
    """As it happens when the end of Python takes long."""
    go_on = tmp_path / "go-on"
    os.mkfifo(go_on)
    script = (
        "import traceback\n"
        "if os.environ['RANK'] == '0':\n"
        f"  open({str(go_on)!r}).read()\n"
        "  raise ValueError('the consequence')\n"
        "try: raise ValueError('the cause')\n"
        "except ValueError: traceback.print_exc(file=sys.stdout)\n"
        "signal.pause()\n"
    )
    with launch("--nproc-per-node", 2, script=script) as launched:
        launched.read("the cause$", 1)
        go_on.write_text("")
        status, _, err = launched.end()
    assert status == 1
    said = err[err.index("gradsync.run:") :]
    assert said.startswith("gradsync.run: rank 1 (pid")
    assert "failed first: an exception; then rank 0: exit status 1" in said
    assert "the cause" in said and "the consequence" not in said


def test_a_rank_that_raises_after_the_others_have_learned_of_its_loss(launch, tmp_path):
    """As it happens when its session ends before Python prints the exception."""
    learned = tmp_path / "learned"
    os.mkfifo(learned)
    script = (
        # The launcher asks the others to end a second later. A busy machine may not let them.
        "signal.signal(signal.SIGTERM, signal.SIG_IGN)\n"
        "import atexit, gradsync\n"
        "session = gradsync.Session.join()\n"
        "session.barrier()\n"
        "if session.rank == 0:\n"
        f"  atexit.register(lambda: open({str(learned)!r}, 'w').close())\n"
        "  session.barrier()\n"
        "session.close()\n"
        f"open({str(learned)!r}).read()\n"
        "raise ValueError('the cause')\n"
    )
    status, _, err = launch("--nproc-per-node", 2, script=script).end()
    assert status == 1
    said = err[err.index("gradsync.run:") :]
    assert said.startswith("gradsync.run: rank 1 (pid") and "the cause" in said


def test_a_lost_rank_is_the_first_and_not_those_that_learn_of_it(launch):
    script = (
        "signal.signal(signal.SIGTERM, signal.SIG_IGN)\n"  # as above
        "import gradsync\n"
        "session = gradsync.Session.join()\n"
        "session.barrier()\n"
        "if session.rank == 1: os.abort()\n"
        "session.barrier()\n"
    )
    status, _, err = launch("--nproc-per-node", 3, script=script).end()
    assert status == 134
    assert "failed first: SIGABRT" in err and "RANK_LOST" in err
    assert "gradsync.run: rank 1 (pid" in err


def test_a_rank_that_ends_well_ends_nobody(launch, tmp_path):
    ended = tmp_path / "ended"
    os.mkfifo(ended)
    script = (
        "if os.environ['RANK'] == '0':\n"
        f"  open({str(ended)!r}, 'w')\n"
        "  sys.exit(0)\n"
        f"open({str(ended)!r}).read()\n"
        "print('went on')\n"
    )
    status, out, _ = launch("--nproc-per-node", 2, script=script).end()
    assert (status, out) == (0, "rank 1 | went on\n")
