"""How buckets are handed to the daemon: from host memory at once, from a GPU in streams' order."""

from __future__ import annotations

from typing import Any, Sequence

import torch

import gradsync
from gradsync.torch._gradients import flat_tensor


class HostHandOff:
    """Of gradients in host memory: what is written is written."""

    # What register_layout() is told of the place.
    layout_options: dict[str, Any] = {}

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
    """Of gradients on a GPU: kernels that write them may still be queued.

    Autograd runs its hooks with the stream current on which it has written the gradient, and its
    callbacks at the end of a pass behind all of those streams.
    """

    def __init__(self, device: torch.device) -> None:
        """Args: device: the GPU, with its number."""
        self._device = device
        self._streams: dict[int, list[int]] = {}  # by bucket, without repetitions
        uuid = gradsync.cuda_device_uuid(device.index)
        self.layout_options: dict[str, Any] = {"device": uuid}

    def begin(self) -> None:
        """A step begins."""
        self._streams.clear()

    def arrived(self, bucket: int) -> None:
        """A gradient of the bucket is written where the current stream gets here."""
        streams = self._streams.setdefault(bucket, [])
        stream = self._current()
        if stream not in streams:
            streams.append(stream)

    def mark_ready(self, layout: gradsync.Layout, step: int, bucket: int) -> None:
        """Every gradient of the bucket is written where its streams get here."""
        streams = self._streams.get(bucket) or [self._current()]
        layout.mark_ready_on_streams(step, bucket, streams)

    def finish_step(
        self, layout: gradsync.Layout, step: int, used: Sequence[bool] | None = None
    ) -> None:
        """Every gradient is written where the current stream gets here."""
        layout.finish_step_on_streams(step, [self._current()], used)

    def wait(self, layout: gradsync.Layout, step: int) -> gradsync.StepResult:
        """Waits for the verdict; what follows on the current stream sees the averages."""
        layout.wait_on_stream(step, self._current())
        return layout.wait_step(step)

    def follow(self, layout: gradsync.Layout, step: int) -> torch.Tensor:
        """What follows on the current stream sees the averages and the verdict; nothing waits here.

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
    """What gradients on `device`, the host or a GPU, need."""
    return StreamHandOff(device) if device.type == "cuda" else HostHandOff()
