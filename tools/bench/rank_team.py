"""The rank processes of a benchmark, and how it gives them commands."""

from __future__ import annotations

import multiprocessing
import multiprocessing.connection
import multiprocessing.process
import multiprocessing.resource_tracker
import multiprocessing.spawn
import os
import signal
import sys
import time
import traceback
from collections.abc import Sequence
from typing import Any, Callable

from end_with_parent import end_with_parent

# A team that does not answer for so long hangs.
_ANSWER_LIMIT_S = 600.0
_END_LIMIT_S = 10.0
_LOG_LINES = 20


class RankFailed(Exception):
    """A rank raised an exception, died or hangs; says which, and shows its traceback."""


class RankTeam:
    """Rank processes that wait for commands. A context manager: ends them, if need be by force.

    Each makes its servant, `make(rank, **options)`, and then calls the methods of it that it is
    told to call, all ranks the same one.
    """

    def __init__(
        self,
        make: Callable[..., Any],
        interpreters: Sequence[str],
        options: dict[str, Any],
        environment: dict[str, str],
        log: str,
    ) -> None:
        """Starts the ranks; returns when each has made its servant.

        Args:
          make: a class or function of a module.
          interpreters: by rank, the program that is its Python.
          options: for `make`; pickled.
          environment: for the ranks, before they import anything; RANK and LOCAL_RANK are added.
          log: path of a file for whatever they print.

        Raises:
          RankFailed: a rank did not come that far.
        """
        context = multiprocessing.get_context("spawn")
        self._channels: list[multiprocessing.connection.Connection] = []
        self._processes: list[multiprocessing.process.BaseProcess] = []
        self._log = log
        before = dict(os.environ)
        # Ctrl-C is for the script, which ends its ranks; they inherit this.
        on_interrupt = signal.signal(signal.SIGINT, signal.SIG_IGN)
        # The first start would start it, by that rank's interpreter.
        multiprocessing.resource_tracker.ensure_running()
        try:
            # Ranks inherit it; there is no other way to reach a child before its first import.
            os.environ.update(environment)
            for rank, interpreter in enumerate(interpreters):
                multiprocessing.spawn.set_executable(interpreter)
                os.environ.update(RANK=str(rank), LOCAL_RANK=str(rank))
                ours, theirs = context.Pipe()
                process = context.Process(
                    target=_serve, args=(theirs, make, rank, options, log), daemon=True
                )
                process.start()
                theirs.close()
                self._channels.append(ours)
                self._processes.append(process)
        except BaseException:
            self._kill()
            self.close()
            raise
        finally:
            multiprocessing.spawn.set_executable(sys.executable)
            signal.signal(signal.SIGINT, on_interrupt)
            os.environ.clear()
            os.environ.update(before)
        try:
            self._answers()
        except BaseException:
            self._kill()
            self.close()
            raise

    def __enter__(self) -> RankTeam:
        """Nothing more."""
        return self

    def __exit__(self, kind: object, *_: object) -> None:
        """Ends the ranks; at once if something has failed."""
        if kind is not None:
            self._kill()
        self.close()

    def call(self, method: str, *arguments: Any) -> list[Any]:
        """Calls a method of every rank's servant at once; returns the answers, in rank order.

        Raises:
          RankFailed: the first one that failed.
        """
        for rank, channel in enumerate(self._channels):
            try:
                channel.send((method, arguments))
            except OSError as error:
                raise RankFailed(f"rank {rank} is gone") from error
        return self._answers()

    def close(self) -> None:
        """Ends the ranks."""
        for channel in self._channels:
            channel.close()
        deadline = time.monotonic() + _END_LIMIT_S
        for process in self._processes:
            process.join(max(0.0, deadline - time.monotonic()))
            if process.is_alive():
                process.kill()
                process.join()
        self._channels = []
        self._processes = []

    def _kill(self) -> None:
        for process in self._processes:
            process.kill()

    def _answers(self) -> list[Any]:
        answers: dict[int, Any] = {}
        deadline = time.monotonic() + _ANSWER_LIMIT_S
        while len(answers) < len(self._channels):
            waited = {c: r for r, c in enumerate(self._channels) if r not in answers}
            ready = multiprocessing.connection.wait(waited, max(0.0, deadline - time.monotonic()))
            if not ready:
                self._kill()
                raise RankFailed(f"ranks {sorted(waited.values())} have not answered for 10 min")
            for channel in ready:
                rank = waited[channel]  # type: ignore[index]
                answers[rank] = self._answer(rank)
        return [answers[rank] for rank in range(len(self._channels))]

    def _answer(self, rank: int) -> Any:
        try:
            failed, answer = self._channels[rank].recv()
        except (EOFError, OSError):
            self._processes[rank].join(_END_LIMIT_S)
            code = self._processes[rank].exitcode
            self._kill()
            with open(self._log, errors="replace") as file:
                said = file.read().splitlines()[-_LOG_LINES:]
            text = "\n".join([f"rank {rank} has ended with exit code {code}", *said])
            raise RankFailed(text) from None
        if failed:
            # The others may wait for it for ever.
            self._kill()
            raise RankFailed(f"rank {rank} failed:\n{answer}")
        return answer


def _serve(
    channel: multiprocessing.connection.Connection,
    make: Callable[..., Any],
    rank: int,
    options: dict[str, Any],
    log: str,
) -> None:
    end_with_parent()
    # Libraries announce themselves; the script's output is a table and its progress.
    with open(log, "ab") as file:
        os.dup2(file.fileno(), sys.stdout.fileno())
        os.dup2(file.fileno(), sys.stderr.fileno())
    try:
        servant = make(rank, **options)
        channel.send((False, None))
        while True:
            try:
                method, arguments = channel.recv()
            except (EOFError, OSError):
                break
            channel.send((False, getattr(servant, method)(*arguments)))
        servant.close()
    except BaseException:
        # If the script is gone, nobody wants to know.
        try:
            channel.send((True, traceback.format_exc()))
        except OSError:
            pass
    finally:
        # Without the libraries' own ends, some of which wait for other ranks.
        sys.stderr.flush()
        os._exit(0)
