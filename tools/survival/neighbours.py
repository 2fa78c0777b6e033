"""Attackers and innocent jobs of other users: the programs of tests/attack."""

from __future__ import annotations

import dataclasses
import os
import re
import select
import subprocess
from collections.abc import Sequence
from typing import Optional

from launcher import end_with_parent

# Nothing of a round takes longer, on a busy machine.
_PATIENCE_S = 120.0


class JobEnded(Exception):
    """A job has ended, or does not answer; the text says which and why."""


@dataclasses.dataclass(frozen=True)
class Steps:
    """Times of a job's steps, from the first mark to the verdict, in microseconds.

    Attributes:
      p50_us: the median.
      p99_us: 99 % are shorter.
      max_us: the longest.
      wrong: buckets whose sum was not that of the ranks' gradients.
    """

    p50_us: int
    p99_us: int
    max_us: int
    wrong: int


class _Program:
    """A program that reads lines and prints lines. It ends when its input does."""

    def __init__(self, command: Sequence[str], name: str, nice: int) -> None:
        def prepare() -> None:
            end_with_parent()
            os.nice(nice)

        self.name = name
        self._process = subprocess.Popen(
            command,
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=subprocess.DEVNULL,
            text=True,
            bufsize=1,
            preexec_fn=prepare,
        )

    def send(self, line: str) -> None:
        assert self._process.stdin is not None
        try:
            self._process.stdin.write(line + "\n")
        except BrokenPipeError:
            raise JobEnded(f"{self.name} has ended") from None

    def line(self, limit_s: float = _PATIENCE_S) -> str:
        """The next line.

        Raises:
          JobEnded: none comes.
        """
        assert self._process.stdout is not None
        ready, _, _ = select.select([self._process.stdout], [], [], limit_s)
        if not ready:
            raise JobEnded(f"{self.name} says nothing for {limit_s:.0f} s")
        line = self._process.stdout.readline().strip()
        if not line:
            raise JobEnded(f"{self.name} has ended")
        return line

    def end(self) -> None:
        """Ends the input, then the process."""
        assert self._process.stdin is not None
        self._process.stdin.close()
        try:
            self._process.wait(10)
        except subprocess.TimeoutExpired:
            self.kill()

    def kill(self) -> None:
        self._process.kill()
        self._process.wait()


# Arguments of memory_attacker: how many connections, layouts and bytes.
_MEMORY_ATTACKS = {
    "long_messages": ("messages", "8", str(16 << 20)),
    "unopened_streams": ("streams", "600"),
    "long_names": ("layouts", "32", "64", "2000"),
    "unread_answers": ("unread", "16"),
    "many_jobs": ("jobs", "50", "4"),
}


def attacks_of(attacker: str, memory_attacker: str, socket: str, uid: int) -> dict[str, list[str]]:
    """All attacks on a daemon: name and command line."""
    listed = subprocess.run([attacker, "--list"], capture_output=True, text=True, check=True)
    attacks = {
        name: [attacker, f"--attack={name}", f"--socket={socket}", f"--uid={uid}"]
        for name in listed.stdout.split()
    }
    for name, words in _MEMORY_ATTACKS.items():
        attacks[name] = [memory_attacker, socket, *words]
    return attacks


class Attacker:
    """One attack, from when it is at its full strength until end()."""

    def __init__(self, name: str, command: Sequence[str]) -> None:
        self._program = _Program(command, f"attack {name}", nice=19)
        try:
            self._program.line()  # it is at its full strength
        except JobEnded:
            pass  # the daemon has refused it everything

    def end(self) -> None:
        """Ends the attack."""
        self._program.end()


class InnocentJob:
    """All ranks of a job, in one process. One thread."""

    def __init__(
        self, program: str, socket: str, uid: int, name: str, flags: Sequence[str] = ()
    ) -> None:
        command = [program, f"--socket={socket}", f"--uid={uid}", f"--job={name}", *flags]
        self._program = _Program(command, f"job {name}", nice=0)
        self._ready: Optional[bool] = None

    def begin(self, steps: int) -> None:
        """Begins `steps` steps; result() waits for them."""
        if self._ready is None:
            said = self._program.line()
            if said != "READY":
                raise JobEnded(f"{self._program.name} does not begin: {said}")
            self._ready = True
        self._program.send(str(steps))

    def result(self) -> Steps:
        """The times of the steps that began last.

        Raises:
          JobEnded: a step was not complete.
        """
        said = self._program.line()
        numbers = re.fullmatch(r"p50_us=(\d+) p99_us=(\d+) max_us=(\d+) wrong=(\d+)", said)
        if numbers is None:
            raise JobEnded(f"{self._program.name}: {said}")
        return Steps(*(int(number) for number in numbers.groups()))

    def kill(self) -> None:
        """SIGKILL: the daemon loses every rank."""
        self._program.kill()
