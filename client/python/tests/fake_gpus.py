"""A machine with GPUs for a test, made of the fakes in tests/fakes.

`FakeGpus` is the test's side. `Driver` is for processes on that machine, which have its
environment: it does what a trainer does with streams and memory besides gradsync. The CPU cannot
use device addresses of the fakes: the driver's calls write and read the memory.
"""

import ctypes
import os
import pathlib
import subprocess

_TREE = pathlib.Path(__file__).resolve().parents[3]


def _built(path):
    """Beside this program under Bazel, else in the source tree."""
    return os.path.abspath(path if os.path.exists(path) else str(_TREE / "bazel-bin" / path))


# Names the machine; processes with the same value are on the same one.
_STATE = "GRADSYNC_FAKE_CUDA"
CUDA_LIBRARY = _built("tests/fakes/cuda/libcuda.so.1")
NCCL_LIBRARY = _built("tests/fakes/nccl/libnccl.so.2")


class FakeGpus:
    """`environment` and `uuids` of the machine; close() ends it."""

    def __init__(self, count):
        show = f'echo "${_STATE}"; exec cat'
        self._process = subprocess.Popen(
            [_built("tests/fakes/fake_machine"), f"--gpus={count}", "--", "sh", "-c", show],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            text=True,
        )
        self._state = self._process.stdout.readline().strip()
        self.uuids = [f"GPU-00000000-0000-0000-0000-{number:012}" for number in range(count)]
        self.environment = {_STATE: self._state, "GRADSYNC_CUDA_LIBRARY": CUDA_LIBRARY}

    def close(self):
        """Returns the undefined behaviour that the machine has seen, in words."""
        journal = pathlib.Path(self._state, "journal")
        lines = journal.read_text().splitlines() if journal.exists() else []
        self._process.communicate("")
        return [line for line in lines if line.split()[1] == "violation"]


class Driver:
    """CUDA's driver in this process, with a context of the first GPU current on this thread."""

    def __init__(self):
        self._library = ctypes.CDLL(CUDA_LIBRARY)
        context = ctypes.c_void_p()
        self._call("cuInit", ctypes.c_uint(0))
        self._call("cuDevicePrimaryCtxRetain", ctypes.byref(context), ctypes.c_int(0))
        self._call("cuCtxSetCurrent", context)

    def stream(self):
        """A new stream. Make it while no stream waits for averages."""
        stream = ctypes.c_void_p()
        non_blocking = ctypes.c_uint(1)
        self._call("cuStreamCreateWithPriority", ctypes.byref(stream), non_blocking, 0)
        return stream.value

    def capture(self, stream):
        """Starts to capture the stream into a graph."""
        self._call("cuStreamBeginCapture_v2", ctypes.c_void_p(stream), ctypes.c_int(0))

    def end_capture(self, stream):
        """Ends the capture. Fails if a call in between has spoiled it."""
        graph = ctypes.c_void_p()
        self._call("cuStreamEndCapture", ctypes.c_void_p(stream), ctypes.byref(graph))

    def fill(self, view, value, stream):
        """Enqueues that every element of a float32 view becomes `value`."""
        bits = ctypes.c_uint.from_buffer(ctypes.c_float(value))
        address, count = _span(view)
        self._call("cuMemsetD32Async", address, bits, count, ctypes.c_void_p(stream))

    def read(self, view, stream):
        """The elements of a float32 view, after all work that is on the stream."""
        address, count = _span(view)
        values = (ctypes.c_float * count.value)()
        size = ctypes.c_size_t(ctypes.sizeof(values))
        self._call("cuMemcpyDtoHAsync_v2", values, address, size, ctypes.c_void_p(stream))
        self._call("cuStreamSynchronize", ctypes.c_void_p(stream))
        return list(values)

    def busy(self, stream):
        """Whether the stream still has work."""
        return self._library.cuStreamQuery(ctypes.c_void_p(stream)) != 0

    def _call(self, name, *arguments):
        result = getattr(self._library, name)(*arguments)
        assert result == 0, f"{name}: error {result}"


def _span(view):
    """As another library finds it."""
    interface = view.__cuda_array_interface__
    address, read_only = interface["data"]
    assert not read_only and interface["strides"] is None
    return ctypes.c_ulonglong(address), ctypes.c_size_t(interface["shape"][0])
