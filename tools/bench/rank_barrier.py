"""A barrier of Python's rank processes in shared memory, which costs microseconds."""

from __future__ import annotations

import mmap
import os
import time

# How often a waiting rank only yields before it sleeps between its looks, and how long it sleeps.
_YIELDS = 20
_SLEEP_S = 20e-6
_CACHE_LINE = 64


class RankBarrier:
    """Every rank opens the same file, which must exist; then they wait for one another."""

    def __init__(self, path: str, rank: int, ranks: int) -> None:
        """Maps the file, which gets the size that it needs."""
        descriptor = os.open(path, os.O_RDWR)
        try:
            os.ftruncate(descriptor, ranks * _CACHE_LINE)
            self._memory = mmap.mmap(descriptor, ranks * _CACHE_LINE)
        finally:
            os.close(descriptor)
        # Items are written and read whole.
        self._counts = memoryview(self._memory).cast("Q")
        self._places = [other * _CACHE_LINE // 8 for other in range(ranks)]
        self._own = self._places[rank]
        self._generation = 0

    def wait(self) -> None:
        """Returns when every rank has come."""
        self._generation += 1
        self._counts[self._own] = self._generation
        looks = 0
        while any(self._counts[place] < self._generation for place in self._places):
            looks += 1
            if looks <= _YIELDS:
                os.sched_yield()
            else:
                time.sleep(_SLEEP_S)
