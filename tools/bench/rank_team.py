"""The rank processes of one implementation, and how the bench commands them.

A rank connects to the team's socket and introduces itself: {"rank": N, "pid": N}. It gets its
configuration, and answers when it is ready. From then on it gets commands, {"call": NAME, ...}, and
answers each with {"answer": ...} or {"error": TEXT}. All messages are lines of JSON.
"""

from __future__ import annotations

import json
import socket
from collections.abc import Mapping, Sequence
from typing import Any, Callable

from launcher import Failed, Launcher, Node
from machine import process_cpu_seconds

# Longer than Gloo needs for 1 GiB among 8 ranks on 2 cores.
_ANSWER_LIMIT_S = 600.0
_END_LIMIT_S = 10.0


class RankTeam:
    """Rank processes that wait for commands. The launcher ends those that close() does not.

    Attributes:
      name: of the implementation.
      ranks: how many there are.
    """

    def __init__(
        self,
        launcher: Launcher,
        name: str,
        commands: Sequence[tuple[Node, Sequence[str]]],
        configuration: Callable[[int], dict[str, Any]],
        ranks: int,
        environment: Mapping[str, str],
    ) -> None:
        """Starts the ranks; returns when all are ready.

        Args:
          launcher: of the processes.
          name: of the implementation.
          commands: one for each rank, or one program that starts all of them; behind each comes the
            path of the team's socket, and the rank's number if there is one for each.
          configuration: of each rank, by its number.
          ranks: how many there will be.
          environment: variables besides those of this process.

        Raises:
          Failed: a rank did not become ready.
        """
        self.name = name
        self.ranks = ranks
        self._launcher = launcher
        self._connections: dict[int, socket.socket] = {}
        self._files: dict[int, Any] = {}
        self._pids: list[int] = []
        path = str(launcher.directory / f"{name}.sock")
        with socket.socket(socket.AF_UNIX) as listener:
            listener.bind(path)
            listener.listen(ranks)
            self._children = [
                launcher.start(
                    f"{name} rank {rank}" if len(commands) == ranks else name,
                    node,
                    [*command, path, *([str(rank)] if len(commands) == ranks else [])],
                    environment,
                )
                for rank, (node, command) in enumerate(commands)
            ]
            self._accept(listener)
        for rank in range(ranks):
            self._send(rank, configuration(rank))
        self._answers()
        # The launcher counts, too.
        self._pids = list({*self._pids, *(child.pid for child in self._children)})

    def call(self, name: str, **arguments: Any) -> list[Any]:
        """Gives every rank a command; returns the answers, in rank order.

        Raises:
          Failed: of the first rank that failed.
        """
        for rank in range(self.ranks):
            self._send(rank, {"call": name, **arguments})
        return self._answers()

    def cpu_seconds(self) -> float:
        """CPU time of all processes so far."""
        return sum(map(process_cpu_seconds, self._pids))

    def launcher_cpu_seconds(self) -> float:
        """CPU time so far of the program that has started all ranks, if there is one."""
        if len(self._children) == self.ranks:
            return 0.0
        return process_cpu_seconds(self._children[0].pid)

    def close(self) -> None:
        """Lets the ranks leave in peace."""
        for child in self._children:
            child.may_end = True
        for rank, connection in self._connections.items():
            self._files[rank].close()
            connection.close()
        self._launcher.wait_for(lambda: all(c.ended for c in self._children), _END_LIMIT_S)

    def _accept(self, listener: socket.socket) -> None:
        listener.setblocking(False)

        def all_here() -> bool:
            try:
                connection, _ = listener.accept()
            except BlockingIOError:
                return False
            connection.setblocking(True)
            file = connection.makefile("r", encoding="utf-8")
            hello = json.loads(file.readline() or self._lost())
            self._connections[hello["rank"]] = connection
            self._files[hello["rank"]] = file
            self._pids.append(hello["pid"])
            return len(self._connections) == self.ranks

        if not self._launcher.wait_for(all_here, _ANSWER_LIMIT_S, [listener]):
            raise Failed(f"ranks of {self.name} have not started")

    def _send(self, rank: int, message: dict[str, Any]) -> None:
        try:
            self._connections[rank].sendall(json.dumps(message).encode() + b"\n")
        except OSError:
            self._lost()

    def _answers(self) -> list[Any]:
        # In the order in which they come: a rank that has failed may keep the others waiting.
        answers: dict[int, Any] = {}
        while len(answers) < self.ranks:
            waiting = [rank for rank in range(self.ranks) if rank not in answers]
            ready = self._launcher.wait_for_inputs(
                [self._connections[rank] for rank in waiting], _ANSWER_LIMIT_S
            )
            if not ready:
                raise Failed(f"{self.name} rank {waiting[0]} has not answered")
            for rank in waiting:
                if self._connections[rank] in ready:
                    message = json.loads(self._read_line(rank) or self._lost())
                    if "error" in message:
                        raise Failed(f"{self.name} rank {rank}: {message['error']}")
                    answers[rank] = message["answer"]
        return [answers[rank] for rank in range(self.ranks)]

    def _read_line(self, rank: int) -> str:
        try:
            line: str = self._files[rank].readline()
        except OSError:  # it was killed
            return ""
        return line

    def _lost(self) -> str:
        """Raises Failed for a rank whose connection has ended: its process does, too."""
        self._launcher.wait_for(lambda: False, _END_LIMIT_S)
        raise Failed(f"{self.name}: a rank has closed its connection")
