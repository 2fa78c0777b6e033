"""The places where a trainer dies: in the calls of the package, which this module wraps."""

from __future__ import annotations

import contextlib
import json
import os
import pathlib
import select
import signal
import subprocess
import threading
import time
from collections.abc import Callable
from typing import Any, Optional

import gradsync
from board import Board
from fault_log import ARRIVED, DIES, FACT, TOUCHED, FaultLog
from faults import (
    BEFORE,
    COMMITTED,
    CONFIRM,
    COPY,
    ENDED,
    FETCH,
    FLIGHT,
    KILL,
    LEAVE,
    LOAD,
    MARKED,
    RAISE,
    REDUCED,
    SOURCE,
    STOP,
    Fault,
)
from guarded_pages import GuardedPages
from settings import Settings

_POLL_S = 0.0005
# Longer than anything that a place waits for, on a busy machine.
_PATIENCE_S = 120.0
# A source reads for its digests and to send, in turn: at the second stop it does the other one, or
# has read half of the block.
_TOUCHES_BEFORE = 1
# Tells the main thread to raise an exception, as Ctrl-C does.
_BREAK = signal.SIGUSR2
_BREAK_AGAIN_S = 0.01
# The bucket whose marking and reduction the phases are about: the one that is ready first.
_BUCKET = 0


class Broken(Exception):
    """What a trainer raises that dies by an exception; the text says which fault it is."""


class Places:
    """Ends this process where the plan says so. One for each process, made before it joins.

    Its calls come from the thread that trains, and from a thread of the library that reads the
    state.

    Args:
      rank: this process's.
      settings: of the training.
      folder: that all processes of the training share.

    Attributes:
      step: that this rank is in, from its first mark on.
      ended_at: when this rank ended its step, by time.monotonic().
      transfer_s: in a replacement, how long the state took to come.
    """

    def __init__(self, rank: int, settings: Settings, folder: pathlib.Path) -> None:
        self._rank = rank
        self._steps = settings.steps
        self._faults = settings.faults
        self._gradsyncctl = settings.gradsyncctl
        self._log = FaultLog(folder / "faults.jsonl")
        self._board = Board(folder / "board", settings.ranks)
        self._marks = 0  # of the step
        self._heals = False  # between fetch_state and the end of confirm_state
        self._pages: Optional[GuardedPages] = None
        self._touches = 0  # of the pages, in one reading
        self._broken_by: Optional[Fault] = None
        self._raised = threading.Event()
        signal.signal(_BREAK, self._on_break)
        self.step = 0
        self.ended_at = 0.0
        self.transfer_s = 0.0

    def guard(self, address: int, size: int) -> None:
        """Says where a large part of the state is."""
        self._pages = GuardedPages(address, size)

    def say(self, **facts: Any) -> None:
        """Keeps facts of this rank."""
        self._log.say(FACT, rank=self._rank, **facts)

    def wrap(self) -> None:
        """Puts the places into the package's calls."""
        layout, session = gradsync.Layout, gradsync.Session
        for name in ("mark_ready", "finish_step", "wait_step"):
            _wrap(layout, name, getattr(self, f"_{name}"))
        for name in ("serve_state", "fetch_state", "confirm_state", "leave", "finish"):
            _wrap(session, name, getattr(self, f"_{name}"))

    # ---- Calls of a layout

    def _mark_ready(self, real: Callable[..., Any], layout: Any, step: int, bucket: int) -> Any:
        self._at_first_mark(step)
        in_flight = self._due(FLIGHT, step) if bucket == _BUCKET else None
        if in_flight is not None:
            self._until(lambda: self._board.have_marked(step, self._rank), "the others to mark")
        real(layout, step, bucket)
        self._count_mark(step)
        if bucket != _BUCKET:
            return
        if in_flight is not None:
            if _is_reduced(layout, step):
                self.say(missed=in_flight.number, step=step)
            else:
                self._die(in_flight, step, reduced=0)
        copying = self._due(COPY, step)
        if copying is not None:
            self._die(copying, step, reduced=self._log.reduced_in(step))
        marked = self._due(MARKED, step)
        if marked is not None:
            self._until_taken(layout, step, f"has not marked bucket {_BUCKET}")
            self._die(marked, step, reduced=int(_is_reduced(layout, step)))
        reduced = self._due(REDUCED, step)
        if reduced is not None:
            layout.wait_bucket(step, bucket, timeout=_PATIENCE_S)
            self._die(reduced, step, reduced=1)

    def _finish_step(self, real: Callable[..., Any], layout: Any, step: int, *used: Any) -> None:
        self._at_first_mark(step)
        self._wait_for_death(ENDED, step)
        real(layout, step, *used)
        self.ended_at = time.monotonic()
        ended = self._due(ENDED, step)
        if ended is not None:
            self._until_taken(layout, step, "has not")
            self._die(ended, step, reduced=0)
        committed = self._due(COMMITTED, step)
        if committed is not None:
            self._until(lambda: self._board.is_complete(step), "another rank's verdict")
            self._die(committed, step, reduced=0)

    def _wait_step(self, real: Callable[..., Any], layout: Any, step: int, *rest: Any) -> Any:
        try:
            result = real(layout, step, *rest)
        finally:
            if self._pages is not None:
                self._pages.disarm()
        self._board.completes(self._rank, step)
        return result

    def _at_first_mark(self, step: int) -> None:
        if self.step == step:
            return
        if self.step == 0:
            self.say(begins=step)
        self.step, self._marks = step, 0
        before = self._due(BEFORE, step)
        if before is not None:
            self._die(before, step, reduced=0)
        self._wait_for_death(MARKED, step)

    def _count_mark(self, step: int) -> None:
        self._marks += 1
        self._board.marks(self._rank, step, self._marks)

    # ---- Calls of a session

    def _serve_state(self, real: Callable[..., Any], session: Any, read: Any) -> None:
        def wrapped() -> Any:
            if self._heals:
                confirms = self._due(CONFIRM, self._first_step_of(session))
                if confirms is not None:
                    self._die(confirms, confirms.step, reduced=self._log.reduced_in(confirms.step))
            items = read()
            if not self._heals and self._pages is not None and self._next_of_transfer():
                # The library's thread blocks all signals. A fault would then end the process.
                signal.pthread_sigmask(signal.SIG_UNBLOCK, [signal.SIGSEGV])
                self._touches = 0
                self._pages.arm(self._in_transfer)
            return items

        real(session, None if read is None else wrapped)

    def _fetch_state(self, real: Callable[..., Any], session: Any, *rest: Any, **more: Any) -> Any:
        step = self._first_step_of(session)
        self._heals = True
        for fault in self._faults:
            if fault.phase == FETCH and fault.rank == self._rank and fault.step == step:
                self._in_thread(lambda f=fault: self._die_in_transfer(f, step))
        started = time.monotonic()
        image = real(session, *rest, **more)
        self.transfer_s = time.monotonic() - started
        size = sum(memory.nbytes for memory in image.items.values())
        self.say(fetched=image.source, bytes=size, seconds=self.transfer_s, step=step)
        loads = self._due(LOAD, step)
        if loads is not None:
            self._die(loads, step, reduced=self._log.reduced_in(step))
        return image

    def _confirm_state(self, real: Callable[..., Any], session: Any, *rest: Any, **m: Any) -> None:
        real(session, *rest, **m)
        self._heals = False

    def _leave(self, real: Callable[..., Any], session: Any, *rest: Any, **more: Any) -> None:
        leaves = self._due(LEAVE, self._steps)
        if leaves is not None:
            ranks = session.world_size
            self._until(lambda: self._have_others_left(ranks), "the others to leave")
            self._die(leaves, self._steps, reduced=0)
        real(session, *rest, **more)

    _finish = _leave

    def _first_step_of(self, session: Any) -> int:
        return max((layout.step for layout in session.current_layouts()), default=0)

    # ---- In the middle of a transfer

    def _next_of_transfer(self) -> Optional[Fault]:
        """The fault for which a transfer in this rank's step has to stop."""
        dead = self._log.dead()
        for fault in self._faults:
            if fault.phase in (FETCH, SOURCE) and fault.step == self.step:
                if fault.number not in dead and (fault.after is None or fault.after in dead):
                    return fault
        return None

    def _in_transfer(self) -> bool:
        """The library reads a guarded page, in a thread of its own.

        Returns: whether to stop it once more.
        """
        fault = self._next_of_transfer()
        if fault is None:
            return False
        self._touches += 1
        self._log.say(TOUCHED, fault=fault.number, rank=self._rank, step=self.step)
        if fault.phase == FETCH:
            self._until(lambda: fault.number in self._log.dead(), "the replacement's death")
            return False
        healing = self._healing()
        if healing.get("source") != self._rank:
            return False
        moved = int(healing["bytes"])
        if moved > 0 or self._touches > _TOUCHES_BEFORE:
            self._die(fault, self.step, reduced=self._log.reduced_in(self.step), moved=moved)
        return True

    def _healing(self) -> dict[str, Any]:
        """What the daemon says about the transfer."""
        for job in self._jobs():
            if "healing" in job:
                found: dict[str, Any] = job["healing"]
                return found
        return {}

    # ---- What the daemon knows

    def _jobs(self) -> list[dict[str, Any]]:
        """The daemon's jobs that run: this training's."""
        command = [self._gradsyncctl, "status", "--json", "--socket", os.environ["GRADSYNC_SOCKET"]]
        status = json.loads(subprocess.run(command, capture_output=True).stdout)
        return [job for job in status["jobs"] if job["state"] == "JOB_STATE_RUNNING"]

    def _until_taken(self, layout: Any, step: int, missing: str) -> None:
        """Waits until the daemon has taken a message of this rank, which the library sends later.

        Args:
          layout: whose step it is.
          step: that another rank does not end until this one has died.
          missing: what the daemon says of this rank as long as it has not taken the message.
        """

        def taken() -> bool:
            # Without a text the daemon does not know yet that the step has begun.
            return any(
                one["waiting_for"] and f"rank {self._rank} {missing}" not in one["waiting_for"]
                for job in self._jobs()
                for one in job["layouts"]
                if one["name"] == layout.name and int(one["step"]) == step
            )

        self._until(taken, "the daemon to take its message")

    def _have_others_left(self, ranks: int) -> bool:
        left = {
            one["rank"]
            for job in self._jobs()
            for one in job["sessions"]
            if one["state"] in ("left", "finished")
        }
        return len(left - {self._rank}) == ranks - 1

    def _die_in_transfer(self, fault: Fault, step: int) -> None:
        """Waits for the transfer of the fault, which may be the one after a source's death."""
        if fault.number in self._log.dead():
            return

        def touched() -> bool:
            return any(line["fault"] == fault.number for line in self._log.of(TOUCHED))

        # Another fault may come first, or nobody reads: then this thread waits in vain.
        with contextlib.suppress(TimeoutError):
            self._until(touched, "the source to read its state")
            self._die(fault, step, reduced=self._log.reduced_in(step))

    # ---- Deaths

    def _due(self, phase: str, step: int) -> Optional[Fault]:
        """The fault of this rank in that phase and step, if it has not happened."""
        planned = [
            fault
            for fault in self._faults
            if fault.phase == phase
            and fault.rank == self._rank
            and (fault.step == step or (phase == FLIGHT and fault.step < step))
        ]
        if not planned:
            return None
        dead = self._log.dead()
        if phase == FLIGHT:
            # One that has missed its step would make the waiter of ENDED wait for its replacement.
            if any(fault.phase == ENDED and fault.step == step for fault in self._faults):
                return None
            # Two at once, if one has missed its step, would each wait for the other's mark.
            waiting = [f for f in self._faults if f.phase == FLIGHT and f.number not in dead]
            planned = [fault for fault in planned if fault in waiting[:1]]
        for fault in planned:
            if fault.number not in dead and (fault.after is None or fault.after in dead):
                return fault
        return None

    def _wait_for_death(self, phase: str, step: int) -> None:
        """Waits if a fault of another rank needs this one to."""
        for fault in self._faults:
            if fault.phase == phase and fault.step == step and fault.waiter == self._rank:
                self._until(lambda f=fault: self._is_dead(f), f"the death of {fault}")

    def _is_dead(self, fault: Fault) -> bool:
        """Whether the fault has happened: its process has ended, or is stopped."""
        for line in self._log.of(DIES):
            if line["fault"] == fault.number:
                return fault.how == STOP or _has_ended(line["pid"])
        return False

    def _die(self, fault: Fault, step: int, reduced: int, **facts: Any) -> None:
        if fault.together:
            self._log.say(ARRIVED, fault=fault.number, rank=self._rank)
            self._until(lambda: self._have_arrived(fault), "those that die at the same moment")
        self._log.say(
            DIES,
            fault=fault.number,
            rank=self._rank,
            step=step,
            phase=fault.phase,
            how=fault.how,
            reduced=reduced,
            marks=self._marks,
            **facts,
        )
        if fault.how == RAISE:
            return self._break(fault)
        os.kill(os.getpid(), signal.SIGKILL if fault.how == KILL else signal.SIGSTOP)
        assert fault.how == STOP
        while True:  # somebody has continued it: the daemon's SIGKILL comes
            signal.pause()

    def _break(self, fault: Fault) -> None:
        """Raises an exception on the main thread, which trains.

        Another thread comes back as soon as that has happened.
        """
        if threading.current_thread() is threading.main_thread():
            raise Broken(str(fault))
        self._broken_by = fault
        deadline = time.monotonic() + _PATIENCE_S
        # A signal that comes just before the main thread blocks does not wake it.
        while not self._raised.is_set() and time.monotonic() < deadline:
            signal.pthread_kill(threading.main_thread().ident, _BREAK)
            self._raised.wait(_BREAK_AGAIN_S)

    def _on_break(self, *_: object) -> None:
        if not self._raised.is_set():
            self._raised.set()
            raise Broken(str(self._broken_by))

    def _have_arrived(self, fault: Fault) -> bool:
        arrived = {line["fault"] for line in self._log.of(ARRIVED)}
        return arrived.union(self._log.dead()).issuperset(fault.together)

    def _until(self, done: Callable[[], bool], what: str) -> None:
        deadline = time.monotonic() + _PATIENCE_S
        while not done():
            if time.monotonic() >= deadline:
                raise TimeoutError(
                    f"rank {self._rank}, step {self.step}: waited {_PATIENCE_S:g} s for {what}"
                )
            time.sleep(_POLL_S)

    def _in_thread(self, run: Callable[[], None]) -> None:
        threading.Thread(target=run, daemon=True).start()


def _has_ended(pid: int) -> bool:
    try:
        pidfd = os.pidfd_open(pid)
    except ProcessLookupError:
        return True
    try:
        return bool(select.select([pidfd], [], [], 0)[0])
    finally:
        os.close(pidfd)


def _is_reduced(layout: Any, step: int) -> bool:
    with contextlib.suppress(gradsync.DeadlineExceededError):
        layout.wait_bucket(step, _BUCKET, timeout=0)
        return True
    return False


def _wrap(owner: type, name: str, around: Callable[..., Any]) -> None:
    real = getattr(owner, name)
    setattr(owner, name, lambda self, *args, **more: around(real, self, *args, **more))
