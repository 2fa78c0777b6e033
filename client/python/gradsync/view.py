"""Views of gradient memory, which trainer and daemon share."""

from __future__ import annotations

import ctypes
from typing import TYPE_CHECKING, Any, Optional

from gradsync import _handle, _structs
from gradsync.data_type import DataType

if TYPE_CHECKING:
    import numpy

# bfloat16 has no type of its own in ctypes, nor in NumPy: its bits.
_ELEMENTS: dict[DataType, Any] = {
    DataType.FLOAT32: ctypes.c_float,
    DataType.FLOAT64: ctypes.c_double,
    DataType.FLOAT16: ctypes.c_uint16,
    DataType.BFLOAT16: ctypes.c_uint16,
}
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
}


class View:
    """A bucket, one parameter's gradient within it, or a step's verdict on a GPU.

    Memory that is shared with the daemon, as a 1-d array of `count` elements of `dtype`.

    The memory stays mapped as long as the view or anything made of its buffer lives, also when
    layout and session are gone; writing then has no effect on anybody.

    On a GPU the memory is for streams alone: `__cuda_array_interface__` shows it to PyTorch
    (`torch.as_tensor`), CuPy and others.

    Attributes:
      device: UUID of the GPU that it lies on; "": host memory.
      dtype: type of the elements.
      count: elements; a bucket's include the padding between its gradients.
      bucket: index of the bucket, or of the bucket that the gradient lies in.
      nbytes: bytes.
      address: where it begins; 128-byte aligned for a bucket, 64-byte for a gradient.
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
        """Of what the library says; `mapping` keeps the memory."""
        self.device = device
        self.dtype = DataType(struct.data_type)
        self.count: int = struct.count
        self.bucket: int = struct.bucket
        self.nbytes = self.count * self.dtype.item_size
        self.address: int = struct.data or 0
        # Of a GPU's memory; that of the host is kept by the array, which whoever uses the memory
        # through the buffer protocol holds.
        self._mapping = mapping if device else None
        self._array: Optional[ctypes.Array[Any]] = None
        if not device:
            array = (_ELEMENTS[self.dtype] * self.count).from_address(self.address)
            array.gradsync_mapping = mapping
            self._array = array

    @property
    def buffer(self) -> ctypes.Array[Any]:
        """A ctypes array of the elements, writable, for what speaks Python's buffer protocol.

        As torch.frombuffer(). float16 and bfloat16 are 16-bit unsigned integers there.

        Raises:
          TypeError: the memory is a GPU's.
        """
        if self._array is None:
            raise TypeError(f"{self!r} is memory of a GPU, which the host cannot touch")
        return self._array

    @property
    def __cuda_array_interface__(self) -> dict[str, Any]:
        """A GPU's memory for other libraries; bfloat16, which it does not know, as 16-bit integers.

        Whoever uses the memory keeps the view, and so the mapping.
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

        Its dtype is the view's; bfloat16, which NumPy does not have, is uint16: the bits.

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
        """What it is, without its elements."""
        return f"<gradsync.View of {self.count} {self.dtype.name.lower()}, bucket {self.bucket}>"
