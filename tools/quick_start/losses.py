"""Kills ranks of a training, and watches in the daemon's status how each is replaced."""

from __future__ import annotations

import dataclasses
import json
import os
import random
import signal
import subprocess
import time
from collections.abc import Callable, Sequence
from typing import Any, Optional

_SEED = 13


@dataclasses.dataclass
class Loss:
    """One rank that was killed. Times are seconds since the training began.

    Attributes:
      rank: who.
      pid: of the killed process.
      step: that was running, about.
      killed_s: when.
      known_s: when the daemon said that it was lost; None: it was back before the next question.
      joined_s: when the new process was in the job; None: not yet.
      back_s: when its first step was complete; None: not yet.
      new_pid: of the new process; 0: there is none yet.
    """

    rank: int
    pid: int
    step: int
    killed_s: float
    known_s: Optional[float] = None
    joined_s: Optional[float] = None
    back_s: Optional[float] = None
    new_pid: int = 0

    @property
    def held_s(self) -> float:
        """How long the other ranks waited."""
        return float("nan") if self.back_s is None else self.back_s - self.killed_s


class Losses:
    """Kills ranks one after the other, each at its step. One thread.

    Args:
      program: gradsyncctl.
      socket: of the daemon, which serves this training alone.
      ranks: how many there are.
      at_steps: when to kill, in order.
      steps: of the training.
      on_event: is called with a line for people.

    Attributes:
      losses: so far.
      step: that runs, or the next one.
    """

    def __init__(
        self,
        program: str,
        socket: str,
        ranks: int,
        at_steps: Sequence[int],
        steps: int,
        on_event: Callable[[str], None],
    ) -> None:
        self.losses: list[Loss] = []
        self.step = 0
        self._command = [program, "status", "--json", "--socket", socket]
        numbers = random.Random(_SEED)
        # Every rank once, in any order, then again.
        self._plan = [
            (step, rank)
            for start in range(0, len(at_steps), ranks)
            for step, rank in zip(at_steps[start:], numbers.sample(range(ranks), ranks))
        ]
        self._steps = steps
        self._on_event = on_event
        self._start: Optional[float] = None

    @property
    def seconds(self) -> float:
        """Since the first step."""
        return 0.0 if self._start is None else time.monotonic() - self._start

    def look(self) -> None:
        """Asks the daemon once, and kills a rank if it is time to."""
        job = self._job()
        if job is None or not job["layouts"]:
            return
        self.step = int(job["layouts"][0]["step"])
        if self._start is None and self.step > 1:
            self._start = time.monotonic()
        sessions = {session["rank"]: session for session in job["sessions"]}
        if self.losses and self.losses[-1].back_s is None:
            self._follow(self.losses[-1], sessions, job["held_ranks"])
        elif len(self.losses) < len(self._plan):
            step, rank = self._plan[len(self.losses)]
            if self.step >= step and rank in sessions:
                self._kill(rank, int(sessions[rank]["pid"]))

    def finish(self) -> None:
        """The training has ended. So a rank that was not seen to be back was back by then."""
        if self.losses and self.losses[-1].back_s is None:
            self._is_back(self.losses[-1])

    def _kill(self, rank: int, pid: int) -> None:
        """Kills the rank, except in the last step: nothing replaces a rank that has left."""
        # A stopped rank completes no further step, so what the daemon says next stays true.
        os.kill(pid, signal.SIGSTOP)
        job = self._job()
        if job is None or int(job["layouts"][0]["step"]) >= self._steps:
            os.kill(pid, signal.SIGCONT)
            return
        self.step = int(job["layouts"][0]["step"])
        os.kill(pid, signal.SIGKILL)
        self.losses.append(Loss(rank, pid, self.step, self.seconds))
        self._on_event(f"step {self.step}: rank {rank} (pid {pid}) is killed by SIGKILL")

    def _follow(self, loss: Loss, sessions: dict[int, Any], held: Sequence[int]) -> None:
        now = self.seconds
        if loss.known_s is None and loss.rank in held:
            loss.known_s = now
        session = sessions.get(loss.rank)
        if session is None or int(session["pid"]) == loss.pid:
            return
        if loss.joined_s is None:
            loss.joined_s, loss.new_pid = now, int(session["pid"])
        if session["state"] == "live":
            self._is_back(loss)

    def _is_back(self, loss: Loss) -> None:
        loss.back_s = self.seconds
        process = f" (pid {loss.new_pid})" if loss.new_pid else ""
        self._on_event(
            f"step {self.step}: rank {loss.rank} is back{process}; the others waited "
            f"{loss.held_s:.2f} s"
        )

    def _job(self) -> Optional[dict[str, Any]]:
        asked = subprocess.run(self._command, capture_output=True, text=True)
        try:
            jobs = json.loads(asked.stdout)["jobs"]
        except ValueError:
            return None
        running = [job for job in jobs if job["state"] in ("JOB_STATE_RUNNING", "running")]
        return running[0] if running else None
