"""Where each rank is in its steps, for the other ranks to see."""

from __future__ import annotations

import mmap
import os
import pathlib
import struct

_MARKED = 0
_COMPLETE = 1
_PLACES = 2
_WORD = struct.Struct("=Q")
# Marks of one step, at most.
_STEP = 1 << 16


class Board:
    """A few words of shared memory for each rank. Only the rank itself writes its words."""

    def __init__(self, path: pathlib.Path, ranks: int) -> None:
        """Maps the file; makes it if it is new."""
        size = ranks * _PLACES * _WORD.size
        file = os.open(path, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o600)
        os.ftruncate(file, size)
        self._memory = mmap.mmap(file, size)
        os.close(file)
        self._ranks = ranks

    def marks(self, rank: int, step: int, count: int) -> None:
        """The rank has marked `count` buckets of the step."""
        self._write(rank, _MARKED, step * _STEP + count)

    def completes(self, rank: int, step: int) -> None:
        """The rank has got the step's verdict."""
        self._write(rank, _COMPLETE, step)

    def have_marked(self, step: int, but: int) -> bool:
        """Whether every rank but one has marked a bucket of the step, or of a later one."""
        return all(
            self._read(rank, _MARKED) >= step * _STEP + 1
            for rank in range(self._ranks)
            if rank != but
        )

    def is_complete(self, step: int) -> bool:
        """Whether some rank has got the step's verdict."""
        return any(self._read(rank, _COMPLETE) >= step for rank in range(self._ranks))

    def _write(self, rank: int, place: int, value: int) -> None:
        _WORD.pack_into(self._memory, (rank * _PLACES + place) * _WORD.size, value)

    def _read(self, rank: int, place: int) -> int:
        word: int = _WORD.unpack_from(self._memory, (rank * _PLACES + place) * _WORD.size)[0]
        return word
