"""The daemon that the launcher starts where none answers."""

import errno
import os
import pathlib
import signal
import socket
import stat

import pytest
from gradsync.run.daemon import why_silent
from launched import TRAINER, daemon_of

# Prints the socket, then waits for a signal.
HOLD = "print(os.environ['GRADSYNC_SOCKET'])\nsignal.pause()"


def test_two_ranks_average_with_it(launch_alone, runtime):
    status, out, err = launch_alone("--nproc-per-node", "2", script=TRAINER).end()
    assert sorted(out.splitlines()) == [f"rank {rank} | 2 [0.5 0.5 0.5]" for rank in range(2)], err
    assert status == 0
    assert "none.sock (there is no such socket)" in err
    assert f"gradsyncctl status --socket {runtime}/gradsync-run-" in err
    assert list(runtime.iterdir()) == []


def test_it_is_this_users_alone_and_ends_with_the_job(launch_alone, runtime, watch):
    with launch_alone(script=HOLD) as launched:
        (path,) = launched.read(r"rank 0 \| (.*)\n", 1)
        daemon = watch(daemon_of(path))
        folder = pathlib.Path(path).parent
        assert folder.parent == runtime
        assert stat.S_IMODE(folder.stat().st_mode) == 0o700
        assert stat.S_IMODE(os.stat(path).st_mode) == 0o600
        launched.process.terminate()
        assert launched.end()[0] == 143
    assert daemon.has_ended(0)
    assert list(runtime.iterdir()) == []


def test_a_socket_that_is_closed_to_this_user(monkeypatch):
    def connect(*_):
        raise PermissionError(errno.EACCES, os.strerror(errno.EACCES))

    monkeypatch.setattr(socket.socket, "connect", connect)
    why = why_silent("/run/d.sock")
    assert why.startswith("you may not connect to /run/d.sock") and "gradsyncctl doctor" in why
    assert "no daemon answers" not in why


@pytest.mark.parametrize("folder", ["", "relative", "/nonexistent", "/dev/null", "long"])
def test_a_runtime_directory_that_cannot_be_used(launch_alone, folder, tmp_path):
    if folder == "long":
        folder = tmp_path / ("x" * 100)
        folder.mkdir()
    environment = {"XDG_RUNTIME_DIR": str(folder), "TMPDIR": "/tmp"}
    status, out, err = launch_alone(
        script="print(os.environ['GRADSYNC_SOCKET'])", environment=environment
    ).end()
    assert status == 0 and out.startswith("rank 0 | /tmp/gradsync-run-"), err


def test_a_daemon_that_cannot_start_shows_its_log(launch_alone, tmp_path):
    program = tmp_path / "gradsyncd"
    program.write_text("#!/bin/sh\necho disk on fire >&2\nexit 3\n")
    program.chmod(0o755)
    status, out, err = launch_alone(
        script="print('no')", environment={"GRADSYNC_DAEMON": str(program)}
    ).end()
    assert (status, out) == (1, "")
    assert "gradsyncd did not start: exit status 3" in err and "    disk on fire" in err


def test_a_daemon_that_is_missing(launch_alone):
    environment = {"GRADSYNC_DAEMON": "/nonexistent/gradsyncd"}
    status, _, err = launch_alone(script="", environment=environment).end()
    assert status == 1 and "no private daemon can start" in err and "/nonexistent/gradsyncd" in err


def test_a_daemon_that_dies_ends_the_job_and_shows_its_log(launch_alone, watch):
    with launch_alone(script=HOLD) as launched:
        (path,) = launched.read(r"rank 0 \| (.*)\n", 1)
        watch(daemon_of(path)).kill()
        status, _, err = launched.end()
    assert status == 137
    assert "failed first: SIGKILL" in err and "the last lines of gradsyncd:" in err
    assert "INFO serving" in err
    assert not os.path.exists(path)


def test_a_daemon_that_ends_well_while_ranks_run_is_named(launch_alone, watch):
    with launch_alone(script=HOLD) as launched:
        (path,) = launched.read(r"rank 0 \| (.*)\n", 1)
        number = daemon_of(path)
        os.kill(number, signal.SIGTERM)
        status, _, err = launched.end()
    assert status == 1
    assert f"gradsyncd (pid {number}) ended while ranks ran: exit status 0\n" in err
    assert "the last lines of gradsyncd:" in err and "INFO serving" in err


def test_the_folder_of_a_killed_launcher_is_removed(launch_alone, runtime, watch):
    with launch_alone(script=HOLD) as launched, launch_alone(script=HOLD) as killed:
        (kept,) = launched.read(r"rank 0 \| (.*)\n", 1)
        (left,) = killed.read(r"rank 0 \| (.*)\n", 1)
        daemon = watch(daemon_of(left))
        killed.process.kill()
        assert daemon.has_ended()
        others = runtime / "gradsync-_others_"
        others.mkdir()
        # As of another program's daemon, which does not listen yet.
        (others / "notify.sock").touch()
        assert os.path.exists(left)
        assert launch_alone(script="print('trains')").end()[0] == 0
        assert set(runtime.iterdir()) == {pathlib.Path(kept).parent, others}
        launched.process.kill()


def test_a_signal_while_it_starts(launch_alone, tmp_path):
    program = tmp_path / "gradsyncd"
    program.write_text('#!/bin/sh\nkill -TERM "$PPID"\nexec sleep 1000\n')
    program.chmod(0o755)
    status, out, _ = launch_alone(
        script="print('no')", environment={"GRADSYNC_DAEMON": str(program)}
    ).end()
    assert (status, out) == (143, "")
