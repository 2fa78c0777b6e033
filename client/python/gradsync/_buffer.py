"""Trainers' own memory, by Python's buffer protocol, for the job's operations."""

from __future__ import annotations

import ctypes
from typing import Any

from gradsync import errors
from gradsync.data_type import DataType
from gradsync.reason import Reason

# By the letter of the format and the size of an element: "l" has 4 or 8 bytes.
_FORMATS = {
    ("f", 4): DataType.FLOAT32,
    ("d", 8): DataType.FLOAT64,
    ("e", 2): DataType.FLOAT16,
    ("b", 1): DataType.INT8,
    ("B", 1): DataType.UINT8,
    ("h", 2): DataType.INT16,
    ("i", 4): DataType.INT32,
    ("l", 4): DataType.INT32,
    ("l", 8): DataType.INT64,
    ("q", 8): DataType.INT64,
}


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
        view = memoryview(buffer)
    except (TypeError, ValueError, BufferError) as error:
        raise errors.InvalidArgumentError(
            f"this is no buffer: {error}", reason=Reason.MALFORMED
        ) from error
    dtype = _FORMATS.get((view.format.lstrip("<=@"), view.itemsize))
    if dtype is None:
        raise errors.InvalidArgumentError(
            f"gradsync does not reduce elements of format '{view.format}'; give the dtype if they "
            "are of one that it does",
            reason=Reason.MALFORMED,
        )
    return dtype
