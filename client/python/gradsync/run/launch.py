"""One launch, from the daemon's start to the exit status."""

from __future__ import annotations

import contextlib
import math
import os
import signal
import time
from collections.abc import Mapping, Sequence
from typing import Optional

from gradsync.run import ranks
from gradsync.run.command_line import Options
from gradsync.run.daemon import PrivateDaemon, usual_socket, why_silent
from gradsync.run.events import Events
from gradsync.run.failure import failed_first, found_its_work_done, was_killed
from gradsync.run.output import Output, Speaker
from gradsync.run.process import Process, why_unwatchable
from gradsync.run.restart_pauses import RestartPauses

_ENDING = (signal.SIGINT, signal.SIGTERM, signal.SIGHUP, signal.SIGQUIT)
_PASSED_ON = (signal.SIGUSR1, signal.SIGUSR2)
_DAEMON_START_S = 30.0
_DAEMON_STOP_S = 10.0
# The other ranks learn of a failure within milliseconds, and say what they learned.
_LAST_WORDS_S = 1.0
# A process that SIGKILL has not ended hangs in the kernel.
_KILL_S = 10.0
# After a signal, for a reader of the output.
_LAST_OUTPUT_S = 5.0


class _Ended(Exception):
    """The launch ends at once. The exit status is the argument."""


class Launch:
    """Runs a job's ranks on this node, once. One thread, the main one."""

    def __init__(self, options: Options) -> None:
        """Args are kept; run() starts."""
        self._options = options
        self._output = Output()
        self._events = Events(self._output, (*_ENDING, *_PASSED_ON), self._on_signal)
        self._daemon: Optional[PrivateDaemon] = None
        self._ranks: list[Process] = []
        self._environments: Sequence[Mapping[str, str]] = ()  # by rank of this node
        self._restarts = [0] * options.ranks
        self._restart_at: dict[int, float] = {}  # by rank of this node: those that wait for it
        self._pauses = RestartPauses(options.ranks)
        # By rank of this node: whether a signal ended the process before this one, perhaps after it
        # had left the job. See _note_done().
        self._was_killed = [False] * options.ranks
        self._done: set[Process] = set()  # see _note_done()
        self._speakers: dict[Process, Speaker] = {}
        self._signal: Optional[int] = None  # that ends the launch
        self._hurry = False  # a further one has come
        self._ending = False  # _end_all() has begun
        self._kill_at = math.inf

    def run(self) -> int:
        """Returns the exit status."""
        with self._events:
            try:
                self._check_system()
                path = self._find_daemon()
                self._start_ranks(path)
                self._watch()
                return self._result()
            except _Ended as ended:
                return int(ended.args[0])
            finally:
                self._end_all()

    def _check_system(self) -> None:
        why = why_unwatchable()
        if why is not None:
            self._output.say(
                f"the ends of processes cannot be watched: {why}. gradsync.run needs Linux 5.3 or "
                "newer, and in a container a seccomp profile that allows pidfd_open. Else start "
                "gradsyncd, name its socket in GRADSYNC_SOCKET, and use torchrun"
            )
            raise _Ended(1)

    def _find_daemon(self) -> str:
        path = usual_socket()
        why = why_silent(path)
        if why is None:
            return path
        if self._options.nodes > 1:
            self._output.say(
                f"{why}. A job on several nodes needs a gradsyncd on each, started with "
                "--peer_listen; name its socket in GRADSYNC_SOCKET"
            )
            raise _Ended(1)
        try:
            self._daemon = PrivateDaemon()
        except OSError as error:
            self._output.say(f"{why}, and no private daemon can start: {error}")
            raise _Ended(1) from None
        daemon = self._daemon
        self._listen_to(daemon.process, number=None)
        self._events.run_until(
            lambda: daemon.is_ready() or daemon.process.status is not None or self._signal,
            _DAEMON_START_S,
            wake_on=daemon.ready,
        )
        if self._signal:
            raise _Ended(128 + self._signal)
        if not daemon.is_ready():
            how = "is not ready after " + f"{_DAEMON_START_S:g} s"
            if daemon.process.status is not None:
                how = f"did not start: {daemon.process.how_it_ended()}"
            self._output.say(f"gradsyncd {how}{self._last_lines(daemon.process)}")
            raise _Ended(1)
        self._output.say(
            f"{why}. This job has its own daemon. To ask it: gradsyncctl status --socket "
            f"{daemon.socket}"
        )
        return daemon.socket

    def _start_ranks(self, path: str) -> None:
        self._environments = ranks.environments(self._options, path)
        for index in range(self._options.ranks):
            self._ranks.append(self._start_rank(index))

    def _start_rank(self, index: int) -> Process:
        rank = ranks.numbers(self._options)[index]
        restarts = {"TORCHELASTIC_RESTART_COUNT": str(self._restarts[index])}
        environment = {**self._environments[index], **restarts}
        try:
            process = Process(f"rank {rank}", self._options.command, environment)
        except OSError as error:
            self._output.say(f"rank {rank} cannot start: {error}")
            raise _Ended(1) from None
        self._listen_to(process, rank)
        return process

    def _watch(self) -> None:
        """Returns when every rank has ended."""
        tell_at = math.inf  # when to tell the others to end, after a failure
        while self._running():
            now = time.monotonic()
            if now >= self._kill_at:
                if not self._kill(self._ranks):
                    return
                continue
            wake_at = self._kill_at
            if self._kill_at == math.inf:
                self._restart_ranks(now)  # also forgets those that cannot be restarted any more
                if self._has_failed():
                    tell_at = min(tell_at, now + _LAST_WORDS_S)
                    if now >= tell_at:
                        self._tell_ranks(signal.SIGTERM)
                wake_at = min(tell_at, *self._restart_at.values(), self._kill_at)
            self._events.turn(wake_at)
            self._note_done()

    def _running(self) -> bool:
        return any(
            rank.status is None or (self._failed(rank) and self._may_restart(index))
            for index, rank in enumerate(self._ranks)
        )

    def _failed(self, rank: Process) -> bool:
        return bool(rank.status) and rank not in self._done

    def _has_failed(self) -> bool:
        failed = any(
            self._failed(rank) and not self._may_restart(index)
            for index, rank in enumerate(self._ranks)
        )
        return failed or self._cannot_go_on()

    def _note_done(self) -> None:
        """Finds the restarted ranks whose last process was killed when its work was done."""
        for index, rank in enumerate(self._ranks):
            if not self._failed(rank) or not self._was_killed[index]:
                continue
            number = ranks.numbers(self._options)[index]
            if found_its_work_done(number, rank, self._speakers[rank]):
                self._done.add(rank)
                del self._speakers[rank]
                self._output.say(
                    f"{rank.name} (pid {rank.pid}) has nothing to do: the rank has left the job "
                    "before, which is a good end"
                )

    def _cannot_go_on(self) -> bool:
        return (
            self._daemon is not None and self._daemon.process.status is not None
        ) or self._events.output_error is not None

    def _may_restart(self, index: int) -> bool:
        return (
            self._kill_at == math.inf
            and not self._ranks[index].told_to_end
            and self._restarts[index] < self._options.max_restarts
            and not self._cannot_go_on()
        )

    def _restart_ranks(self, now: float) -> None:
        """Restarts the ranks that have failed and may be restarted, each after its pause."""
        for index, failed in enumerate(self._ranks):
            if not self._failed(failed) or not self._may_restart(index):
                self._restart_at.pop(index, None)
                continue
            if index not in self._restart_at:
                count = self._restarts[index]
                pause = self._pauses.after(index, failed.started_at, failed.ended_at)
                self._restart_at[index] = failed.ended_at + pause
                self._output.say(
                    f"{failed.name} (pid {failed.pid}) ended: {failed.how_it_ended()}. Restart "
                    f"{count + 1} of {self._options.max_restarts}"
                    + (f" in {pause:g} s" if pause else "")
                    + self._last_lines(failed)
                )
            if now >= self._restart_at[index]:
                del self._restart_at[index]
                self._restarts[index] += 1
                self._was_killed[index] = was_killed(failed)
                del self._speakers[failed]
                self._ranks[index] = self._start_rank(index)

    def _tell_ranks(self, number: int) -> None:
        """Asks them to end, and gives them time for it. None is restarted any more."""
        self._restart_at.clear()
        for rank in self._ranks:
            rank.tell(number)
        if self._kill_at == math.inf:
            self._kill_at = time.monotonic() + self._options.shutdown_timeout

    def _kill(self, processes: list[Process]) -> bool:
        """Kills them; returns whether all have ended."""
        for process in processes:
            process.tell(signal.SIGKILL)
        if self._events.run_until(lambda: all(p.status is not None for p in processes), _KILL_S):
            return True
        left = [p for p in processes if p.status is None]
        names = ", ".join(f"{p.name} (pid {p.pid})" for p in left)
        pids = ",".join(str(p.pid) for p in left)
        self._output.say(
            f"still there after SIGKILL: {names}. Such a process waits in the kernel, mostly for a "
            f"disk or a GPU; 'ps -o pid,stat,wchan:40 -p {pids}' says where. Mend that, or restart "
            "the machine"
        )
        return False

    def _result(self) -> int:
        """Says what failed, if something did; returns the exit status."""
        if all(rank.status == 0 or rank in self._done for rank in self._ranks):
            return 0 if self._events.output_error is None else 1
        if self._signal is not None:
            self._output.say(f"stopped by {signal.Signals(self._signal).name}")
            return 128 + self._signal
        failed = failed_first(self._speakers)
        daemon = None if self._daemon is None else self._daemon.process
        # Nobody tells it to end before this.
        if daemon is not None and daemon.status == 0:
            if all(process.ended_at >= daemon.ended_at for process in failed):
                self._output.say(
                    f"gradsyncd (pid {daemon.pid}) ended while ranks ran: exit status 0"
                    + _then(failed)
                    + self._last_lines(daemon)
                )
                return 1
        if not failed:  # the output was closed, or a rank cannot be killed
            return 1
        first = failed[0]
        self._output.say(
            f"{first.name} (pid {first.pid}) failed first: {_how(first)}"
            + _then(failed[1:])
            + self._last_lines(first)
        )
        return 1 if first.told_to_end else first.exit_status()

    def _last_lines(self, process: Process) -> str:
        lines = self._speakers[process].last_lines
        if not lines:
            return f"\n  {process.name} printed nothing"
        return f"\n  the last lines of {process.name}:" + "".join(f"\n    {line}" for line in lines)

    def _end_all(self) -> None:
        """Leaves no process and no directory, and shows what is still to be shown."""
        self._ending = True
        if self._running():
            self._kill(self._ranks)
        if self._daemon is not None:
            process = self._daemon.process
            process.tell(signal.SIGTERM)
            self._events.run_until(
                lambda: process.status is not None or self._hurry, _DAEMON_STOP_S
            )
            if process.status is None:
                self._kill([process])
            self._daemon.close()
        # A reader may be slow, but not after a signal.
        limit_s = math.inf if self._signal is None else _LAST_OUTPUT_S
        self._events.run_until(lambda: self._output.waits_for() is None or self._hurry, limit_s)
        if self._events.output_error is not None:
            with contextlib.suppress(OSError):
                os.write(
                    2, f"gradsync.run: cannot write output: {self._events.output_error}\n".encode()
                )

    def _listen_to(self, process: Process, number: Optional[int]) -> None:
        name = process.name
        if number is not None:  # all as wide as the last
            name = f"rank {number:>{len(str(ranks.numbers(self._options)[-1]))}}"
        speaker = Speaker(self._output, name, number)
        self._speakers[process] = speaker
        self._events.listen_to(process, speaker)

    def _on_signal(self, number: int) -> None:
        if number in _PASSED_ON:
            for rank in self._ranks:
                rank.tell(number, ends=False)
        elif number in _ENDING:
            if self._signal is not None or self._ending or self._has_failed():
                self._hurry = True
                self._kill_at = time.monotonic()
            else:
                self._signal = number
                self._tell_ranks(number)


def _then(failed: Sequence[Process]) -> str:
    return "".join(f"; then {process.name}: {_how(process)}" for process in failed)


def _how(failed: Process) -> str:
    # The launcher ended the others while this one still ended by itself.
    return "an exception" if failed.told_to_end else failed.how_it_ended()
