"""What a layout is registered with: parameters, or buckets."""

from __future__ import annotations

import ctypes
import dataclasses
import operator
from collections.abc import Sequence
from typing import Optional

from gradsync import _duration, _structs, _text, errors
from gradsync.data_type import DataType
from gradsync.reason import Reason

OPS = {"sum": 1, "average": 2, "min": 3, "max": 4}


@dataclasses.dataclass(frozen=True)
class Parameter:
    """One parameter of a model.

    Attributes:
      name: unique within the layout.
      shape: number of elements in each dimension; () for a scalar.
      dtype: type of its gradient's elements.
    """

    name: str
    shape: Sequence[int]
    dtype: DataType = DataType.FLOAT32

    def __post_init__(self) -> None:
        """Keeps the shape as a tuple."""
        object.__setattr__(self, "shape", tuple(operator.index(size) for size in self.shape))


@dataclasses.dataclass(frozen=True)
class Bucket:
    """One bucket of a layout whose buckets the trainer chooses.

    Attributes:
      count: number of elements; can be 0.
      dtype: type of the elements.
    """

    count: int
    dtype: DataType = DataType.FLOAT32


def op_number(op: str) -> int:
    """The library's number for "average", "sum", "min" or "max".

    Raises:
      InvalidArgumentError: `op` is anything else.
    """
    number = OPS.get(op)
    if number is None:
        raise _malformed(f"op is {op!r}; give 'average', 'sum', 'min' or 'max'")
    return number


def spec_struct(
    name: str,
    parameters: Sequence[Parameter],
    explicit_buckets: Sequence[Bucket],
    bucket_cap_bytes: Optional[int],
    first_bucket_cap_bytes: Optional[int],
    last_bucket_cap_bytes: Optional[int],
    op: str,
    timeout: Optional[float],
    device: Optional[str],
    buffer_bytes: int,
) -> _structs.LayoutSpecStruct:
    """The struct for register_layout() and replace_layout(); it keeps what it points to alive.

    Raises:
      InvalidArgumentError: a member is malformed; the message names it.
    """
    spec = _structs.LayoutSpecStruct(ctypes.sizeof(_structs.LayoutSpecStruct))
    spec.name = _text.encode(name, "the layout's name")
    if parameters:
        spec.parameters = _parameters(parameters)
        spec.parameter_count = len(parameters)
    if explicit_buckets:
        spec.explicit_buckets = _buckets(explicit_buckets)
        spec.explicit_bucket_count = len(explicit_buckets)
    spec.bucket_cap_bytes = _cap(bucket_cap_bytes, "bucket_cap_bytes")
    spec.first_bucket_cap_bytes = _cap(first_bucket_cap_bytes, "first_bucket_cap_bytes")
    spec.last_bucket_cap_bytes = _cap(last_bucket_cap_bytes, "last_bucket_cap_bytes")
    spec.op = op_number(op)
    if device is not None:
        spec.device = _text.encode(device, "the layout's device")
    if not 0 <= buffer_bytes < 2**64:
        raise _malformed(f"buffer_bytes is {buffer_bytes}; give bytes, from 0")
    spec.buffer_bytes = buffer_bytes
    # To the library 0 means its default. A caller's 0 becomes the shortest time-out, 1 ns.
    spec.timeout = (
        0 if timeout is None else max(1, _duration.nanoseconds(timeout, "timeout", default=0))
    )
    return spec


def _parameters(parameters: Sequence[Parameter]) -> ctypes.Array[_structs.ParameterStruct]:
    structs = (_structs.ParameterStruct * len(parameters))()
    for struct, parameter in zip(structs, parameters):
        if any(not 0 <= size < 2**64 for size in parameter.shape):
            raise _malformed(
                f"parameter {parameter.name!r} has the shape {parameter.shape}; give sizes from 0"
            )
        struct.name = _text.encode(parameter.name, "a parameter's name")
        struct.shape = (ctypes.c_uint64 * len(parameter.shape))(*parameter.shape)
        struct.dimensions = len(parameter.shape)
        struct.data_type = parameter.dtype
    return structs


def _buckets(buckets: Sequence[Bucket]) -> ctypes.Array[_structs.ExplicitBucketStruct]:
    structs = (_structs.ExplicitBucketStruct * len(buckets))()
    for struct, bucket in zip(structs, buckets):
        if not 0 <= bucket.count < 2**64:
            raise _malformed(f"a bucket has {bucket.count} elements; give a number from 0")
        struct.count = bucket.count
        struct.data_type = bucket.dtype
    return structs


def _cap(value: Optional[int], name: str) -> int:
    if value is None:
        return 0
    if not 0 < value < 2**64:
        raise _malformed(f"{name} is {value}; give bytes, at least 1, or None")
    return value


def _malformed(what: str) -> errors.InvalidArgumentError:
    return errors.InvalidArgumentError(what, reason=Reason.MALFORMED)
