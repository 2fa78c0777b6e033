"""The order in which buckets of a GPU are handed over, recorded by a stand-in for a layout."""

import types

import gradsync
import pytest
import torch
from gradsync import _structs
from gradsync.torch import _gradients, _hand_off


class Listener:
    """Stands in for a layout on a GPU."""

    def __init__(self):
        self.calls = []

    def __getattr__(self, name):
        def call(*arguments):
            self.calls.append((name, *arguments))
            return name, *arguments

        return call


@pytest.fixture
def current(monkeypatch):
    """The current stream's handle, which tests change."""
    stream = types.SimpleNamespace(cuda_stream=1)
    monkeypatch.setattr(torch.cuda, "current_stream", lambda device: stream)
    monkeypatch.setattr(gradsync, "cuda_device_uuid", lambda ordinal: f"GPU-{ordinal}")
    return stream


def test_a_bucket_is_ready_behind_every_stream_that_wrote_to_it(current):
    hand_off = _hand_off.hand_off_of(torch.device("cuda", 3))
    assert hand_off.layout_options == {"device": "GPU-3"}
    layout = Listener()
    for step in (1, 2):
        hand_off.begin()
        for stream, bucket in ((1, 0), (2, 0), (2, 1), (1, 0)):
            current.cuda_stream = stream
            hand_off.arrived(bucket)
        hand_off.mark_ready(layout, step, 0)
        hand_off.mark_ready(layout, step, 1)
        current.cuda_stream = 5
        hand_off.finish_step(layout, step, [True, False])
        hand_off.wait(layout, step)
    expected = []
    for step in (1, 2):
        expected += [
            ("mark_ready_on_streams", step, 0, [1, 2]),
            ("mark_ready_on_streams", step, 1, [2]),
            ("finish_step_on_streams", step, [5], [True, False]),
            ("wait_on_stream", step, 5),  # the optimizer is enqueued after this
            ("wait_step", step),
        ]
    assert layout.calls == expected


def test_later_work_on_the_stream_sees_the_verdict(current, monkeypatch):
    hand_off = _hand_off.hand_off_of(torch.device("cuda", 3))
    monkeypatch.setattr(_hand_off, "flat_tensor", lambda view, device: torch.tensor([view[1]]))
    layout = Listener()
    current.cuda_stream = 7
    verdict = hand_off.follow(layout, 4)
    # No wait_step(): the host does not wait.
    assert layout.calls == [("wait_on_stream", 4, 7), ("device_verdict", 4)]
    assert verdict.dim() == 0 and verdict == 4


def test_memory_of_another_gpu_is_no_view(monkeypatch):
    """PyTorch would silently copy it to the requested GPU."""
    struct = _structs.ViewStruct(data=0x7F0000000080, count=6, bucket=0, data_type=1)
    view = gradsync.View(struct, None, "GPU-3")
    monkeypatch.setattr(torch, "as_tensor", lambda view, device: torch.zeros(view.count))
    with pytest.raises(RuntimeError, match="GPU-3, which is not cuda:1"):
        _gradients.flat_tensor(view, torch.device("cuda", 1))


def test_host_memory_needs_no_streams():
    hand_off = _hand_off.hand_off_of(torch.device("cpu"))
    assert hand_off.layout_options == {}
    layout = Listener()
    hand_off.begin()
    hand_off.arrived(0)
    hand_off.mark_ready(layout, 1, 0)
    hand_off.finish_step(layout, 1)
    hand_off.wait(layout, 1)
    assert layout.calls == [("mark_ready", 1, 0), ("finish_step", 1, None), ("wait_step", 1)]
