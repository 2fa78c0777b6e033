"""A page of memory whose next reader has to wait: it stops a transfer at an exact byte."""

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


class GuardedPage:
    """One page inside of a block of memory. One for each process.

    While it is armed, the thread that reads the page next, in whatever code, first runs a function.
    Then the page can be read as before. Nobody may write to it meanwhile.
    """

    def __init__(self, address: int, size: int) -> None:
        """Picks a page in the middle of the block, which has at least two pages."""
        middle = address + size // 2
        self._page = middle - middle % mmap.PAGESIZE
        assert address <= self._page and self._page + mmap.PAGESIZE <= address + size
        self._on_read: Optional[Callable[[], None]] = None
        self._keep: Any = _Handler(self._handle)
        action = _Action(handler=self._keep, flags=_SA_SIGINFO)
        if _libc.sigaction(signal.SIGSEGV, ctypes.byref(action), None) != 0:
            raise OSError(ctypes.get_errno(), "sigaction")

    def arm(self, on_read: Callable[[], None]) -> None:
        """Args: on_read: is called once, on the reading thread."""
        self._on_read = on_read
        self._protect(_PROT_NONE)

    def disarm(self) -> None:
        """The page can be read. Does nothing if it can."""
        self._protect(_PROT_READ_WRITE)
        self._on_read = None

    def _handle(self, _number: int, info: int, _context: int) -> None:
        # siginfo_t.si_addr.
        address = ctypes.c_uint64.from_address(info + 16).value
        if not self._page <= address < self._page + mmap.PAGESIZE:
            # A fault of the program: it repeats, and then ends the process.
            _libc.signal(signal.SIGSEGV, None)  # SIG_DFL
            return
        on_read, self._on_read = self._on_read, None
        try:
            if on_read is not None:
                on_read()
        finally:
            self._protect(_PROT_READ_WRITE)

    def _protect(self, protection: int) -> None:
        if _libc.mprotect(ctypes.c_void_p(self._page), mmap.PAGESIZE, protection) != 0:
            raise OSError(ctypes.get_errno(), "mprotect")
