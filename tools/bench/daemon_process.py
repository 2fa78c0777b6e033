"""A gradsyncd of the script's own, one on each node."""

from __future__ import annotations

import json
import os
import pathlib
import socket
import subprocess
import time

from cpu_clock import process_cpu_seconds
from end_with_parent import terminate_with_parent
from node_network import Node

_START_LIMIT_S = 30.0
_STOP_LIMIT_S = 10.0
_LOG_LINES = 20


class DaemonFailed(Exception):
    """gradsyncd did not start; carries the end of its log."""


class DaemonProcess:
    """A node's gradsyncd, on a socket in `directory`, its log beside it. A context manager.

    Attributes:
      socket: path of its socket.
    """

    def __init__(
        self, program: str, directory: str, reduce_threads: int, node: Node, number: int
    ) -> None:
        """Starts it and waits until it listens.

        Args:
          program: path of gradsyncd.
          directory: of its socket and its log.
          reduce_threads: threads that add gradients; 0: the daemon's default.
          node: where it runs.
          number: of the node.

        Raises:
          DaemonFailed: it ended, or does not listen after 30 s.
        """
        self.socket = os.path.join(directory, f"gradsyncd-{number}.sock")
        self._log = pathlib.Path(directory, f"gradsyncd-{number}.log")
        peer = [f"--peer_listen={node.address}:0", f"--node_name=node{number}"]
        with self._log.open("wb") as log:
            self._process = subprocess.Popen(
                [
                    *node.command_prefix,
                    *(program, f"--socket={self.socket}", f"--reduce_threads={reduce_threads}"),
                    *(peer if node.address else []),
                ],
                stdin=subprocess.DEVNULL,
                stdout=log,
                stderr=log,
                # Ctrl-C is for the script, which ends the ranks first.
                start_new_session=True,
                preexec_fn=terminate_with_parent,
            )
        try:
            self._await_socket()
        except BaseException:
            self.close()
            raise

    def __enter__(self) -> DaemonProcess:
        """Nothing more."""
        return self

    def __exit__(self, *_: object) -> None:
        """Stops it."""
        self.close()

    def cpu_seconds(self) -> float:
        """User and system time so far."""
        return process_cpu_seconds(self._process.pid)

    def peer_address(self, gradsyncctl: str) -> str:
        """ "host:port" where other nodes' daemons reach it.

        Args:
          gradsyncctl: path of the program.

        Raises:
          DaemonFailed: it does not say.
        """
        asked = subprocess.run(
            [gradsyncctl, f"--socket={self.socket}", "--json", "status"],
            capture_output=True,
            text=True,
            check=False,
            timeout=_START_LIMIT_S,
        )
        try:
            return str(json.loads(asked.stdout)["peer_address"])
        except (ValueError, KeyError) as error:
            raise DaemonFailed(f"gradsyncd does not say where: {asked.stderr}") from error

    def last_output(self) -> str:
        """The end of its log."""
        lines = self._log.read_text(errors="replace").splitlines()
        return "\n".join(lines[-_LOG_LINES:])

    def close(self) -> None:
        """Stops it, if need be by force."""
        if self._process.poll() is None:
            self._process.terminate()
            try:
                self._process.wait(_STOP_LIMIT_S)
            except subprocess.TimeoutExpired:
                self._process.kill()
                self._process.wait()

    def _await_socket(self) -> None:
        deadline = time.monotonic() + _START_LIMIT_S
        while True:
            with socket.socket(socket.AF_UNIX) as connection:
                try:
                    connection.connect(self.socket)
                    return
                except OSError:
                    pass
            if self._process.poll() is not None or time.monotonic() > deadline:
                raise DaemonFailed(f"gradsyncd does not listen:\n{self.last_output()}")
            time.sleep(0.01)
