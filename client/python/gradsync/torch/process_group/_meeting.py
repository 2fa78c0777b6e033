"""Waits until all ranks make a group, and names those that do not come."""

from __future__ import annotations

import time
from typing import Any

import gradsync
from gradsync import _notices

# Set by the rank that comes last.
_ALL = "came/all"
# Seconds between two looks into the store: a tenth of the time that has passed. PyTorch would print
# a warning for each wait of the store that ends by its time-out.
_SHORTEST_PAUSE = 0.001
_LONGEST_PAUSE = 0.1
# Ranks that a message names.
_NAMED = 8


def meet(options: Any, store: Any) -> None:
    """Returns when every rank of the group has called this.

    After 5 s, and then every 30 s, the logger "gradsync" names the ranks that have not come. Gloo
    alone says nothing until its time-out, and then only that a key is missing.

    Args:
      options: PyTorch's `_DistributedBackendOptions`.
      store: of this group alone.

    Raises:
      DeadlineExceededError: OPERATION_TIMEOUT; names the ranks that have not come.
      RuntimeError: the store's, if it cannot be reached.
    """
    store.set(_key(options.group_rank), "")
    if store.add("came", 1) == options.group_size:
        store.set(_ALL, "")
    limit = options.timeout.total_seconds()
    clock = _notices.Clock()
    while not store.check([_ALL]):
        if clock.waited >= limit:
            late = _late(options, store) or "the rank that comes last has not ended its call"
            raise gradsync.DeadlineExceededError(
                f"{late} within {limit:g} s. Look at its output: it was not started, has ended, or "
                "got another address or world size. Or give the group a longer timeout.",
                reason=gradsync.Reason.OPERATION_TIMEOUT,
            )
        # Backs off: a store tells nothing without being asked.
        time.sleep(min(_LONGEST_PAUSE, max(_SHORTEST_PAUSE, clock.waited / 10)))
        if clock.due() and (late := _late(options, store)):
            _notices.say(
                "gradsync: rank %d still waits for the process group after %.0fs: %s",
                _name(options, options.group_rank),
                clock.waited,
                late,
            )


def _late(options: Any, store: Any) -> str:
    """`rank 1 has not called init_process_group("gradsync")`; "" if all ranks have come."""
    late = _absent(store, range(options.group_size), _NAMED + 1)
    if not late:
        return ""
    names = ", ".join(str(_name(options, rank)) for rank in late[:_NAMED])
    if len(late) > _NAMED:
        names += " and more"
    call = 'init_process_group("gradsync")'
    if options.global_ranks_in_group:
        call = "new_group with the same ranks"
    who = f"ranks {names} have" if len(late) > 1 else f"rank {names} has"
    return f"{who} not called {call}"


def _absent(store: Any, ranks: range, most: int) -> list[int]:
    """The first `most` of `ranks` that have not come. Asks for many ranks at once."""
    if store.check([_key(rank) for rank in ranks]):
        return []
    if len(ranks) == 1:
        return [ranks[0]]
    middle = len(ranks) // 2
    first = _absent(store, ranks[:middle], most)
    rest = most - len(first)
    return first + (_absent(store, ranks[middle:], rest) if rest > 0 else [])


def _key(rank: int) -> str:
    return f"came/{rank}"


def _name(options: Any, rank: int) -> int:
    """The number that a rank of the group has among all ranks."""
    ranks = options.global_ranks_in_group
    return int(ranks[rank]) if ranks else rank
