"""The bench's own gradsyncd, one on each node."""

from __future__ import annotations

import json
import os
import socket
import subprocess
import time
from collections.abc import Sequence

from child_process import ChildProcess
from node_network import Node

_START_LIMIT_S = 30.0


class DaemonFailed(Exception):
    """gradsyncd did not start; the text has the end of its log."""


class DaemonProcess(ChildProcess):
    """A node's gradsyncd.

    Attributes:
      socket: path of its socket.
    """

    def __init__(
        self, program: str, directory: str, node: Node, number: int, flags: Sequence[str]
    ) -> None:
        """Starts it and waits until it listens.

        Args:
          program: path of gradsyncd.
          directory: for its socket and its log.
          node: where it runs.
          number: of the node.
          flags: further flags of gradsyncd.

        Raises:
          DaemonFailed: it ended, or does not listen after 30 s.
        """
        self.socket = os.path.join(directory, f"gradsyncd-{number}.sock")
        peer = [f"--peer_listen={node.address}:0", f"--node_name=node{number}"]
        command = [program, f"--socket={self.socket}", *flags, *(peer if node.address else [])]
        log = os.path.join(directory, f"gradsyncd-{number}.log")
        super().__init__([*node.command_prefix, *command], log)
        try:
            self._await_socket()
        except BaseException:
            self.stop()
            raise

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

    def _await_socket(self) -> None:
        deadline = time.monotonic() + _START_LIMIT_S
        while True:
            with socket.socket(socket.AF_UNIX) as connection:
                try:
                    connection.connect(self.socket)
                    return
                except OSError:
                    pass
            if self.ended() is not None or time.monotonic() > deadline:
                raise DaemonFailed(f"gradsyncd does not listen:\n{self.last_output()}")
            time.sleep(0.01)
