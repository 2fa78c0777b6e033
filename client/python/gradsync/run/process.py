"""One process that the launcher started: a rank or the daemon."""

from __future__ import annotations

import ctypes
import os
import signal
import subprocess
import time
from collections.abc import Mapping, Sequence
from typing import Optional

_PR_SET_PDEATHSIG = 1
_SYS_PIDFD_OPEN = 434  # on every architecture but Alpha
# Loaded here, since little may be called between fork and exec.
_libc = ctypes.CDLL(None, use_errno=True)


def _pidfd_open(pid: int) -> int:
    """os.pidfd_open, which some builds of Python lack, such as conda's."""
    if hasattr(os, "pidfd_open"):
        return os.pidfd_open(pid)
    pidfd = int(_libc.syscall(ctypes.c_long(_SYS_PIDFD_OPEN), pid, 0))
    if pidfd < 0:
        raise OSError(ctypes.get_errno(), os.strerror(ctypes.get_errno()))
    return pidfd


def why_unwatchable() -> Optional[str]:
    """Why Process cannot notice the end of a process; None: it can."""
    try:
        os.close(_pidfd_open(os.getpid()))
    except OSError as error:
        return f"pidfd_open: {error.strerror}"
    return None


class Process:
    """A running process. It dies with the launcher, even if that is killed.

    It is in a session of its own, so Ctrl-C reaches the launcher alone. One thread. reap() ends
    what it has left in its process group, and frees what this object holds.

    Attributes:
      name: for people: "rank 0", "gradsyncd".
      pid: of the process, and of its process group.
      pidfd: can be read when the process has ended.
      stdout: the descriptor of its pipe, which is read without blocking.
      stderr: likewise.
      status: how it has ended: its exit status, or minus a signal's number; None: it runs.
      started_at: when the launcher started it, by time.monotonic().
      ended_at: when the launcher noticed its end, by the same clock.
      told_to_end: whether the launcher has sent it a signal that ends processes.
    """

    def __init__(self, name: str, command: Sequence[str], environment: Mapping[str, str]) -> None:
        """Starts it.

        Raises:
          OSError: it cannot be started.
        """
        launcher = os.getpid()

        def tie_to_launcher() -> None:
            _libc.prctl(_PR_SET_PDEATHSIG, signal.SIGKILL, 0, 0, 0)
            if os.getppid() != launcher:  # which has died before
                os._exit(1)

        self.name = name
        self.started_at = time.monotonic()
        self._popen = subprocess.Popen(
            command,
            env=environment,
            stdin=subprocess.DEVNULL,
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            bufsize=0,
            start_new_session=True,
            preexec_fn=tie_to_launcher,
        )
        assert self._popen.stdout is not None and self._popen.stderr is not None
        self.pid = self._popen.pid
        self.pidfd = _pidfd_open(self.pid)
        self.stdout = self._popen.stdout.fileno()
        self.stderr = self._popen.stderr.fileno()
        for descriptor in (self.stdout, self.stderr):
            os.set_blocking(descriptor, False)
        self.status: Optional[int] = None
        self.ended_at = 0.0
        self.told_to_end = False

    def tell(self, number: int, ends: bool = True) -> None:
        """Sends it a signal, if it runs. SIGKILL goes to the processes that it started, too.

        A rank's helpers, such as DataLoader workers, stay: the rank may still need them.
        """
        if self.status is not None:
            return
        self.told_to_end = self.told_to_end or ends
        if number == signal.SIGKILL:
            self._kill_group()
        else:
            self._popen.send_signal(number)

    def reap(self, now: float) -> None:
        """After pidfd can be read: notes the status and the time."""
        # While the process is not reaped, no other one can get its number.
        self._kill_group()
        self.status = self._popen.wait()
        self.ended_at = now
        os.close(self.pidfd)

    def close(self) -> None:
        """After reap(): closes its pipes."""
        for file in (self._popen.stdout, self._popen.stderr):
            assert file is not None
            file.close()

    def how_it_ended(self) -> str:
        """As "exit status 3" or "SIGSEGV (Segmentation fault)"."""
        assert self.status is not None
        if self.status >= 0:
            return f"exit status {self.status}"
        try:
            name = signal.Signals(-self.status).name
        except ValueError:  # a real-time signal
            name = f"signal {-self.status}"
        text = f"{name} ({signal.strsignal(-self.status)})"
        if self.status == -signal.SIGKILL and not self.told_to_end:
            text += "; was memory short? See 'dmesg'"
        return text

    def exit_status(self) -> int:
        """The status that a shell would show."""
        assert self.status is not None
        return self.status if self.status >= 0 else 128 - self.status

    def _kill_group(self) -> None:
        try:
            os.killpg(self.pid, signal.SIGKILL)
        except OSError:  # nobody is left, or nobody of this user
            pass
