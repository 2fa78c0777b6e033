"""A wrapped module among the joinables of PyTorch's own `Join`."""

from __future__ import annotations

import threading
import weakref
from typing import Any

from torch.distributed.algorithms import join as pytorch

import gradsync
from gradsync.torch import _session
from gradsync.torch._synchronizer import Synchronizer


class _Leaving:
    """This rank has no more data: one wait of a session, for all of its modules in a `Join`.

    The wait has a thread of its own, as `Join` meanwhile repeats the other joinables' operations.
    """

    def __init__(self, session: gradsync.Session) -> None:
        self.synchronizers: weakref.WeakSet[Synchronizer] = weakref.WeakSet()
        self._session = session
        self._thread: threading.Thread | None = None
        self._last = 0
        self._error: gradsync.Error | None = None

    @property
    def started(self) -> bool:
        """Whether this rank has said that it has no more data."""
        return self._thread is not None

    def start(self) -> None:
        """Says so, at the first call.

        Raises:
          gradsync.Error: the session has ended, or the daemon is silent.
        """
        if self._thread is not None:
            return
        for synchronizer in self.synchronizers:
            synchronizer.finish_inputs()
        self._thread = threading.Thread(target=self._leave, daemon=True)
        self._thread.start()

    def _leave(self) -> None:
        try:
            with _session.noting(self._session):
                self._last = self._session.leave_and_stay()
        except gradsync.Error as error:
            self._error = error

    def wait(self) -> int:
        """Waits until no rank has data any more; returns the rank that ended last.

        Raises:
          gradsync.Error: as Session.leave_and_stay().
        """
        self.start()
        assert self._thread is not None
        self._thread.join()
        if self._error is not None:
            raise self._error
        return self._last


_leavings: weakref.WeakKeyDictionary[gradsync.Session, _Leaving] = weakref.WeakKeyDictionary()


class JoinHook(pytorch.JoinHook):
    """Takes part in PyTorch's `Join`: a rank without data leaves the steps to the others.

    Args:
      wrapper: of the module; referred to weakly.
      synchronizer: its synchronizer.
      by_world: whether averages divide by the world size, not by the ranks that have data.
    """

    def __init__(
        self, wrapper: pytorch.Joinable, synchronizer: Synchronizer, by_world: bool
    ) -> None:
        self._wrapper: weakref.ref[Any] = weakref.ref(wrapper)
        self._synchronizer = synchronizer
        self._by_world = by_world
        leaving = _leavings.get(synchronizer.session)
        if leaving is None or leaving.started:  # the last one ended with its Join
            leaving = _leavings[synchronizer.session] = _Leaving(synchronizer.session)
        leaving.synchronizers.add(synchronizer)
        self._leaving = leaving

    def at_forward(self) -> None:
        """A forward pass begins.

        Raises:
          RuntimeError: with `throw_on_early_termination`, if a rank has no more data.
        """
        wrapper = self._wrapper()
        if wrapper is None or not wrapper._join_config.enable:
            return
        self._synchronizer.outcomes.by_world = self._by_world
        work = pytorch.Join.notify_join_context(wrapper)
        if work is not None:
            work.wait()

    def main_hook(self) -> None:
        """This rank has no more data, and another one has."""
        self._leaving.start()

    def post_hook(self, is_last_joiner: bool) -> None:
        """No rank has data any more."""
        self._synchronizer.outcomes.come_back(self._leaving.wait())
        self._synchronizer.outcomes.by_world = None
        wrapper = self._wrapper()
        if wrapper is not None:
            wrapper._join_config = wrapper._join_config._replace(enable=False)
            wrapper._join_hook = None
