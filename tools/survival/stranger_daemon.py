"""A daemon of its own, which every user reaches."""

from __future__ import annotations

import os
import pathlib
import socket
import subprocess
import time
from types import TracebackType
from typing import Optional

from launcher import end_with_parent
from process_footprint import Footprint, footprint_of, least_of

_START_S = 30.0
# How long the daemon may need until everything of an attacker has ended.
_SETTLE_S = 20.0
_LOOK_S = 0.25


class StrangerDaemon:
    """A node. It runs from the beginning of a `with` to its end; its log is in the folder.

    Attributes:
      socket: path of its socket.
      peer: "host:port" where other nodes reach it.
    """

    def __init__(self, program: str, folder: pathlib.Path, name: str, address: str) -> None:
        self.socket = str(folder / f"{name}.sock")
        self.peer = f"{address}:{_free_port(address)}"
        self._log = (folder / f"{name}.log").open("wb")
        self._process = subprocess.Popen(
            [
                program,
                f"--socket={self.socket}",
                f"--node_name={name}",
                f"--peer_listen={self.peer}",
                # As the daemon has it by default: only then does the attack worker_starts start
                # workers, with or without a driver on this machine.
                "--cuda_library=libcuda.so.1",
            ],
            stderr=self._log,
            preexec_fn=end_with_parent,
        )

    def __enter__(self) -> StrangerDaemon:
        end = time.monotonic() + _START_S
        sockets = [self.socket, self.socket.replace(".sock", "-fd.sock")]
        while not all(os.path.exists(path) for path in sockets):
            if time.monotonic() > end or self._process.poll() is not None:
                said = pathlib.Path(self._log.name).read_text(errors="replace")
                raise RuntimeError(f"gradsyncd does not start: {said[-1000:]}")
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

    def end(self) -> Optional[str]:
        """How it has ended; None: it runs."""
        code = self._process.poll()
        return None if code is None else f"gradsyncd has ended with {code}"

    def settled(self) -> Footprint:
        """The footprint once nothing of it has shrunk for a second, at the latest after 20 s."""
        end = time.monotonic() + _SETTLE_S
        least, since = footprint_of(self._process.pid), time.monotonic()
        while time.monotonic() < end and time.monotonic() - since < 1:
            time.sleep(_LOOK_S)
            now = least_of(least, footprint_of(self._process.pid))
            if now != least:
                least, since = now, time.monotonic()
        return least


def _free_port(address: str) -> int:
    with socket.socket() as one:
        one.bind((address, 0))
        return int(one.getsockname()[1])
