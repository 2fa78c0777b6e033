"""Signals to the launcher, and its death."""

import os
import signal

import pytest
from launched import daemon_of


def script(handler):
    """Ranks that call the handler at SIGTERM, SIGINT and SIGUSR1, and say when they listen."""
    return (
        f"def handle(number, _):\n    {handler}\n"
        "for number in (signal.SIGTERM, signal.SIGINT, signal.SIGUSR1):\n"
        "    signal.signal(number, handle)\n"
        "print('pid', os.getpid())\n"
        "while True: signal.pause()\n"
    )


PRINT = "print('got', signal.Signals(number).name)"


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGINT])
def test_ranks_that_end_well_at_a_signal_make_it_a_success(launch, number):
    with launch("--nproc-per-node", 2, script=script(PRINT + "; sys.exit(0)")) as launched:
        launched.read("pid", 2)
        launched.process.send_signal(number)
        status, out, _ = launched.end()
    assert status == 0 and out.count(f"got {number.name}\n") == 2


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGINT, signal.SIGHUP, signal.SIGQUIT])
def test_ranks_that_do_not_handle_a_signal_die_of_it(launch, watch, number):
    text = "print('pid', os.getpid())\nsignal.pause()"
    with launch("--nproc-per-node", 2, script=text) as launched:
        ranks = [watch(pid) for pid in launched.read(r"pid (\d+)$", 2)]
        launched.process.send_signal(number)
        status, _, err = launched.end()
    assert status == 128 + number
    assert f"stopped by {number.name}" in err and "failed first" not in err
    assert all(rank.has_ended(0) for rank in ranks)


def test_ranks_that_stay_are_killed_after_the_time_for_it(launch, watch):
    words = ("--nproc-per-node", 2, "--shutdown-timeout", 0.1)
    with launch(*words, script=script("pass")) as launched:
        ranks = [watch(pid) for pid in launched.read(r"pid (\d+)$", 2)]
        launched.process.terminate()
        assert launched.end()[0] == 143
    assert all(rank.has_ended(0) for rank in ranks)


def test_a_second_signal_kills_at_once(launch, watch):
    with launch("--shutdown-timeout", 3600, script=script(PRINT)) as launched:
        (rank,) = [watch(pid) for pid in launched.read(r"pid (\d+)$", 1)]
        launched.process.terminate()
        launched.read("got SIGTERM", 1)
        launched.process.terminate()
        assert launched.end()[0] == 143
    assert rank.has_ended(0)


def test_sigusr1_is_passed_on_and_ends_nothing(launch):
    with launch("--nproc-per-node", 2, script=script(PRINT)) as launched:
        launched.read("pid", 2)
        launched.process.send_signal(signal.SIGUSR1)
        launched.read("got SIGUSR1", 2)
        launched.process.send_signal(signal.SIGUSR1)
        launched.read("got SIGUSR1", 4)
        launched.process.kill()


def test_a_launcher_that_is_killed_takes_ranks_and_daemon_along(launch_alone, watch):
    text = "print(os.environ['GRADSYNC_SOCKET'])\n" + script("pass")
    with launch_alone("--nproc-per-node", 2, script=text) as launched:
        ranks = [watch(pid) for pid in launched.read(r"pid (\d+)$", 2)]
        path = launched.read(r"\| (/.*)$", 2)[0]
        daemon = watch(daemon_of(path))
        launched.process.kill()
        assert all(process.has_ended() for process in [*ranks, daemon])


def test_children_of_a_rank_end_with_it(launch, watch, tmp_path):
    go_on = tmp_path / "go-on"
    os.mkfifo(go_on)
    text = (
        "import subprocess\n"
        "child = subprocess.Popen(['sleep', '1000'])\n"
        "print('pid', child.pid)\n"
        f"open({str(go_on)!r}).read()\n"
    )
    with launch(script=text) as launched:
        (child,) = [watch(pid) for pid in launched.read(r"pid (\d+)$", 1)]
        go_on.write_text("")
        assert launched.end()[0] == 0
    assert child.has_ended()


def test_a_signal_that_nohup_ignores_stays_ignored(launch):
    before = signal.signal(signal.SIGHUP, signal.SIG_IGN)
    try:
        launched = launch(script=script(PRINT + "; number == signal.SIGTERM and sys.exit(0)"))
    finally:
        signal.signal(signal.SIGHUP, before)
    with launched:
        launched.read("pid", 1)
        launched.process.send_signal(signal.SIGHUP)
        launched.process.send_signal(signal.SIGUSR1)
        launched.read("got SIGUSR1", 1)
        launched.process.terminate()
        assert launched.end()[0] == 0
