"""Child processes that do not outlive their parent, however it ends."""

from __future__ import annotations

import ctypes
import signal

_PR_SET_PDEATHSIG = 1
# Loaded here and not between fork and exec, where little may be called.
_libc = ctypes.CDLL(None)


def end_with_parent() -> None:
    """This process gets SIGKILL when its parent ends."""
    _libc.prctl(_PR_SET_PDEATHSIG, signal.SIGKILL, 0, 0, 0)


def terminate_with_parent() -> None:
    """This process gets SIGTERM when its parent ends."""
    _libc.prctl(_PR_SET_PDEATHSIG, signal.SIGTERM, 0, 0, 0)
