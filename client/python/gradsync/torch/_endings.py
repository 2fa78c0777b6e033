"""The end of a backward pass that went through several wrapped modules."""

from __future__ import annotations

from typing import Callable

from gradsync.torch import _autograd

# (order of wrapping, finish) of the modules of the running pass. Used on the thread that runs it.
_endings: list[tuple[int, Callable[[], None]]] = []


def add(order: int, finish: Callable[[], None]) -> None:
    """Calls `finish` after all modules have ended their part, in the order of wrapping.

    If two ranks waited for different modules first, both would wait for ever.

    Args:
      order: the module's number among all that were wrapped, the same on every rank.
      finish: waits for the module's verdict.
    """
    _endings.append((order, finish))
    _autograd.at_end_of_backward(_finish_all)


def _finish_all() -> None:
    """Waits for every module's verdict; raises the first error afterwards."""
    endings = sorted(_endings, key=lambda ending: ending[0])
    _endings.clear()
    first: BaseException | None = None
    for _, finish in endings:
        try:
            finish()
        except BaseException as error:
            first = first or error
    if first is not None:
        raise first
