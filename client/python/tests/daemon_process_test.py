"""How tests start a daemon."""

import pytest
from daemon_process import DaemonProcess


def test_a_daemon_that_cannot_start_fails_at_once_with_its_log(capfd):
    with pytest.raises(AssertionError, match=r"ended before it listened .*--no_such_flag"):
        DaemonProcess("--no_such_flag=1")
    assert "no_such_flag" in capfd.readouterr().err
