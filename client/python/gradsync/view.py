"""Views of gradient memory, which trainer and daemon share."""

from __future__ import annotations

import ctypes
from typing import TYPE_CHECKING, Any, Optional

from gradsync import _handle, _structs
from gradsync.data_type import DataType

if TYPE_CHECKING:
    import numpy

# ctypes has no 16-bit floats, and NumPy has no bfloat16. Their bits appear as integers.
_ELEMENTS: dict[DataType, Any] = {
    DataType.FLOAT32: ctypes.c_float,
    DataType.FLOAT64: ctypes.c_double,
    DataType.FLOAT16: ctypes.c_uint16,
    DataType.BFLOAT16: ctypes.c_uint16,
    DataType.INT8: ctypes.c_int8,
    DataType.UINT8: ctypes.c_uint8,
    DataType.INT16: ctypes.c_int16,
    DataType.INT32: ctypes.c_int32,
    DataType.INT64: ctypes.c_int64,
}
# The types of buckets in GPU memory, which has no integers.
_ARRAY_TYPES = {
    DataType.FLOAT32: "<f4",
    DataType.FLOAT64: "<f8",
    DataType.FLOAT16: "<f2",
    DataType.BFLOAT16: "<i2",
}
_NUMPY_NAMES = {
    DataType.FLOAT32: "float32",
    DataType.FLOAT64: "float64",
    DataType.FLOAT16: "float16",
    DataType.BFLOAT16: "uint16",
    DataType.INT8: "int8",
    DataType.UINT8: "uint8",
    DataType.INT16: "int16",
    DataType.INT32: "int32",
    DataType.INT64: "int64",
}


class View:
    """Memory that is shared with the daemon: a 1-d array of `count` elements of `dtype`.

    It is a bucket, one parameter's gradient, or a step's verdict on a GPU. Immutable, so
    thread-safe; its elements are not: they belong to the daemon while the bucket is reduced.

    The memory stays mapped as long as the view lives, or anything made of its buffer. It outlives
    layout and session. After their end, writes to it reach no other process.

    On a GPU only streams can use the memory: `__cuda_array_interface__` shows it to PyTorch
    (`torch.as_tensor`), CuPy and others.

    Attributes:
      device: UUID of the GPU that has the memory; "" for host memory.
      dtype: type of the elements.
      count: number of elements; in a bucket with the padding between its gradients.
      bucket: index of the bucket, or of the gradient's bucket.
      nbytes: number of bytes.
      address: where the memory begins; a multiple of 128 for a bucket, of 64 for a gradient.
    """

    __slots__ = (
        "__weakref__",
        "_array",
        "_mapping",
        "address",
        "bucket",
        "count",
        "device",
        "dtype",
        "nbytes",
    )

    def __init__(
        self, struct: _structs.ViewStruct, mapping: _handle.Handle, device: str = ""
    ) -> None:
        """A view that `struct` describes; `mapping` keeps the memory mapped."""
        self.device = device
        self.dtype = DataType(struct.data_type)
        self.count: int = struct.count
        self.bucket: int = struct.bucket
        self.nbytes = self.count * self.dtype.item_size
        self.address: int = struct.data or 0
        # Users of a GPU's memory hold the view, and so the mapping. Users of host memory hold the
        # array, by the buffer protocol, so the array keeps the mapping.
        self._mapping = mapping if device else None
        self._array: Optional[ctypes.Array[Any]] = None
        if not device:
            array = (_ELEMENTS[self.dtype] * self.count).from_address(self.address)
            array.gradsync_mapping = mapping
            self._array = array

    @property
    def buffer(self) -> ctypes.Array[Any]:
        """A writable ctypes array of the elements, for users of Python's buffer protocol.

        For example torch.frombuffer(). float16 and bfloat16 appear as 16-bit unsigned integers.

        Raises:
          TypeError: the memory is a GPU's.
        """
        if self._array is None:
            raise TypeError(
                f"{self!r} is memory of a GPU, which the host cannot read or write; use "
                "__cuda_array_interface__, as torch.as_tensor() does"
            )
        return self._array

    @property
    def __cuda_array_interface__(self) -> dict[str, Any]:
        """A GPU's memory for other libraries. bfloat16 appears as 16-bit integers.

        A user of the memory holds the view, which keeps the memory mapped.
        """
        if not self.device:
            raise AttributeError(f"{self!r} is host memory")
        return {
            "shape": (self.count,),
            "typestr": _ARRAY_TYPES[self.dtype],
            "data": (self.address, False),
            "strides": None,
            "version": 3,
        }

    def numpy(self) -> numpy.ndarray[Any, Any]:
        """A NumPy array of shape (count,) on the same memory, not a copy.

        Its dtype is the view's. NumPy has no bfloat16: its bits appear as uint16.

        Raises:
          ImportError: NumPy is not installed.
          TypeError: the memory is a GPU's.
        """
        import numpy

        # NumPy's stubs do not know that ctypes arrays are buffers.
        buffer: Any = self.buffer
        dtype = numpy.dtype(_NUMPY_NAMES[self.dtype])
        array: numpy.ndarray[Any, Any] = numpy.ndarray((self.count,), dtype, buffer)
        return array

    def __repr__(self) -> str:
        """Type, size and bucket, without the elements."""
        return f"<gradsync.View of {self.count} {self.dtype.name.lower()}, bucket {self.bucket}>"
