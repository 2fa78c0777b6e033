"""Child processes that do not outlive the bench."""

from __future__ import annotations

import ctypes
import pathlib
import signal
import subprocess
from collections.abc import Mapping, Sequence
from typing import Optional

_PR_SET_PDEATHSIG = 1
_STOP_LIMIT_S = 10.0
_LOG_LINES = 20
# Loaded here and not between fork and exec, where little may be called.
_libc = ctypes.CDLL(None)


def end_with_parent() -> None:
    """This process gets SIGTERM when its parent ends."""
    _libc.prctl(_PR_SET_PDEATHSIG, signal.SIGTERM, 0, 0, 0)


class ChildProcess:
    """A process with its output in a log.

    Attributes:
      pid: of the process.
    """

    def __init__(
        self, command: Sequence[str], log: str, environment: Optional[Mapping[str, str]] = None
    ) -> None:
        """Starts it; OSError if that fails. Its output is appended to `log`."""
        self._log = pathlib.Path(log)
        with self._log.open("ab") as file:
            self._process = subprocess.Popen(
                command,
                stdin=subprocess.DEVNULL,
                stdout=file,
                stderr=file,
                env=environment,
                # Ctrl-C is for the bench, which ends its processes in order.
                start_new_session=True,
                preexec_fn=end_with_parent,
            )
        self.pid = self._process.pid

    def ended(self) -> Optional[int]:
        """The exit code, negative for a signal; None while it runs."""
        return self._process.poll()

    def await_end(self, seconds: float) -> bool:
        """Waits at most that long; returns whether it has ended."""
        try:
            self._process.wait(seconds)
        except subprocess.TimeoutExpired:
            return False
        return True

    def stop(self) -> None:
        """Ends it, by force if it does not obey."""
        if self.ended() is None:
            self._process.terminate()
            if not self.await_end(_STOP_LIMIT_S):
                self.kill()

    def kill(self) -> None:
        """Ends it at once."""
        self._process.kill()
        self._process.wait()

    def last_output(self) -> str:
        """The last lines of its log."""
        return "\n".join(self._log.read_text(errors="replace").splitlines()[-_LOG_LINES:])
