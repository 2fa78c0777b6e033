"""What all tests of the package share: a daemon, and ranks (see ranks.py)."""

import os

import pytest
from daemon_process import DaemonProcess


@pytest.fixture(scope="session")
def daemon():
    """A daemon for every test that asks for one; GRADSYNC_SOCKET names its socket."""
    process = DaemonProcess()
    before = os.environ.get("GRADSYNC_SOCKET")
    os.environ["GRADSYNC_SOCKET"] = process.socket
    yield process
    process.close()
    if before is None:
        del os.environ["GRADSYNC_SOCKET"]
    else:
        os.environ["GRADSYNC_SOCKET"] = before


@pytest.fixture
def own_daemon(monkeypatch):
    """A daemon for one test alone, which may stop or kill it."""
    process = DaemonProcess()
    monkeypatch.setenv("GRADSYNC_SOCKET", process.socket)
    yield process
    process.close()
