"""What the tests of gradsync.run share."""

import functools
import pathlib
import tempfile

import pytest
from launched import Launched, Watched


@pytest.fixture
def no_daemon(monkeypatch):
    """GRADSYNC_SOCKET names a socket that does not exist."""
    monkeypatch.setenv("GRADSYNC_SOCKET", "/nonexistent/none.sock")


@pytest.fixture
def launch(tmp_path, daemon):
    """launch(*words, script=...) starts gradsync.run in this test's folder, with a daemon."""
    return functools.partial(Launched, folder=tmp_path)


@pytest.fixture
def runtime(monkeypatch):
    """$XDG_RUNTIME_DIR, with a short path."""
    with tempfile.TemporaryDirectory(prefix="run-", dir="/tmp") as folder:
        monkeypatch.setenv("XDG_RUNTIME_DIR", folder)
        yield pathlib.Path(folder)


@pytest.fixture
def launch_alone(tmp_path, no_daemon, runtime):
    """The same without a daemon."""
    return functools.partial(Launched, folder=tmp_path)


@pytest.fixture
def watch():
    """watch(pid) follows a process that this test did not start."""
    watched = []

    def follow(pid):
        watched.append(Watched(pid))
        return watched[-1]

    yield follow
    for process in watched:
        process.close()
