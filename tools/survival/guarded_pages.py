"""Pages of memory whose next reader has to wait: they stop a transfer at an exact byte."""

from __future__ import annotations

import ctypes
import mmap
import signal
from typing import Any, Callable, Optional

_PROT_NONE = 0
_PROT_READ_WRITE = mmap.PROT_READ | mmap.PROT_WRITE
_SA_SIGINFO = 4
_libc = ctypes.CDLL(None, use_errno=True)
_Handler = ctypes.CFUNCTYPE(None, ctypes.c_int, ctypes.c_void_p, ctypes.c_void_p)


class _Action(ctypes.Structure):
    """struct sigaction of glibc on x86-64."""

    _fields_ = [
        ("handler", _Handler),
        ("mask", ctypes.c_ulong * 16),
        ("flags", ctypes.c_int),
        ("restorer", ctypes.c_void_p),
    ]


class GuardedPages:
    """Two pages inside of a block of memory. One for each process.

    While one is armed, the thread that reads it next, in whatever code, first runs a function. Then
    the page can be read as before, and the other page can be armed: a thread that reads the block
    twice is stopped several times. Nobody may write to the pages meanwhile.
    """

    def __init__(self, address: int, size: int) -> None:
        """Picks pages at a quarter and at three quarters of the block, which has eight or more."""
        assert size >= 8 * mmap.PAGESIZE
        self._pages = [_page_at(address + size // 4), _page_at(address + 3 * size // 4)]
        self._on_read: Optional[Callable[[], bool]] = None
        self._keep: Any = _Handler(self._handle)
        action = _Action(handler=self._keep, flags=_SA_SIGINFO)
        if _libc.sigaction(signal.SIGSEGV, ctypes.byref(action), None) != 0:
            raise OSError(ctypes.get_errno(), "sigaction")

    def arm(self, on_read: Callable[[], bool]) -> None:
        """Arms the first page.

        Args:
          on_read: is called on the reading thread; returns whether to arm the other page.
        """
        self._on_read = on_read
        _protect(self._pages[0], _PROT_NONE)

    def disarm(self) -> None:
        """Both pages can be read. Does nothing if they can."""
        self._on_read = None
        for page in self._pages:
            _protect(page, _PROT_READ_WRITE)

    def _handle(self, _number: int, info: int, _context: int) -> None:
        # siginfo_t.si_addr.
        page = _page_at(ctypes.c_uint64.from_address(info + 16).value)
        if page not in self._pages:
            # A fault of the program: it repeats, and then ends the process.
            _libc.signal(signal.SIGSEGV, None)  # SIG_DFL
            return
        again = False
        try:
            on_read = self._on_read
            again = on_read is not None and on_read()
        finally:
            _protect(page, _PROT_READ_WRITE)
        if again:
            # One thread reads, and it is here: nobody reads the other page now.
            (other,) = [other for other in self._pages if other != page]
            _protect(other, _PROT_NONE)


def _page_at(address: int) -> int:
    return address - address % mmap.PAGESIZE


def _protect(page: int, protection: int) -> None:
    if _libc.mprotect(ctypes.c_void_p(page), mmap.PAGESIZE, protection) != 0:
        raise OSError(ctypes.get_errno(), "mprotect")
