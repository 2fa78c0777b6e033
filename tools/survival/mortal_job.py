"""A job that loses a rank and begins anew."""

from __future__ import annotations

import time
from collections.abc import Sequence

from neighbours import JobEnded, Program

# Within this time a survivor knows which rank is lost. On an idle machine 100 ms are enough: see
# tests/fault/rank_loss_test.cc.
_TOLD_S = 1.0
# Far more than a round has: the steps end when a rank is lost.
_STEPS = 10**9


class MortalJob:
    """Each rank is a process of its own: of scripted_trainer.cc, which compares every element.

    Calls: begin (lose begin)* kill. One thread.
    """

    def __init__(
        self, program: str, uid: int, name: str, sockets: Sequence[str], coordinator: str = ""
    ) -> None:
        """Starts the processes.

        Args:
          program: scripted_trainer.
          uid: the job's user.
          name: of the job.
          sockets: of each rank's daemon.
          coordinator: if the ranks are on two nodes.
        """
        self._program = program
        self._uid = uid
        self._name = name
        self._sockets = list(sockets)
        self._coordinator = coordinator
        self._ranks = [self._start(rank) for rank in range(len(sockets))]

    def begin(self) -> None:
        """Joins all ranks and runs a step. Then they run steps until one of them is lost.

        Raises:
          JobEnded: a rank could not.
        """
        for rank, socket in enumerate(self._sockets):
            where = f"socket={socket} rank={rank} world={len(self._sockets)}"
            if self._coordinator:
                where += f" coordinator={self._coordinator}"
            self._ranks[rank].send(f"join job={self._name} {where}")
        self._expect_all("join")
        for command in ("register buckets=8 count=4096 op=sum", "step"):
            for process in self._ranks:
                process.send(command)
            self._expect_all(command)
        for process in self._ranks:
            process.send(f"step times={_STEPS}")

    def lose(self, lost: int) -> list[str]:
        """Kills a rank, and waits until the others know. Returns what was wrong, as sentences.

        Starts a process for that rank: the job can begin anew.
        """
        killed_ns = time.monotonic_ns()
        self._ranks[lost].kill()
        faults = []
        for rank, process in enumerate(self._ranks):
            try:
                said = process.line()
            except JobEnded as silent:
                faults.append(f"{silent}, and rank {lost} was lost")
                continue
            answer = _answer(said)
            if rank == lost:
                if said:
                    faults.append(f"{process.name}: {_text(answer)}, before it was killed")
                continue
            if (answer.get("reason"), answer.get("rank")) != ("RANK_LOST", str(lost)):
                why = _text(answer) if said else "it has ended"
                faults.append(f"{process.name} did not hear that rank {lost} was lost: {why}")
                continue
            late_s = (int(answer["end_ns"]) - killed_ns) / 1e9
            if late_s > _TOLD_S:
                faults.append(
                    f"{process.name} heard after {late_s:.2f} s that rank {lost} was lost; at "
                    f"most {_TOLD_S:g} s"
                )
        self._ranks[lost] = self._start(lost)
        return faults

    def faults(self) -> list[str]:
        """Why ranks ended their steps although none was killed, as sentences: a wrong sum, too."""
        return [
            f"{process.name}: {_text(_answer(process.line())) or 'it has ended'}"
            for process in self._ranks
            if process.has_said
        ]

    def kill(self) -> None:
        """SIGKILL: all ranks are lost."""
        for process in self._ranks:
            process.kill()

    def _start(self, rank: int) -> Program:
        process = Program([self._program], f"rank {rank} of job {self._name}", nice=0)
        process.send(f"become {self._uid}")
        answer = _answer(process.line())
        if answer.get("code") != "OK":
            raise JobEnded(f"{process.name} cannot become user {self._uid}: {_text(answer)}")
        return process

    def _expect_all(self, command: str) -> None:
        for process in self._ranks:
            said = process.line()
            answer = _answer(said)
            if answer.get("code") != "OK":
                why = _text(answer) if said else process.how_it_ends()
                raise JobEnded(f"{process.name}: {command}: {why}")


def _answer(line: str) -> dict[str, str]:
    """The fields of a line of scripted_trainer.cc."""
    fields = (field.partition("=") for field in line.split("\t"))
    return {name: value for name, _, value in fields if name}


def _text(answer: dict[str, str]) -> str:
    words = (answer.get(name, "") for name in ("code", "reason", "message"))
    return " ".join(word for word in words if word)
