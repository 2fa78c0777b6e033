"""Uneven inputs: ranks with different numbers of steps."""

from __future__ import annotations

import contextlib
from typing import Iterator, Sequence

import torch

import gradsync
from gradsync.torch import _session
from gradsync.torch._synchronizer import Synchronizer


class EarlyEnd:
    """Ends the training of every rank when the first rank has no more data.

    Each forward pass asks whether a rank has none, in one small operation of the session.
    """

    def __init__(self, session: gradsync.Session) -> None:
        self._session = session

    def at_forward(self) -> None:
        """A forward pass begins.

        Raises:
          RuntimeError: a rank has no more data.
        """
        ended, _ = self._count(ended=False)
        if ended:
            raise RuntimeError(
                "gradsync: Detected at least one rank that exhausted inputs. Throwing across all "
                "ranks."
            )

    def at_end(self) -> None:
        """Says that this rank has no more data.

        Raises:
          RuntimeError: another rank still has data.
        """
        ended, live = self._count(ended=True)
        if ended < live:
            raise RuntimeError(f"gradsync: Rank {self._session.rank} exhausted all inputs.")

    def _count(self, ended: bool) -> tuple[int, int]:
        """How many ranks have no more data, and how many ranks there are."""
        counts = torch.tensor([ended, 1], dtype=torch.float64)
        with _session.noting(self._session):
            self._session.all_reduce_address(
                counts.data_ptr(),
                counts.numel(),
                gradsync.DataType.FLOAT64,
                "sum",
                self._session.options.step_timeout,
                owner=counts,
            )
        return int(counts[0]), int(counts[1])


def session_of(synchronizers: Sequence[Synchronizer]) -> gradsync.Session:
    """The session of the modules in a join().

    Raises:
      ValueError: there is no module, or they have several sessions.
    """
    if not synchronizers:
        raise ValueError("gradsync: join() got no module; pass every module that is trained")
    session = synchronizers[0].session
    if any(synchronizer.session is not session for synchronizer in synchronizers):
        raise ValueError(
            "gradsync: join() got modules of several sessions; use one join() for each session"
        )
    return session


@contextlib.contextmanager
def uneven_inputs(
    synchronizers: Sequence[Synchronizer],
    by_world: bool,
    early_end: EarlyEnd | None,
    timeout: float | None,
) -> Iterator[None]:
    """`gradsync.torch.join` for the synchronizers of its modules; see there."""
    for synchronizer in synchronizers:
        synchronizer.outcomes.by_world = by_world
    try:
        yield
        for synchronizer in synchronizers:
            synchronizer.finish_inputs()
        if early_end is not None:
            early_end.at_end()
        session = synchronizers[0].session
        with _session.noting(session):
            last = session.leave_and_stay(timeout)
        for synchronizer in synchronizers:
            synchronizer.outcomes.come_back(last)
    finally:
        for synchronizer in synchronizers:
            synchronizer.outcomes.by_world = None
