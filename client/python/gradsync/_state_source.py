"""The items of a state for the library, and the function that the library calls for them.

The library calls the function on a thread of its own, which needs the GIL. So every call that waits
for that thread releases the GIL. Serving ends before the interpreter does.
"""

from __future__ import annotations

import atexit
import contextlib
import ctypes
import itertools
import os
import threading
import weakref
from collections.abc import Sequence
from typing import Any, Optional

from gradsync import _structs, _text, errors
from gradsync._handle import SessionHandle
from gradsync._library import library, raise_error
from gradsync.reason import Reason
from gradsync.state import StateReader

_REASON_SIZE = 1024  # GRADSYNC_STATE_REASON_SIZE


class _Buffer(ctypes.Structure):
    """Py_buffer of CPython's stable ABI: ctypes itself takes only writable buffers."""

    _fields_ = (
        ("buf", ctypes.c_void_p),
        ("obj", ctypes.c_void_p),  # the buffer owns the reference
        ("len", ctypes.c_ssize_t),
        ("itemsize", ctypes.c_ssize_t),
        ("readonly", ctypes.c_int),
        ("ndim", ctypes.c_int),
        ("format", ctypes.c_char_p),
        ("shape", ctypes.c_void_p),
        ("strides", ctypes.c_void_p),
        ("suboffsets", ctypes.c_void_p),
        ("internal", ctypes.c_void_p),
    )


_get_buffer = ctypes.pythonapi.PyObject_GetBuffer
_get_buffer.argtypes = (ctypes.py_object, ctypes.POINTER(_Buffer), ctypes.c_int)
_release_buffer = ctypes.pythonapi.PyBuffer_Release
_release_buffer.argtypes = (ctypes.POINTER(_Buffer),)
_release_buffer.restype = None


class Items:
    """The items of a state as the library takes them. Keeps their memory until release()."""

    def __init__(self, items: Sequence[tuple[str, Any]]) -> None:
        """Takes what the trainer's function has returned.

        Raises:
          InvalidArgumentError: an item is malformed; the message names it.
        """
        self._buffers: list[_Buffer] = []
        self._owners: list[object] = []
        self.count = len(items)
        self.array = (_structs.StateItemStruct * self.count)()
        try:
            for struct, (name, memory) in zip(self.array, items):
                struct.name = _text.encode(name, "an item's name")
                struct.data, struct.bytes = self._memory(name, memory)
        except BaseException:
            self.release()
            raise

    def _memory(self, name: str, memory: Any) -> tuple[int, int]:
        self._owners.append(memory)
        if isinstance(memory, tuple):  # a StateMemory
            address, nbytes, _ = memory
            return address, nbytes
        buffer = _Buffer()
        try:
            _get_buffer(memory, buffer, 0)  # PyBUF_SIMPLE: contiguous bytes
        except (TypeError, ValueError, BufferError) as error:
            raise errors.InvalidArgumentError(
                f"item {name!r} of the state is no contiguous buffer and no StateMemory: {error}",
                reason=Reason.MALFORMED,
            ) from error
        self._buffers.append(buffer)
        return buffer.buf or 0, buffer.len

    def release(self) -> None:
        """The memory is not used any more."""
        while self._buffers:
            _release_buffer(self._buffers.pop())
        self._owners.clear()

    def __del__(self) -> None:
        """A call may have ended before it used them."""
        self.release()


class _Server:
    """Answers the library's calls for one session."""

    def __init__(self, read: StateReader) -> None:
        self._read = read
        self._items: Optional[Items] = None

    def read(self) -> Items:
        self.done()
        self._items = Items(list(self._read()))
        return self._items

    def done(self) -> None:
        items, self._items = self._items, None
        if items is not None:
            items.release()


# The servers of live sessions, by the number that the library passes to the functions.
_servers: weakref.WeakValueDictionary[int, _Server] = weakref.WeakValueDictionary()
_numbers = itertools.count(1)
# Sessions that have served their state. Appending, copying and removing are atomic.
_serving: list[weakref.ref[SessionHandle]] = []


def _read_state(user: int, items: Any, count: Any, reason: Any) -> int:
    try:
        server = _servers.get(user)
        if server is None:
            raise RuntimeError("the session was closed")
        read = server.read()
        items[0] = ctypes.cast(read.array, ctypes.POINTER(_structs.StateItemStruct))
        count[0] = read.count
        return 0
    except BaseException as error:  # whatever the trainer's function raises
        text = f"{type(error).__name__}: {error}".encode("utf-8", "replace").replace(b"\0", b"?")
        text = text[: _REASON_SIZE - 1] + b"\0"
        ctypes.memmove(reason, text, len(text))
        return 1


def _state_done(user: int) -> None:
    server = _servers.get(user)
    if server is not None:
        server.done()


# They live as long as the module: the library may call them until serving has ended.
_READ = _structs.READ_STATE(_read_state)
_DONE = _structs.STATE_DONE(_state_done)


def serve(handle: SessionHandle, read: Optional[StateReader]) -> None:
    """Session.serve_state()."""
    if read is None:
        _stop(handle)
        return
    server = _Server(read)
    number = next(_numbers)
    _servers[number] = server
    struct = _structs.StateReaderStruct(
        ctypes.sizeof(_structs.StateReaderStruct), number, _READ, _DONE
    )
    if error := library.serve_state(handle, struct):
        raise_error(error)
    if handle.state_server is None:
        _serving.append(weakref.ref(handle, _serving.remove))
    handle.state_server = server  # serve_state() has ended the use of the previous one
    # The last one that is registered runs first: before the sessions are destroyed.
    atexit.unregister(_stop_all)
    atexit.register(_stop_all)


def pause(handle: SessionHandle) -> None:
    """After Ctrl-C, while a helper is still inside of a wait: the state is not read any more."""
    with handle.use() as usable:
        if usable and (error := library.pause_state(handle)):
            library.error_destroy(error)


class Call:
    """A call that the trainer begins now, on its own thread or in a helper."""

    def __init__(self, handle: SessionHandle) -> None:
        self._handle = handle
        self._thread = threading.get_ident()
        self._pauses = 0
        with handle.use() as usable:
            if usable:
                self._pauses = int(library.state_pauses(handle))

    def begin(self) -> None:
        """Called on the thread that makes the call.

        If that is a helper, and pause() came after this object was made, the library does not read
        the state during the call.
        """
        if threading.get_ident() == self._thread:
            return
        with self._handle.use() as usable:
            if usable:
                library.call_began(self._handle, self._pauses)


def _stop(handle: SessionHandle) -> None:
    if error := library.serve_state(handle, None):
        raise_error(error)
    handle.state_server = None
    _serving[:] = [reference for reference in _serving if reference() is not handle]


def _stop_all() -> None:
    for reference in list(_serving):
        handle = reference()
        if handle is not None and handle.finalizer.alive:
            with contextlib.suppress(errors.Error):
                _stop(handle)


os.register_at_fork(after_in_child=_serving.clear)
