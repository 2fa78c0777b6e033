"""How buckets are handed to the daemon: at once from host memory, in stream order from a GPU."""

from __future__ import annotations

from typing import Any, Sequence

import torch

import gradsync
from gradsync.torch._gradients import flat_tensor


class HostHandOff:
    """For gradients in host memory: a gradient is written when its hook runs."""

    # Further arguments of register_layout().
    layout_options: dict[str, Any] = {}
    # Whether the caller of backward() runs the pass, its hooks and its end.
    runs_on_caller = True

    def begin(self) -> None:
        """A step begins."""

    def arrived(self, bucket: int) -> None:
        """A gradient of the bucket was written."""

    def mark_ready(self, layout: gradsync.Layout, step: int, bucket: int) -> None:
        """Every gradient of the bucket was written."""
        layout.mark_ready(step, bucket)

    def finish_step(
        self, layout: gradsync.Layout, step: int, used: Sequence[bool] | None = None
    ) -> None:
        """Every gradient was written."""
        layout.finish_step(step, used)

    def wait(self, layout: gradsync.Layout, step: int) -> gradsync.StepResult:
        """Waits for the verdict; what follows sees the averages."""
        return layout.wait_step(step)


class StreamHandOff:
    """For gradients on a GPU: the kernels that write them may still be queued.

    When autograd runs a hook, the current stream is the one that writes the gradient. When it runs
    callbacks at the end of a pass, the current stream waits for all of these streams.

    Hooks and callbacks run on the device's thread, while the caller of backward() waits outside of
    Python.
    """

    runs_on_caller = False

    def __init__(self, device: torch.device) -> None:
        """Args: device: the GPU, with its number."""
        self._device = device
        self._streams: dict[int, list[int]] = {}  # for each bucket, each stream once
        uuid = gradsync.cuda_device_uuid(device.index)
        self.layout_options: dict[str, Any] = {"device": uuid}

    def begin(self) -> None:
        """A step begins."""
        self._streams.clear()

    def arrived(self, bucket: int) -> None:
        """A gradient of the bucket is written when the current stream reaches this point."""
        streams = self._streams.setdefault(bucket, [])
        stream = self._current()
        if stream not in streams:
            streams.append(stream)

    def mark_ready(self, layout: gradsync.Layout, step: int, bucket: int) -> None:
        """Every gradient of the bucket is written when its streams reach this point."""
        streams = self._streams.get(bucket) or [self._current()]
        layout.mark_ready_on_streams(step, bucket, streams)

    def finish_step(
        self, layout: gradsync.Layout, step: int, used: Sequence[bool] | None = None
    ) -> None:
        """Every gradient is written when the current stream reaches this point."""
        layout.finish_step_on_streams(step, [self._current()], used)

    def wait(self, layout: gradsync.Layout, step: int) -> gradsync.StepResult:
        """Waits for the verdict; later work on the current stream sees the averages."""
        layout.wait_on_stream(step, self._current())
        return layout.wait_step(step)

    def follow(self, layout: gradsync.Layout, step: int) -> torch.Tensor:
        """Makes later work on the current stream wait for averages and verdict, but not the host.

        Returns:
          The verdict: a float32 without dimensions on the GPU, 0 if the step is complete and 1 if
          it is void. Valid until the step after the next one begins.
        """
        layout.wait_on_stream(step, self._current())
        verdict = layout.device_verdict(step)
        assert verdict is not None
        return flat_tensor(verdict, self._device)[0]

    def _current(self) -> int:
        stream: int = torch.cuda.current_stream(self._device).cuda_stream
        return stream


def hand_off_of(device: torch.device) -> HostHandOff | StreamHandOff:
    """The hand-off for gradients on `device`, the host or a GPU."""
    return StreamHandOff(device) if device.type == "cuda" else HostHandOff()
