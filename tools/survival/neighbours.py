"""Attackers and innocent jobs of other users: the programs of tests/attack and tests/fault."""

from __future__ import annotations

import dataclasses
import os
import re
import select
import signal
import subprocess
import tempfile
from collections.abc import Mapping, Sequence
from typing import Optional

from launcher import end_with_parent

# Nothing of a round takes longer, on a busy machine.
_PATIENCE_S = 120.0
# So long an attacker may need to end: it has the lowest priority.
_END_S = 60.0


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


class Program:
    """A program that reads lines and prints lines. It ends when its input does."""

    def __init__(self, command: Sequence[str], name: str, nice: int) -> None:
        def prepare() -> None:
            end_with_parent()
            os.nice(nice)

        self.name = name
        self._errors = tempfile.TemporaryFile()
        self._process = subprocess.Popen(
            command,
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=self._errors,
            text=True,
            bufsize=1,
            preexec_fn=prepare,
        )

    @property
    def has_said(self) -> bool:
        """Whether line() has something to return now: a line, or the end of the output."""
        return bool(select.select([self._process.stdout], [], [], 0)[0])

    def send(self, line: str) -> None:
        assert self._process.stdin is not None
        try:
            self._process.stdin.write(line + "\n")
        except BrokenPipeError:
            raise JobEnded(f"{self.name} {self.how_it_ends() or 'has ended'}") from None

    def line(self, limit_s: float = _PATIENCE_S) -> str:
        """The next line; "" if it has closed its output.

        Raises:
          JobEnded: it says nothing.
        """
        assert self._process.stdout is not None
        ready, _, _ = select.select([self._process.stdout], [], [], limit_s)
        if not ready:
            raise JobEnded(f"{self.name} says nothing for {limit_s:.0f} s")
        return self._process.stdout.readline().strip()

    def close_input(self) -> None:
        assert self._process.stdin is not None
        try:
            self._process.stdin.close()
        except BrokenPipeError:
            pass  # a line that it has not read

    def how_it_ends(self) -> str:
        """Waits for the end. Kills it if it does not end. Says how, and what it said last."""
        try:
            code = self._process.wait(_END_S)
        except subprocess.TimeoutExpired:
            self.kill()
            return f"does not end within {_END_S:.0f} s"
        if code == 0:
            return ""
        how = f"exited with {code}" if code > 0 else f"was ended by {signal.Signals(-code).name}"
        self._errors.seek(0)
        said = self._errors.read().decode(errors="replace").strip()
        return f"{how}: {said.splitlines()[-1]}" if said else how

    def kill(self) -> None:
        self._process.kill()
        self._process.wait()


# Arguments of memory_attacker: how many connections, layouts and bytes.
_MEMORY_ATTACKS = {
    "long_messages": ("messages", "8", str(16 << 20)),
    "far_too_long_messages": ("messages", "8", str(256 << 20)),
    "unopened_streams": ("streams", "600"),
    "long_names": ("layouts", "32", "64", "2000"),
    "many_buckets_and_ranks": ("buckets", "32", "16", "4096", "32"),
    "many_timelines": ("buckets", "32", "64", "1365", "1"),
    "unread_answers": ("unread", "16"),
    "unread_reflection": ("reflection", "600"),
    "many_jobs": ("jobs", "50", "4"),
    "many_collectives": ("collectives", "64"),
}


def attacks_of(
    programs: Mapping[str, str],
    socket: str,
    peer: str,
    other_socket: str,
    uid: int,
    victim: Sequence[str],
) -> dict[str, list[str]]:
    """All attacks on a daemon: name and command line.

    Args:
      programs: attacker and memory_attacker.
      socket: of the daemon.
      peer: "host:port" where other nodes reach it.
      other_socket: of another node's daemon.
      uid: of the attacker, except on the peer port.
      victim: flags that name the job at which some attacks aim.
    """
    program = programs["attacker"]
    listed = subprocess.run([program, "--list"], capture_output=True, text=True, check=True)
    where = [f"--socket={socket}", f"--peer={peer}", f"--other_socket={other_socket}", *victim]
    attacks = {
        name: [program, f"--attack={name}", *where, f"--uid={uid}"]
        for name in listed.stdout.split()
    }
    for name, words in _MEMORY_ATTACKS.items():
        attacks[name] = [programs["memory_attacker"], socket, *words]
    return attacks


class Attacker:
    """One attack, from when it is at its full strength until end().

    What the daemon refuses is no failure of an attacker: it goes on. It says READY, attacks until
    its input ends, and then exits with 0. All else is a fault of the run.
    """

    def __init__(self, name: str, command: Sequence[str]) -> None:
        self._program = Program(command, f"attack {name}", nice=19)
        self._faults: list[str] = []
        self._ended_early = False
        try:
            said = self._program.line()
            self._ended_early = said == ""  # end() says how
            if said not in ("READY", ""):
                self._faults.append(f"attack {name} does not begin: {said}")
        except JobEnded as silent:
            self._faults.append(str(silent))

    def end(self) -> list[str]:
        """Ends the attack. Returns what was wrong with it, as sentences."""
        self._program.close_input()
        how = self._program.how_it_ends()
        if self._ended_early and not how:
            how = "exited with 0 before it began"
        if how:
            self._faults.append(f"{self._program.name} {how}")
        return self._faults


class InnocentJob:
    """All ranks of a job, in one process. One thread."""

    def __init__(
        self, program: str, socket: str, uid: int, name: str, flags: Sequence[str] = ()
    ) -> None:
        command = [program, f"--socket={socket}", f"--uid={uid}", f"--job={name}", *flags]
        self._program = Program(command, f"job {name}", nice=0)
        self._ready: Optional[bool] = None

    def begin(self, steps: int) -> None:
        """Begins `steps` steps; result() waits for them."""
        if self._ready is None:
            said = self._program.line()
            if said != "READY":
                raise JobEnded(f"{self._program.name} does not begin: {said or self._how()}")
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
            raise JobEnded(f"{self._program.name}: {said or self._how()}")
        return Steps(*(int(number) for number in numbers.groups()))

    def kill(self) -> None:
        self._program.kill()

    def _how(self) -> str:
        return self._program.how_it_ends() or "it has ended"
