"""Reads the library's list of a job's current layouts."""

from __future__ import annotations

import ctypes

from gradsync import _handle, _structs
from gradsync._library import library, raise_error
from gradsync.data_type import DataType
from gradsync.layout_spec import OPS, Bucket, Parameter
from gradsync.state import CurrentLayout


def read(handle: _handle.SessionHandle) -> list[CurrentLayout]:
    """The layouts that a replacement registers; [] if this session is no replacement."""
    pointer = ctypes.c_void_p()
    if error := library.get_current_layouts(handle, pointer):
        raise_error(error)
    assert pointer.value is not None
    layouts = _handle.Handle.adopt(pointer.value, library.current_layouts_destroy)
    return [_layout(layouts, index) for index in range(library.current_layouts_count(layouts))]


def _layout(layouts: _handle.Handle, index: int) -> CurrentLayout:
    spec = _structs.LayoutSpecStruct(ctypes.sizeof(_structs.LayoutSpecStruct))
    step = ctypes.c_uint64()
    if error := library.current_layouts_get(layouts, index, spec, step):
        raise_error(error)
    parameters = tuple(
        Parameter(
            struct.name.decode(),
            struct.shape[: struct.dimensions],
            DataType(struct.data_type),
        )
        for struct in spec.parameters[: spec.parameter_count]
    )
    buckets = tuple(
        Bucket(struct.count, DataType(struct.data_type))
        for struct in spec.explicit_buckets[: spec.explicit_bucket_count]
    )
    return CurrentLayout(
        name=spec.name.decode(),
        parameters=parameters,
        explicit_buckets=buckets,
        bucket_cap_bytes=spec.bucket_cap_bytes or None,
        first_bucket_cap_bytes=spec.first_bucket_cap_bytes or None,
        last_bucket_cap_bytes=spec.last_bucket_cap_bytes or None,
        op=next(name for name, number in OPS.items() if number == spec.op),
        buffer_bytes=spec.buffer_bytes,
        step=step.value,
    )
