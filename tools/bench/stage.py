"""The processes and files of a benchmark: nodes, daemons, teams of ranks."""

from __future__ import annotations

import contextlib
import os
import sys
import tempfile
from collections.abc import Mapping, Sequence
from typing import Any, Optional

from daemon_process import DaemonProcess
from machine import process_cpu_seconds
from node_network import Node, NodeNetwork
from rank_team import RankFailed, RankTeam, team_socket
from source_tree import find_program


class Stage:
    """A context manager: its end ends every process and removes every file.

    Attributes:
      ranks: how many on all nodes, node by node.
      nodes: where they run.
      rate: of each node's link, as "1gbit"; None: unlimited, or there is no link.
      notes: about the nodes, for the head of the table.
      directory: for sockets and files by which ranks meet.
    """

    def __init__(self, daemon: str, nodes: int, ranks: int, rate: Optional[str], threads: int):
        """Makes the nodes.

        Args:
          daemon: path of gradsyncd.
          nodes: how many.
          ranks: on each node.
          rate: of each node's link; None: unlimited.
          threads: reduce threads of each gradsyncd; 0: its own default.
        """
        self._daemon = daemon
        self._stack = contextlib.ExitStack()
        self._daemons: list[DaemonProcess] = []
        self._coordinator = ""
        self._teams: list[RankTeam] = []
        self.ranks = ranks * nodes
        self._reduce_threads = threads
        self.nodes: tuple[Node, ...] = (Node(),)
        self.rate: Optional[str] = None
        self.notes: list[str] = []
        with contextlib.ExitStack() as stack:
            # Short: sockets lie in it.
            self.directory = stack.enter_context(
                tempfile.TemporaryDirectory(prefix="gradsync-bench-")
            )
            if nodes > 1:
                maker = find_program("tools/virtual_network/virtual-network")
                network = stack.enter_context(NodeNetwork(maker, nodes, rate))
                self.nodes = network.nodes
                self.rate = rate if network.limited else None
                self.notes.append(f"nodes: {network.description}")
                if not network.limited:
                    kept = ": --rate is not kept" if rate else ""
                    self.notes.append(f"links are unlimited{kept}")
            self._stack = stack.pop_all()

    def __enter__(self) -> Stage:
        """Nothing more."""
        return self

    def __exit__(self, *error: Any) -> None:
        """Ends everything."""
        self._stack.__exit__(*error)

    def start_daemons(self, flags: Sequence[str] = ()) -> None:
        """Starts a gradsyncd on each node; DaemonFailed if one does not start."""
        flags = [f"--reduce_threads={self._reduce_threads}", *flags]
        for number, node in enumerate(self.nodes):
            daemon = DaemonProcess(self._daemon, self.directory, node, number, flags)
            self._stack.callback(daemon.stop)
            self._daemons.append(daemon)
        if len(self.nodes) > 1:
            gradsyncctl = find_program("tools/gradsyncctl/gradsyncctl")
            self._coordinator = self._daemons[0].peer_address(gradsyncctl)

    def start_team(
        self,
        name: str,
        program: Sequence[str],
        options: Mapping[str, Any],
        launcher: Optional[Sequence[str]] = None,
        environment: Optional[Mapping[str, str]] = None,
    ) -> RankTeam:
        """Starts the ranks of an implementation.

        Args:
          name: of the implementation.
          program: of each rank.
          options: what its ranks need besides the configuration that all have.
          launcher: the command that starts all ranks; None: each is started on its node.
          environment: variables besides those of this process.

        Raises:
          RankFailed: a rank did not become ready.
        """
        command = [*program, team_socket(self.directory, name)]
        shared = {
            "impl": name,
            "ranks": self.ranks,
            "directory": self.directory,
            "coordinator": self._coordinator,
            "barrier": self.memory("barrier"),
            **options,
        }

        def configuration(rank: int) -> dict[str, Any]:
            node = self._node_of(rank)
            daemon_socket = self._daemons[node].socket if self._daemons else ""
            address = self.nodes[node].address or "127.0.0.1"
            return {**shared, "rank": rank, "address": address, "socket": daemon_socket}

        commands = [
            [*self.nodes[self._node_of(rank)].command_prefix, *command, str(rank)]
            for rank in range(self.ranks)
        ]
        team = RankTeam(
            name,
            self.directory,
            [[*launcher, *command]] if launcher else commands,
            configuration,
            self.ranks,
            {**os.environ, **environment} if environment else None,
        )
        self._teams.append(team)
        self._stack.push(team)
        return team

    def start_python_team(
        self,
        name: str,
        script: str,
        options: Mapping[str, Any],
        threads: int,
        environment: Mapping[str, str],
    ) -> RankTeam:
        """Starts ranks of PyTorch, each with `threads` that compute."""
        folder = os.path.dirname(os.path.abspath(__file__))
        interface = {"GLOO_SOCKET_IFNAME": self.nodes[0].interface} if len(self.nodes) > 1 else {}
        store = os.path.join(self.directory, f"{name}.store")
        return self.start_team(
            name,
            [sys.executable, os.path.join(folder, script)],
            {"store": store, "threads": threads, **options},
            environment={
                "OMP_NUM_THREADS": str(threads),
                "WORLD_SIZE": str(self.ranks),
                # Importing some parts of PyTorch makes a folder of this name.
                "TORCHINDUCTOR_CACHE_DIR": os.path.join(self.directory, "inductor"),
                # PyTorch's Gloo would look for this machine's name.
                **interface,
                **environment,
            },
        )

    def memory(self, name: str) -> str:
        """Path of new memory that processes can map; it is freed with this object."""
        descriptor = os.memfd_create(name)
        self._stack.callback(os.close, descriptor)
        return f"/proc/{os.getpid()}/fd/{descriptor}"

    def daemon_cpu_seconds(self) -> float:
        """CPU time of all daemons so far."""
        return sum(process_cpu_seconds(daemon.pid) for daemon in self._daemons)

    def cpu_seconds(self) -> float:
        """CPU time of this process and of all that it has started, so far."""
        teams = sum(team.cpu_seconds() for team in self._teams)
        return teams + self.daemon_cpu_seconds() + sum(os.times()[:2])

    def with_daemon_logs(self, error: RankFailed) -> RankFailed:
        """The same error with the daemons' last output, where the reason may be."""
        said = "\n".join(daemon.last_output() for daemon in self._daemons)
        return RankFailed(f"{error}\ngradsyncd says:\n{said}") if said else error

    def _node_of(self, rank: int) -> int:
        return rank * len(self.nodes) // self.ranks
