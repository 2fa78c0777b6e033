"""Trainers' own memory, by Python's buffer protocol, for the job's operations."""

from __future__ import annotations

import ctypes
from typing import Any

from gradsync import errors
from gradsync.data_type import DataType
from gradsync.reason import Reason

_FORMATS = {"f": DataType.FLOAT32, "d": DataType.FLOAT64, "e": DataType.FLOAT16}


def writable(buffer: Any) -> ctypes.Array[ctypes.c_char]:
    """The memory of `buffer`, which it keeps alive.

    Raises:
      InvalidArgumentError: the buffer is read-only or not contiguous.
    """
    try:
        return (ctypes.c_char * memoryview(buffer).nbytes).from_buffer(buffer)
    except (TypeError, ValueError, BufferError) as error:
        raise errors.InvalidArgumentError(
            f"a buffer must be writable, contiguous memory: {error}", reason=Reason.MALFORMED
        ) from error


def dtype_of(buffer: Any) -> DataType:
    """The type of the elements of `buffer`.

    Raises:
      InvalidArgumentError: it is no buffer, or gradsync does not reduce its type.
    """
    try:
        text = memoryview(buffer).format
    except (TypeError, ValueError, BufferError) as error:
        raise errors.InvalidArgumentError(
            f"this is no buffer: {error}", reason=Reason.MALFORMED
        ) from error
    dtype = _FORMATS.get(text.lstrip("<=@"))
    if dtype is None:
        raise errors.InvalidArgumentError(
            f"gradsync does not reduce elements of format '{text}'; give the dtype if they are of "
            "one that it does",
            reason=Reason.MALFORMED,
        )
    return dtype
