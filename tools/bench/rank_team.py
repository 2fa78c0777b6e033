"""The rank processes of one implementation, and how the bench commands them.

A rank connects to the team's socket and introduces itself: {"rank": N, "pid": N}. It gets its
configuration, and answers when it is ready. From then on it gets commands, {"call": NAME, ...}, and
answers each with {"answer": ...} or {"error": TEXT}. All messages are lines of JSON.
"""

from __future__ import annotations

import json
import os
import select
import socket
import time
from collections.abc import Mapping, Sequence
from typing import Any, Callable, Optional

from child_process import ChildProcess
from machine import process_cpu_seconds

# Longer than Gloo needs for 1 GiB among 8 ranks on 2 cores.
_ANSWER_LIMIT_S = 600.0
# How soon the death of a process is noticed before it has connected.
_LOOK_AGAIN_S = 0.2
_END_LIMIT_S = 10.0


class RankFailed(Exception):
    """A rank failed, ended or hangs; the text says which and shows why."""


class RankTeam:
    """Rank processes that wait for commands. A context manager: ends them.

    Attributes:
      name: of the implementation.
      ranks: how many there are.
    """

    def __init__(
        self,
        name: str,
        directory: str,
        commands: Sequence[Sequence[str]],
        configuration: Callable[[int], dict[str, Any]],
        ranks: int,
        environment: Optional[Mapping[str, str]] = None,
    ) -> None:
        """Starts the ranks; returns when all are ready.

        Args:
          name: of the implementation.
          directory: for its socket, `name`.sock, and its log.
          commands: one for each rank, or one launcher that starts all of them.
          configuration: of each rank, by its number.
          ranks: how many there will be.
          environment: replaces this process's.

        Raises:
          RankFailed: a rank did not become ready.
        """
        self.name = name
        self.ranks = ranks
        self._processes: list[ChildProcess] = []
        self._connections: dict[int, socket.socket] = {}
        self._files: dict[int, Any] = {}
        self._pids: list[int] = []
        log = os.path.join(directory, f"{name}.log")
        try:
            with socket.socket(socket.AF_UNIX) as listener:
                listener.bind(team_socket(directory, name))
                listener.listen(ranks)
                for command in commands:
                    self._processes.append(ChildProcess(command, log, environment))
                self._accept(listener)
            for rank in range(ranks):
                self._send(rank, configuration(rank))
            self._answers()
        except BaseException:
            self._kill()
            self.close()
            raise
        # The launcher counts, too.
        self._pids = list({*self._pids, *(process.pid for process in self._processes)})

    def __enter__(self) -> RankTeam:
        """Nothing more."""
        return self

    def __exit__(self, kind: object, *_: object) -> None:
        """Ends the ranks; at once if something has failed."""
        if kind is not None:
            self._kill()
        self.close()

    def call(self, name: str, **arguments: Any) -> list[Any]:
        """Gives every rank a command; returns the answers, in rank order.

        Raises:
          RankFailed: of the first rank that failed.
        """
        for rank in range(self.ranks):
            self._send(rank, {"call": name, **arguments})
        return self._answers()

    def cpu_seconds(self) -> float:
        """CPU time of all processes so far."""
        return sum(map(process_cpu_seconds, self._pids))

    def launcher_cpu_seconds(self) -> float:
        """CPU time so far of the launcher, if there is one."""
        if len(self._processes) == self.ranks:
            return 0.0
        return process_cpu_seconds(self._processes[0].pid)

    def close(self) -> None:
        """Ends the ranks."""
        for rank, connection in self._connections.items():
            self._files[rank].close()
            connection.close()
        self._connections = {}
        deadline = time.monotonic() + _END_LIMIT_S
        for process in self._processes:
            if not process.await_end(max(0.0, deadline - time.monotonic())):
                process.stop()
        self._processes = []

    def _kill(self) -> None:
        for process in self._processes:
            process.kill()

    def _accept(self, listener: socket.socket) -> None:
        listener.settimeout(_LOOK_AGAIN_S)
        deadline = time.monotonic() + _ANSWER_LIMIT_S
        while len(self._connections) < self.ranks:
            try:
                connection, _ = listener.accept()
            except socket.timeout:
                for process in self._processes:
                    if process.ended() is not None:
                        raise RankFailed(self._text_of_end(process)) from None
                if time.monotonic() > deadline:
                    raise RankFailed(f"ranks of {self.name} have not started") from None
                continue
            file = connection.makefile("r", encoding="utf-8")
            line = file.readline()
            if not line:
                raise RankFailed(f"a rank of {self.name} has ended at its start")
            hello = json.loads(line)
            self._connections[hello["rank"]] = connection
            self._files[hello["rank"]] = file
            self._pids.append(hello["pid"])

    def _send(self, rank: int, message: dict[str, Any]) -> None:
        try:
            self._connections[rank].sendall(json.dumps(message).encode() + b"\n")
        except OSError:
            raise RankFailed(self._text_of_loss(rank)) from None

    def _answers(self) -> list[Any]:
        answers: dict[int, Any] = {}
        deadline = time.monotonic() + _ANSWER_LIMIT_S
        while len(answers) < self.ranks:
            waited = {c: rank for rank, c in self._connections.items() if rank not in answers}
            ready, _, _ = select.select(waited, [], [], max(0.0, deadline - time.monotonic()))
            if not ready:
                raise RankFailed(f"{self.name} ranks {sorted(waited.values())} have not answered")
            for connection in ready:
                answers[waited[connection]] = self._answer(waited[connection])
        return [answers[rank] for rank in range(self.ranks)]

    def _answer(self, rank: int) -> Any:
        try:
            line = self._files[rank].readline()
        except OSError:
            line = ""
        if not line:
            raise RankFailed(self._text_of_loss(rank))
        message = json.loads(line)
        if "error" in message:
            raise RankFailed(f"{self.name} rank {rank}: {message['error']}")
        return message["answer"]

    def _text_of_loss(self, rank: int) -> str:
        process = self._processes[rank if len(self._processes) == self.ranks else 0]
        process.await_end(_LOOK_AGAIN_S)
        return self._text_of_end(process, f" rank {rank}")

    def _text_of_end(self, process: ChildProcess, rank: str = "") -> str:
        return f"{self.name}{rank} has ended with code {process.ended()}:\n{process.last_output()}"


def team_socket(directory: str, name: str) -> str:
    """Where the ranks of that implementation connect."""
    return os.path.join(directory, f"{name}.sock")
