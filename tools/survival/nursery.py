"""Starts the ranks of a training as forks of this process, and another one for each that dies."""

from __future__ import annotations

import atexit
import contextlib
import ctypes
import dataclasses
import faulthandler
import gc
import os
import pathlib
import select
import signal
import sys
import time
import traceback
from collections.abc import Callable, Mapping, Sequence
from typing import NoReturn, Optional

from faults import RAISE

_PR_SET_PDEATHSIG = 1
_LINES_SHOWN = 30
# Nothing of a training takes longer, on a busy machine.
STUCK_S = 120.0
_STACKS_S = 2.0
_libc = ctypes.CDLL(None)


class TrainingFailed(Exception):
    """A rank ended by itself with an error, or nothing happens any more; the text says which."""


@dataclasses.dataclass
class _Rank:
    number: int
    pid: int = 0
    pidfd: int = -1
    restarts: int = 0
    done: bool = False


class Nursery:
    """The processes of one training. This process must have no threads. One thread.

    A fork of a process that has imported PyTorch trains within milliseconds. A process of its own
    would need seconds, as `python -m gradsync.run` starts them.

    Args:
      train: is called in the process of each rank.
      environments: of each rank.
      folder: for what the ranks print: rank-0.log, ...
      deaths: how a rank should have died so far, each time, in the words of the plan. If it dies
        otherwise or more often, the training has failed.
      activity: changes while something happens.
    """

    def __init__(
        self,
        train: Callable[[], None],
        environments: list[Mapping[str, str]],
        folder: pathlib.Path,
        deaths: Callable[[int], Sequence[str]],
        activity: Callable[[], object],
    ) -> None:
        self._train = train
        self._environments = environments
        self._folder = folder
        self._deaths = deaths
        self._activity = activity
        self._ranks = [_Rank(number) for number in range(len(environments))]
        self._progress_at = time.monotonic()
        self._active: object = None

    def run(self, on_turn: Callable[[], None] = lambda: None) -> None:
        """Returns when every rank has ended well.

        Args:
          on_turn: is called now and then.

        Raises:
          TrainingFailed: one has not.
        """
        try:
            for rank in self._ranks:
                self._start(rank)
            while any(not rank.done for rank in self._ranks):
                self._turn()
                on_turn()
        finally:
            self._kill_all()

    def _turn(self) -> None:
        poll = select.poll()
        living = {rank.pidfd: rank for rank in self._ranks if not rank.done}
        for pidfd in living:
            poll.register(pidfd, select.POLLIN)
        for pidfd, _ in poll.poll(100):
            self._reap(living[pidfd])
        now, active = time.monotonic(), self._activity()
        if active != self._active:
            self._active, self._progress_at = active, now
        elif now - self._progress_at > STUCK_S:
            self._show_stacks()
            raise TrainingFailed(f"nothing has happened for {STUCK_S:g} s{self._last_lines()}")

    def _reap(self, rank: _Rank) -> None:
        _, status = os.waitpid(rank.pid, 0)
        os.close(rank.pidfd)
        rank.pidfd = -1
        code = os.waitstatus_to_exitcode(status)
        if code == 0:
            rank.done = True
            return
        rank.restarts += 1
        planned = self._deaths(rank.number)[rank.restarts - 1 : rank.restarts]
        # After SIGSTOP too the daemon kills the process.
        if planned and code == (1 if planned[0] == RAISE else -signal.SIGKILL):
            self._start(rank)
            return
        how = f"exit status {code}" if code > 0 else signal.Signals(-code).name
        rank.done = True
        raise TrainingFailed(
            f"rank {rank.number} (pid {rank.pid}) ended, and no fault was planned: {how}"
            + self._last_lines(rank)
        )

    def _start(self, rank: _Rank) -> None:
        sys.stdout.flush()
        sys.stderr.flush()
        parent = os.getpid()
        pid = os.fork()
        if pid == 0:
            self._be(rank, parent)
        rank.pid, rank.pidfd = pid, os.pidfd_open(pid)

    def _be(self, rank: _Rank, parent: int) -> NoReturn:
        """The process of a rank."""
        status = 1
        try:
            # The collector would look at all that was imported, and so copy its pages.
            gc.freeze()
            atexit._clear()  # the functions of the tool
            _libc.prctl(_PR_SET_PDEATHSIG, signal.SIGKILL, 0, 0, 0)
            if os.getppid() != parent:
                os._exit(1)
            for number in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP):
                signal.signal(number, signal.SIG_DFL)
            os.setsid()
            log = os.open(self._log(rank), os.O_WRONLY | os.O_APPEND | os.O_CREAT, 0o600)
            for descriptor in (1, 2):
                os.dup2(log, descriptor)
            faulthandler.register(signal.SIGUSR1, file=2)
            os.environ.update(self._environments[rank.number])
            os.environ["TORCHELASTIC_RESTART_COUNT"] = str(rank.restarts)
            self._train()
            status = 0
        except BaseException:
            # As Python does with an exception that nobody catches.
            sys.last_type, sys.last_value, sys.last_traceback = sys.exc_info()
            traceback.print_exc()
        finally:
            with contextlib.suppress(Exception):
                atexit._run_exitfuncs()
                sys.stdout.flush()
                sys.stderr.flush()
            os._exit(status)

    def _kill_all(self) -> None:
        for rank in self._ranks:
            if rank.pidfd >= 0:
                with contextlib.suppress(OSError):
                    os.kill(rank.pid, signal.SIGKILL)
                    os.waitpid(rank.pid, 0)
                os.close(rank.pidfd)
                rank.pidfd = -1

    def _show_stacks(self) -> None:
        for rank in self._ranks:
            if rank.pidfd >= 0:
                with contextlib.suppress(OSError):
                    os.kill(rank.pid, signal.SIGUSR1)
        time.sleep(_STACKS_S)  # they write them now

    def _log(self, rank: _Rank) -> pathlib.Path:
        return self._folder / f"rank-{rank.number}.log"

    def _last_lines(self, of: Optional[_Rank] = None) -> str:
        text = ""
        for rank in self._ranks:
            if of not in (None, rank) or not self._log(rank).exists():
                continue
            lines = self._log(rank).read_text(errors="replace").splitlines()[-_LINES_SHOWN:]
            text += f"\n  the last lines of rank {rank.number}:"
            text += "".join(f"\n    {line}" for line in lines) if lines else " none"
        return text
