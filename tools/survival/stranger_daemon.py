"""A daemon of its own, which every user reaches."""

from __future__ import annotations

import os
import pathlib
import subprocess
import time
from types import TracebackType
from typing import Optional

from launcher import end_with_parent
from process_footprint import Footprint, footprint_of

_START_S = 30.0
# How long the daemon may need until everything of an attacker has ended.
_SETTLE_S = 20.0
_LOOK_S = 0.25


class StrangerDaemon:
    """Runs from the beginning of a `with` to its end. Its log is in the folder.

    Attributes:
      socket: path of its socket.
    """

    def __init__(self, program: str, folder: pathlib.Path) -> None:
        self.socket = str(folder / "gradsyncd.sock")
        self._log = (folder / "gradsyncd.log").open("wb")
        self._process = subprocess.Popen(
            [program, f"--socket={self.socket}", "--cuda_library=none"],
            stderr=self._log,
            preexec_fn=end_with_parent,
        )

    def __enter__(self) -> StrangerDaemon:
        end = time.monotonic() + _START_S
        sockets = [self.socket, self.socket.replace(".sock", "-fd.sock")]
        while not all(os.path.exists(path) for path in sockets):
            if time.monotonic() > end or self._process.poll() is not None:
                raise RuntimeError(f"gradsyncd does not start: see {self._log.name}")
            time.sleep(0.02)
        for path in sockets:
            os.chmod(path, 0o777)
        return self

    def __exit__(
        self,
        kind: Optional[type[BaseException]],
        error: Optional[BaseException],
        trace: Optional[TracebackType],
    ) -> None:
        self._process.kill()
        self._process.wait()
        self._log.close()

    def settled(self) -> Footprint:
        """The footprint once it has not shrunk for a second, at the latest after 20 s."""
        end = time.monotonic() + _SETTLE_S
        least, since = footprint_of(self._process.pid), time.monotonic()
        while time.monotonic() < end and time.monotonic() - since < 1:
            time.sleep(_LOOK_S)
            now = footprint_of(self._process.pid)
            if (now.files, now.threads, now.memory_kib) < (
                least.files,
                least.threads,
                least.memory_kib,
            ):
                least, since = now, time.monotonic()
        return least
