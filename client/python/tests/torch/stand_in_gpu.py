"""Stand-ins for a GPU: a layout on it, made of a layout in host memory; and its memory.

It does at once what a GPU does later. Where a stream would wait for the averages, it waits for the
step, writes the verdict's float and keeps the result for wait_step(). So a test sees the package's
calls, their order and step numbers, and what optimizers do with the verdict. It sees nothing of
streams. GpuMemory counts the copies between host and GPU.
"""

import collections
import contextlib
import ctypes
import types
from unittest import mock

import gradsync
import torch
from gradsync import _structs
from gradsync.torch import _autograd, _checks, _hand_off, _packed_tensors, _wrapping
from threads import on_another_thread
from torch.utils import _pytree
from torch.utils._python_dispatch import TorchDispatchMode

UUID = "GPU-b8ea3855-276c-c9cb-b366-c6fa655957c5"


class StandInLayout:
    """Two steps can be open, as on a GPU."""

    device = UUID

    def __init__(self, layout):
        self.layout = layout
        self.host_waits = []  # steps whose verdict the host has asked for
        self._ended = layout.next_step - 1
        self._verdicts = (ctypes.c_float * 2)(1, 1)
        self._results = {}  # by step: a StepResult, or the error

    def __getattr__(self, name):
        return getattr(self.layout, name)

    @property
    def next_step(self):
        return max(self._ended + 1, self.layout.next_step)

    def mark_ready_on_streams(self, step, bucket, streams):
        assert streams
        self._begin(step)
        self.layout.mark_ready(step, bucket)

    def finish_step_on_streams(self, step, streams, used=None):
        assert streams
        self._begin(step)
        self.layout.finish_step(step, used)
        self._ended = step

    def wait_on_stream(self, step, stream):
        try:
            self._results[step] = self.layout.wait_step(step)
            self._verdicts[step % 2] = 0
        except gradsync.Error as error:
            self._results[step] = error

    def device_verdict(self, step):
        address = ctypes.addressof(self._verdicts) + step % 2 * ctypes.sizeof(ctypes.c_float)
        struct = _structs.ViewStruct(address, 1, 0, gradsync.DataType.FLOAT32)
        return gradsync.View(struct, self._verdicts)

    def wait_step(self, step):
        self.host_waits.append(step)
        if step not in self._results:
            return self.layout.wait_step(step)
        if isinstance(self._results[step], gradsync.Error):
            raise self._results[step]
        return self._results[step]

    def _begin(self, step):
        known = set(self.host_waits)
        undecided = [s for s in self._results if s < step and s not in known]
        assert len(undecided) <= 1, f"step {step} begins, and {undecided} were not waited for"
        self._verdicts[step % 2] = 1


class _Streams(_hand_off.StreamHandOff):
    def __init__(self, device):
        self._device = device
        self._streams = {}
        self.layout_options = {"device": UUID}

    def _current(self):
        return 1


@contextlib.contextmanager
def stand_in_gpu():
    """In this context, modules in host memory are wrapped as if they were on a GPU."""
    register, replace = gradsync.Session.register_layout, gradsync.Session.replace_layout

    def registered(session, name, *, device, **options):
        assert device == UUID
        return StandInLayout(register(session, name, **options))

    def replaced(session, layout, name, *, device, **options):
        assert device == UUID
        return StandInLayout(replace(session, layout.layout, name, **options))

    cuda = types.SimpleNamespace(type="cuda")
    check = _checks.check_device_verdict
    with contextlib.ExitStack() as stack:
        for target, name, value in (
            (gradsync.Session, "register_layout", registered),
            (gradsync.Session, "replace_layout", replaced),
            (_wrapping, "hand_off_of", _Streams),
            (_checks, "check_device_verdict", lambda device, buffers: check(cuda, buffers)),
        ):
            stack.enter_context(mock.patch.object(target, name, value))
        yield


def layout_of(model):
    return model._synchronizer.buckets.layout


def is_on_device(model):
    """Whether the last step's verdict was left on the device."""
    return model._synchronizer.outcomes.followed is not None


@contextlib.contextmanager
def device_thread():
    """In this context another thread ends backward passes, and their caller waits as on a GPU."""
    queue_callback, backward_id = _autograd.at_end_of_backward, _autograd.backward_id
    ending = []  # the calls that are left, and the pass's number, while the thread runs

    def at_end_of_backward(call):
        if ending:
            ending[0].append(call)
        else:
            number = backward_id()
            queue_callback(lambda: end(call, number))

    def end(call, number):
        calls = collections.deque([call])
        ending[:] = [calls, number]

        def run():
            while calls:
                calls.popleft()()

        try:
            on_another_thread(run)
        finally:
            ending.clear()

    with (
        mock.patch.object(_autograd, "at_end_of_backward", at_end_of_backward),
        mock.patch.object(_autograd, "backward_id", lambda: ending[1] if ending else backward_id()),
    ):
        yield


class GpuMemory(TorchDispatchMode):
    """In this context `tensors`, and what is made of them alone, count as memory of a GPU.

    Attributes:
      crossings: the operations so far between that memory and the host's, each of which would make
        the host wait for the GPU.
    """

    def __init__(self, *tensors):
        super().__init__()
        self.crossings = []
        self._held = {}  # the storages by their address, which so is not used again
        for tensor in tensors:
            self._hold(tensor)

    def _hold(self, tensor):
        storage = tensor.untyped_storage()
        self._held[storage.data_ptr()] = storage

    def _holds(self, tensor):
        return tensor.untyped_storage().data_ptr() in self._held

    def __enter__(self):
        self._patch = mock.patch.object(
            _packed_tensors, "is_on_host", lambda tensor: not self._holds(tensor)
        )
        self._patch.start()
        return super().__enter__()

    def __exit__(self, *error):
        self._patch.stop()
        return super().__exit__(*error)

    def __torch_dispatch__(self, function, types, args=(), kwargs=None):
        result = function(*args, **(kwargs or {}))
        if all(isinstance(argument, (list, tuple)) for argument in args[:2]) and len(args) > 1:
            calls = [list(pair) for pair in zip(*args[:2])]  # a call for many tensors
        else:
            calls = [[x for x in _pytree.tree_leaves((args, kwargs)) if torch.is_tensor(x)]]
        made = [x for x in _pytree.tree_leaves(result) if torch.is_tensor(x)]
        for tensors in calls:
            held = [self._holds(tensor) for tensor in tensors]
            # A number that is read of the GPU crosses, too.
            if any(held) and (not all(held) or (result is not None and not made)):
                self.crossings.append(str(function))
            elif any(held):
                for tensor in made:
                    self._hold(tensor)
        return result
