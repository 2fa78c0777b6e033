"""The end of a backward pass that several wrapped modules had a part in."""

from __future__ import annotations

from typing import Callable

from gradsync.torch import _hooks

# Of the modules whose part of the pass is over, by the order in which they were wrapped. Used on
# the thread that runs the pass.
_endings: list[tuple[int, Callable[[], None]]] = []


def add(order: int, finish: Callable[[], None]) -> None:
    """Calls `finish` after every other module's end, and in the order of wrapping.

    Ranks that waited for different modules would wait for ever.

    Args:
      order: which of the wrapped modules it is, the same on every rank.
      finish: waits for the module's verdict.
    """
    _endings.append((order, finish))
    _hooks.at_end_of_backward(_finish_all)


def _finish_all() -> None:
    """Waits for the verdict of every module that had a part in the pass."""
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
