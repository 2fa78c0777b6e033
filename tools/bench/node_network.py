"""The nodes of a benchmark, all on this machine: see tools/virtual_network."""

from __future__ import annotations

import dataclasses
import json
import subprocess
from typing import Optional

from child_process import end_with_parent

_END_LIMIT_S = 10.0


@dataclasses.dataclass(frozen=True)
class Node:
    """Where some of the ranks and a daemon run.

    Attributes:
      address: for other nodes; "" if there are none.
      command_prefix: what stands before a command to run it there.
      interface: that the address belongs to; "" if there are no other nodes.
    """

    address: str = ""
    command_prefix: tuple[str, ...] = ()
    interface: str = ""


class NetworkFailed(Exception):
    """virtual-network did not describe any nodes."""


class NodeNetwork:
    """Several nodes, each with a link of its own. A context manager: its end removes the links.

    Attributes:
      nodes: the nodes.
      description: for people; says it if links are loopback, unlimited.
      limited: whether links keep their rate.
    """

    def __init__(self, program: str, count: int, rate: Optional[str]) -> None:
        """Makes the nodes.

        Args:
          program: path of virtual-network.
          count: of nodes.
          rate: of every node's link, each way, as "1gbit"; None: as fast as memory.

        Raises:
          NetworkFailed: it has made none.
        """
        self._process = subprocess.Popen(
            [program, f"--nodes={count}", *([f"--rate={rate}"] if rate else [])],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            text=True,
            start_new_session=True,
            preexec_fn=end_with_parent,
        )
        assert self._process.stdout is not None
        try:
            answer = json.loads(self._process.stdout.readline())
        except ValueError as error:
            self.__exit__()
            raise NetworkFailed(f"{program} has made no nodes") from error
        isolated = answer["kind"] == "namespaces"
        self.description: str = answer["description"]
        self.limited = isolated and rate is not None
        self.nodes = tuple(
            Node(node["address"], tuple(node["command_prefix"]), "eth0" if isolated else "lo")
            for node in answer["nodes"]
        )

    def __enter__(self) -> NodeNetwork:
        """Nothing more."""
        return self

    def __exit__(self, *_: object) -> None:
        """Removes the nodes."""
        assert self._process.stdin is not None and self._process.stdout is not None
        self._process.stdin.close()
        self._process.stdout.close()
        try:
            self._process.wait(_END_LIMIT_S)
        except subprocess.TimeoutExpired:
            self._process.kill()
            self._process.wait()
