"""Finds and loads libgradsync.so, and declares the types of its functions.

Functions that can block, if only for another thread's call, run without the GIL (`_blocking`). The
others keep it (`_quick`): they return within microseconds, and getting the GIL back from a busy
thread can take milliseconds.
"""

from __future__ import annotations

import ctypes
import os
import pathlib
from collections.abc import Sequence
from typing import Any, Callable, Optional

from gradsync import _structs, errors

# The ABI version that this package needs: GRADSYNC_ABI_VERSION in gradsync.h.
ABI_VERSION = 1

_FILE = "libgradsync.so"

_POINTER = ctypes.c_void_p
# gradsync_error_t*: None is success; pass an int to raise_error().
_ERROR = ctypes.c_void_p
_Argtypes = Sequence[Any]


class Library:
    """The functions of one libgradsync.so; their names lack the prefix `gradsync_`."""

    def __init__(self, path: str) -> None:
        """Loads the library.

        Raises:
          ImportError: it cannot be loaded, has another ABI version, or lacks a function.
        """
        self.path = path
        try:
            self._library = ctypes.CDLL(path)
        except OSError as error:
            raise ImportError(
                f"gradsync cannot load its library {path}: {error}", path=path
            ) from error
        self._quick_library = ctypes.PyDLL(path, handle=self._library._handle)
        self.abi_version = self._abi_version()
        if self.abi_version != ABI_VERSION:
            raise ImportError(
                f"{path} is a library of another version: its ABI version is {self.abi_version}, "
                f"and this package needs {ABI_VERSION}; install library and package together, or "
                "check GRADSYNC_LIBRARY",
                path=path,
            )
        self._bind_errors()
        self._bind_session()
        self._bind_state()
        self._bind_layout()

    def _abi_version(self) -> int:
        function = getattr(self._quick_library, "gradsync_abi_version", None)
        if function is None:
            raise ImportError(
                f"{self.path} is not gradsync's library; check GRADSYNC_LIBRARY", path=self.path
            )
        function.restype = ctypes.c_uint32
        function.argtypes = ()
        return int(function())

    def _bind_errors(self) -> None:
        self.error_code = self._quick("error_code", ctypes.c_int, [_ERROR])
        self.error_message = self._quick("error_message", ctypes.c_char_p, [_ERROR])
        self.error_reason = self._quick("error_reason", ctypes.c_char_p, [_ERROR])
        self.error_field = self._quick("error_field", ctypes.c_char_p, [_ERROR, ctypes.c_char_p])
        self.error_destroy = self._quick("error_destroy", None, [_ERROR])
        self.code_name = self._quick("code_name", ctypes.c_char_p, [ctypes.c_int])

    def _bind_session(self) -> None:
        options = ctypes.POINTER(_structs.SessionOptionsStruct)
        out = ctypes.POINTER(ctypes.c_void_p)
        self.options_from_environment = self._quick(
            "session_options_from_environment", _ERROR, [options]
        )
        self.options_destroy = self._quick("session_options_destroy", None, [options])
        self.session_join = self._blocking("session_join", _ERROR, [options, out])
        self.session_destroy = self._blocking("session_destroy", None, [_POINTER])
        self.session_rank = self._quick("session_rank", ctypes.c_uint32, [_POINTER])
        self.session_world_size = self._quick("session_world_size", ctypes.c_uint32, [_POINTER])
        self.session_generation = self._quick("session_generation", ctypes.c_uint64, [_POINTER])
        self.session_incarnation = self._quick("session_incarnation", ctypes.c_uint64, [_POINTER])
        self.session_is_replacement = self._quick(
            "session_is_replacement", ctypes.c_int, [_POINTER]
        )
        spec = ctypes.POINTER(_structs.LayoutSpecStruct)
        self.register_layout = self._blocking("register_layout", _ERROR, [_POINTER, spec, out])
        self.replace_layout = self._blocking(
            "replace_layout", _ERROR, [_POINTER, _POINTER, spec, out]
        )
        self.barrier = self._blocking("barrier", _ERROR, [_POINTER, ctypes.c_int64])
        self.broadcast = self._blocking(
            "broadcast",
            _ERROR,
            [_POINTER, ctypes.c_void_p, ctypes.c_size_t, ctypes.c_uint32, ctypes.c_int64],
        )
        self.all_reduce = self._blocking(
            "all_reduce",
            _ERROR,
            [
                _POINTER,
                ctypes.c_void_p,
                ctypes.c_size_t,
                ctypes.c_int32,
                ctypes.c_int32,
                ctypes.c_int64,
            ],
        )
        self.session_leave = self._blocking("session_leave", _ERROR, [_POINTER])
        self.session_finish = self._blocking("session_finish", _ERROR, [_POINTER])
        self.session_leave_and_stay = self._blocking(
            "session_leave_and_stay",
            _ERROR,
            [_POINTER, ctypes.c_int64, ctypes.POINTER(ctypes.c_uint32)],
        )
        self.begin_collective = self._quick("begin_collective", _ERROR, [_POINTER, ctypes.c_char_p])
        self.query_collectives = self._quick(
            "query_collectives", _ERROR, [_POINTER, ctypes.c_int64]
        )
        self.session_has_ended = self._quick("session_has_ended", ctypes.c_int, [_POINTER])
        self.session_await_end = self._blocking(
            "session_await_end", _ERROR, [_POINTER, ctypes.c_int64]
        )
        self.session_take_notice = self._quick(
            "session_take_notice", ctypes.c_size_t, [_POINTER, ctypes.c_char_p, ctypes.c_size_t]
        )
        self.session_statistics = self._quick(
            "session_statistics", None, [_POINTER, ctypes.POINTER(_structs.StatisticsStruct)]
        )

    def _bind_state(self) -> None:
        """Functions of the state of the model. Some wait for a thread that needs the GIL."""
        out = ctypes.POINTER(ctypes.c_void_p)
        item = ctypes.POINTER(_structs.StateItemStruct)
        self.serve_state = self._blocking(
            "serve_state", _ERROR, [_POINTER, ctypes.POINTER(_structs.StateReaderStruct)]
        )
        self.pause_state = self._blocking("pause_state", _ERROR, [_POINTER])
        self.state_pauses = self._quick("state_pauses", ctypes.c_uint64, [_POINTER])
        self.call_began = self._quick("call_began", None, [_POINTER, ctypes.c_uint64])
        self.get_current_layouts = self._quick("get_current_layouts", _ERROR, [_POINTER, out])
        self.current_layouts_count = self._quick(
            "current_layouts_count", ctypes.c_size_t, [_POINTER]
        )
        self.current_layouts_get = self._quick(
            "current_layouts_get",
            _ERROR,
            [
                _POINTER,
                ctypes.c_size_t,
                ctypes.POINTER(_structs.LayoutSpecStruct),
                ctypes.POINTER(ctypes.c_uint64),
            ],
        )
        self.current_layouts_destroy = self._quick("current_layouts_destroy", None, [_POINTER])
        self.fetch_state = self._blocking("fetch_state", _ERROR, [_POINTER, ctypes.c_int64, out])
        self.state_image_source = self._quick("state_image_source", ctypes.c_uint32, [_POINTER])
        self.state_image_count = self._quick("state_image_count", ctypes.c_size_t, [_POINTER])
        self.state_image_item = self._quick(
            "state_image_item", _ERROR, [_POINTER, ctypes.c_size_t, item]
        )
        self.state_image_destroy = self._blocking("state_image_destroy", None, [_POINTER])
        self.confirm_state = self._blocking("confirm_state", _ERROR, [_POINTER, ctypes.c_int64])
        self.check_in_sync = self._blocking(
            "check_in_sync", _ERROR, [_POINTER, item, ctypes.c_size_t, ctypes.c_int64]
        )

    def _bind_layout(self) -> None:
        view = ctypes.POINTER(_structs.ViewStruct)
        result = ctypes.POINTER(_structs.StepResultStruct)
        step = ctypes.c_uint64
        self.layout_destroy = self._blocking("layout_destroy", None, [_POINTER])
        self.layout_name = self._quick("layout_name", ctypes.c_char_p, [_POINTER])
        self.layout_fingerprint = self._quick("layout_fingerprint", ctypes.c_uint64, [_POINTER])
        self.layout_bucket_count = self._quick("layout_bucket_count", ctypes.c_size_t, [_POINTER])
        self.layout_parameter_count = self._quick(
            "layout_parameter_count", ctypes.c_size_t, [_POINTER]
        )
        self.layout_bucket = self._quick("layout_bucket", _ERROR, [_POINTER, ctypes.c_size_t, view])
        self.layout_buffers = self._quick("layout_buffers", _ERROR, [_POINTER, view])
        self.set_position = self._quick(
            "set_position", None, [_POINTER, ctypes.c_uint64, ctypes.c_uint64]
        )
        self.layout_gradient = self._quick(
            "layout_gradient", _ERROR, [_POINTER, ctypes.c_size_t, view]
        )
        self.layout_mapping = self._quick(
            "layout_mapping", _ERROR, [_POINTER, ctypes.POINTER(ctypes.c_void_p)]
        )
        self.mapping_destroy = self._blocking("mapping_destroy", None, [_POINTER])
        self.first_step = self._quick("first_step", ctypes.c_uint64, [_POINTER])
        self.next_step = self._quick("next_step", ctypes.c_uint64, [_POINTER])
        self.mark_ready = self._quick("mark_ready", _ERROR, [_POINTER, step, ctypes.c_size_t])
        self.mark_unused = self._quick("mark_unused", _ERROR, [_POINTER, step, ctypes.c_size_t])
        self.end_step = self._quick("end_step", _ERROR, [_POINTER, step, ctypes.c_char_p])
        self.finish_step = self._quick("finish_step", _ERROR, [_POINTER, step, ctypes.c_char_p])
        # Waits for the reader of the model's state, which needs the GIL.
        self.abandon_step = self._blocking(
            "abandon_step", _ERROR, [_POINTER, step, ctypes.c_char_p]
        )
        self.wait_bucket = self._blocking(
            "wait_bucket", _ERROR, [_POINTER, step, ctypes.c_size_t, ctypes.c_int64]
        )
        self.wait_step = self._blocking(
            "wait_step", _ERROR, [_POINTER, step, ctypes.c_int64, result]
        )
        self.step_result_destroy = self._quick("step_result_destroy", None, [result])
        self._bind_device(step)

    def _bind_device(self, step: Any) -> None:
        """Functions of layouts on a GPU."""
        streams = [ctypes.POINTER(ctypes.c_void_p), ctypes.c_size_t]
        # The driver can block them while a stream's queue is full.
        self.mark_ready_on_streams = self._blocking(
            "mark_ready_on_streams", _ERROR, [_POINTER, step, ctypes.c_size_t, *streams]
        )
        self.finish_step_on_streams = self._blocking(
            "finish_step_on_streams", _ERROR, [_POINTER, step, ctypes.c_char_p, *streams]
        )
        self.wait_on_stream = self._blocking(
            "wait_on_stream", _ERROR, [_POINTER, step, ctypes.c_size_t, ctypes.c_void_p]
        )
        self.device_verdict = self._quick("device_verdict", ctypes.c_void_p, [_POINTER, step])
        self.cuda_device_uuid = self._blocking(
            "cuda_device_uuid", _ERROR, [ctypes.c_int32, ctypes.c_char_p]
        )

    def _blocking(self, name: str, result: Any, arguments: _Argtypes) -> Callable[..., Any]:
        return self._function(self._library, name, result, arguments)

    def _quick(self, name: str, result: Any, arguments: _Argtypes) -> Callable[..., Any]:
        return self._function(self._quick_library, name, result, arguments)

    def _function(
        self, library: ctypes.CDLL, name: str, result: Any, arguments: _Argtypes
    ) -> Callable[..., Any]:
        symbol = f"gradsync_{name}"
        function: Optional[ctypes._NamedFuncPointer] = getattr(library, symbol, None)
        if function is None:
            raise ImportError(
                f"{self.path} has no {symbol}; install library and package together, or check "
                "GRADSYNC_LIBRARY",
                path=self.path,
            )
        function.restype = result
        function.argtypes = tuple(arguments)
        return function


def find() -> str:
    """Path of the library: GRADSYNC_LIBRARY, else in the package, else in the source tree.

    Raises:
      ImportError: it is in none of these places.
    """
    named = os.environ.get("GRADSYNC_LIBRARY")
    if named:
        return named
    package = pathlib.Path(__file__).parent
    candidates = [package / _FILE]
    if len(package.parents) > 2:
        candidates.append(package.parents[2] / "bazel-bin" / "client" / _FILE)
    for candidate in candidates:
        if candidate.exists():
            return str(candidate)
    raise ImportError(
        "gradsync finds no libgradsync.so: set GRADSYNC_LIBRARY, install the wheel that "
        "tools/wheel makes, or run 'bazel build //client:libgradsync.so'; looked for "
        + " and ".join(str(candidate) for candidate in candidates)
    )


library = Library(find())


def raise_error(pointer: int) -> None:
    """Raises the exception for a gradsync_error_t, which it destroys."""
    raise take_error(pointer)


def take_error(pointer: int) -> errors.Error:
    """Returns the exception for a gradsync_error_t, which it destroys."""
    try:
        code = _text(library.code_name(library.error_code(pointer)))
        return errors.class_of(code)(
            _text(library.error_message(pointer)),
            code=code,
            reason=_text(library.error_reason(pointer)),
            job=_text(library.error_field(pointer, b"job")),
            rank=_number(library.error_field(pointer, b"rank")),
            channel=_number(library.error_field(pointer, b"channel")),
            step=_number(library.error_field(pointer, b"step")),
            bucket=_number(library.error_field(pointer, b"bucket")),
        )
    finally:
        library.error_destroy(pointer)


def _text(value: Optional[bytes]) -> str:
    return "" if value is None else value.decode("utf-8", "replace")


def _number(value: Optional[bytes]) -> Optional[int]:
    return int(value) if value and value.isdigit() else None
