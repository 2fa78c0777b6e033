"""The processes and files of a benchmark: nodes, daemons, teams of ranks."""

from __future__ import annotations

import contextlib
import json
import os
import subprocess
import sys
from collections.abc import Mapping, Sequence
from typing import Any, Optional

from launcher import Child, Failed, Launcher, Node
from machine import children_of, process_cpu_seconds
from rank_team import RankTeam
from source_tree import find_program

# A daemon's words about a rank's error come within milliseconds.
_LAST_WORDS_S = 0.2
_STATUS_LIMIT_S = 30.0


class Stage(Launcher):
    """A context manager: its end ends every process and removes every file.

    Attributes:
      ranks: how many on all nodes, node by node.
      nodes: where they run.
      rate: of each node's link, as "1gbit"; None: unlimited, or there is no link.
      notes: about the nodes, for the head of the table.
    """

    def __init__(self, daemon: str, nodes: int, ranks: int, rate: Optional[str], threads: int):
        """Args are kept for __enter__() and start_daemons().

        Args:
          daemon: path of gradsyncd.
          nodes: how many.
          ranks: on each node.
          rate: of each node's link; None: unlimited.
          threads: reduce threads of each gradsyncd; 0: its own default.
        """
        super().__init__()
        self._daemon = daemon
        self._wanted = (nodes, rate)
        self._memory = contextlib.ExitStack()
        self._daemons: list[tuple[Child, str]] = []
        self._coordinator = ""
        self._teams: list[RankTeam] = []
        self.ranks = ranks * nodes
        self._reduce_threads = threads
        self.nodes: list[Node] = [Node()]
        self.rate: Optional[str] = None
        self.notes: list[str] = []

    def __enter__(self) -> Stage:
        """Makes the nodes."""
        super().__enter__()
        nodes, rate = self._wanted
        if nodes > 1:
            with contextlib.ExitStack() as stack:
                stack.push(self)
                maker = find_program("tools/virtual_network/virtual-network")
                network = self.make_network(maker, nodes, rate)
                stack.pop_all()
            self.nodes = network.nodes
            self.rate = rate if network.limited else None
            self.notes.append(f"nodes: {network.description}")
            if not network.limited:
                kept = ": --rate is not kept" if rate else ""
                self.notes.append(f"links are unlimited{kept}")
        return self

    def __exit__(self, *error: object) -> None:
        """Ends everything; at once if something has failed."""
        try:
            if error[0] is None:
                for team in self._teams:
                    team.close()
        finally:
            super().__exit__(*error)
            self._memory.close()

    def start_daemons(self, flags: Sequence[str] = ()) -> None:
        """Starts a gradsyncd on each node; Failed if one does not start."""
        flags = [f"--reduce_threads={self._reduce_threads}", *flags]
        several = len(self.nodes) > 1
        for number, node in enumerate(self.nodes):
            daemon = self.start_daemon(self._daemon, node, number if several else None, flags)
            self._daemons.append(daemon)
        if several:
            gradsyncctl = find_program("tools/gradsyncctl/gradsyncctl")
            command = [gradsyncctl, f"--socket={self._daemons[0][1]}", "--json", "status"]
            try:
                asked = subprocess.run(
                    command, capture_output=True, text=True, check=False, timeout=_STATUS_LIMIT_S
                )
            except subprocess.TimeoutExpired as error:
                raise Failed(f"gradsyncd has not answered in {_STATUS_LIMIT_S:g} s") from error
            try:
                self._coordinator = str(json.loads(asked.stdout)["peer_address"])
            except (ValueError, KeyError) as error:
                raise Failed(f"gradsyncd does not say where: {asked.stderr}") from error

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
          launcher: the command that starts all ranks; None: each is started on its node. Empty: the
            program itself starts all.
          environment: variables besides those of this process.

        Raises:
          Failed: a rank did not become ready.
        """
        shared = {
            "impl": name,
            "ranks": self.ranks,
            "directory": str(self.directory),
            "coordinator": self._coordinator,
            "barrier": self.memory("barrier"),
            **options,
        }

        def configuration(rank: int) -> dict[str, Any]:
            node = self._node_of(rank)
            daemon_socket = self._daemons[node][1] if self._daemons else ""
            address = self.nodes[node].address or "127.0.0.1"
            return {**shared, "rank": rank, "address": address, "socket": daemon_socket}

        commands: list[tuple[Node, Sequence[str]]] = [
            (self.nodes[self._node_of(rank)], program) for rank in range(self.ranks)
        ]
        if launcher is not None:
            commands = [(self.nodes[0], [*launcher, *program])]
        team = RankTeam(self, name, commands, configuration, self.ranks, environment or {})
        self._teams.append(team)
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
        store = str(self.directory / f"{name}.store")
        return self.start_team(
            name,
            [sys.executable, os.path.join(folder, script)],
            {"store": store, "threads": threads, **options},
            launcher=() if len(self.nodes) == 1 else None,
            environment={
                "OMP_NUM_THREADS": str(threads),
                "WORLD_SIZE": str(self.ranks),
                # Importing some parts of PyTorch makes a folder of this name.
                "TORCHINDUCTOR_CACHE_DIR": str(self.directory / "inductor"),
                # PyTorch's Gloo would look for this machine's name.
                **interface,
                **environment,
            },
        )

    def memory(self, name: str) -> str:
        """Path of new memory that processes can map; it is freed with this object."""
        descriptor = os.memfd_create(name)
        self._memory.callback(os.close, descriptor)
        return f"/proc/{os.getpid()}/fd/{descriptor}"

    def daemon_cpu_seconds(self) -> float:
        """CPU time of all daemons so far, and of their workers."""
        daemons = sum(process_cpu_seconds(daemon.pid) for daemon, _ in self._daemons)
        return daemons + self.worker_cpu_seconds()

    def worker_cpu_seconds(self) -> float:
        """CPU time so far of the daemons' workers, one process for each job and GPU."""
        workers = [pid for daemon, _ in self._daemons for pid in children_of(daemon.pid)]
        return sum(map(process_cpu_seconds, workers))

    def cpu_seconds(self) -> float:
        """CPU time of this process and of all that it has started, so far."""
        teams = sum(team.cpu_seconds() for team in self._teams)
        return teams + self.daemon_cpu_seconds() + sum(os.times()[:2])

    def with_daemon_logs(self, error: Failed) -> Failed:
        """The same error with the daemons' last output, where the reason may be."""
        with contextlib.suppress(Failed):  # a process has ended; `error` says so already
            self.wait_for(lambda: False, _LAST_WORDS_S)
        said = [daemon.describe() for daemon, _ in self._daemons if daemon.said]
        return Failed("\n".join([str(error), *said]))

    def _node_of(self, rank: int) -> int:
        return rank * len(self.nodes) // self.ranks
