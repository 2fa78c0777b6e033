"""Calls for GPUs on a machine without one: each error says what is missing."""

import ctypes.util
import gc
import weakref

import gradsync
import pytest
from gradsync import _handle, _structs, view
from threads import options

UUID = "GPU-b8ea3855-276c-c9cb-b366-c6fa655957c5"


@pytest.mark.parametrize(
    ("dtype", "typestr"),
    [
        (gradsync.DataType.FLOAT32, "<f4"),
        (gradsync.DataType.FLOAT64, "<f8"),
        (gradsync.DataType.FLOAT16, "<f2"),
        (gradsync.DataType.BFLOAT16, "<i2"),
    ],
)
def test_a_view_of_a_gpu_is_shown_by_the_array_interface(dtype, typestr):
    struct = _structs.ViewStruct(data=0x7F0000000080, count=6, bucket=2, data_type=dtype)
    mapping = _handle.Handle.adopt(1, lambda pointer: None)
    gone = weakref.ref(mapping)
    shown = view.View(struct, mapping, UUID)
    del mapping
    assert shown.device == UUID
    assert shown.__cuda_array_interface__ == {
        "shape": (6,),
        "typestr": typestr,
        "data": (0x7F0000000080, False),
        "strides": None,
        "version": 3,
    }
    with pytest.raises(TypeError, match="memory of a GPU"):
        _ = shown.buffer
    with pytest.raises(TypeError, match="memory of a GPU"):
        shown.numpy()
    gc.collect()
    assert gone() is not None  # the view keeps it
    del shown
    gc.collect()
    assert gone() is None


def test_calls_for_gpus_are_refused_in_host_memory(daemon):
    with gradsync.Session.join(options(daemon)) as session:
        layout = session.register_layout(parameters=[gradsync.Parameter("weight", (3,))])
        assert layout.device == ""
        assert not hasattr(layout.gradient(0), "__cuda_array_interface__")
        assert layout.device_verdict(1) is None
        for call in (
            lambda: layout.mark_ready_on_streams(1, 0, [0]),
            lambda: layout.finish_step_on_streams(1, [0]),
            lambda: layout.wait_on_stream(1, 0),
        ):
            with pytest.raises(gradsync.InvalidArgumentError, match="in host memory"):
                call()


def test_a_missing_driver_is_named(daemon):
    library = ctypes.util.find_library("cuda")
    if library is not None:
        pytest.skip("this machine has a CUDA driver")
    with gradsync.Session.join(options(daemon)) as session:
        for call in (
            lambda: gradsync.cuda_device_uuid(0),
            lambda: session.register_layout(
                parameters=[gradsync.Parameter("weight", (3,))], device=UUID
            ),
        ):
            with pytest.raises(gradsync.Error) as raised:
                call()
            # CUDA_UNAVAILABLE: a build without CUDA.
            assert raised.value.reason in (
                gradsync.Reason.CUDA_DRIVER_MISSING,
                gradsync.Reason.CUDA_UNAVAILABLE,
            )
