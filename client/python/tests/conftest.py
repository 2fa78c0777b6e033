"""What all tests of the package share: a daemon, and ranks (see ranks.py)."""

import ctypes
import faulthandler
import os
import signal

import pytest
from daemon_process import DaemonProcess

if "TEST_TIMEOUT" in os.environ:
    # Bazel sends SIGTERM to a test that hangs, which then prints what its threads do. pytest keeps
    # descriptor 2 for itself; run_pytest.sh has opened 3.
    faulthandler.register(signal.SIGTERM, file=3, chain=True)
    os.register_at_fork(after_in_child=lambda: faulthandler.unregister(signal.SIGTERM))
    ctypes.CDLL("client/python/tests/libcrash_stack.so").PrintCrashes(3)


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
