"""The buffers of a module, such as BatchNorm's, in a bucket of the module's layout."""

from __future__ import annotations

from typing import Sequence

import torch

import gradsync
from gradsync.torch._gradients import flat_tensor
from gradsync.torch._packed_tensors import PackedTensors, packed_size


class BufferBucket:
    """Brings rank 0's buffers to every rank with the step's gradients.

    Rank 0 writes its buffers, every other rank zeros, and the daemon adds. Used on the thread of a
    backward pass: `(write take?)*`.

    Args:
      nbytes: of all buffers, with their padding.
    """

    def __init__(self, nbytes: int) -> None:
        self.nbytes = nbytes
        self._own = torch.zeros(nbytes, dtype=torch.uint8)
        self._packed: PackedTensors | None = None

    def write(self, layout: gradsync.Layout, rank: int, buffers: Sequence[torch.Tensor]) -> None:
        """The forward passes of a step have ended; call it before the step's end.

        Raises:
          RuntimeError: the module has other buffers than when it was wrapped.
        """
        if sum(map(packed_size, buffers)) != self.nbytes:
            raise RuntimeError(
                "gradsync: the module's buffers have another size than when it was wrapped; with "
                "on_rank_loss='hold' they must keep their shapes"
            )
        self._packed = PackedTensors(buffers, self._own)
        self._packed.pack()
        memory = self._memory(layout)
        if rank == 0:
            memory.copy_(self._own)
        else:
            memory.zero_()

    def take(self, layout: gradsync.Layout) -> None:
        """The step is complete: this rank's buffers become rank 0's."""
        if self._packed is not None:
            self._own.copy_(self._memory(layout))
            self._packed.unpack()
            self._packed = None

    def _memory(self, layout: gradsync.Layout) -> torch.Tensor:
        view = layout.buffers
        assert view is not None, "the layout has buffer_bytes"
        return flat_tensor(view, torch.device("cpu"))[: self.nbytes]


def nbytes_of(buffers: Sequence[torch.Tensor]) -> int:
    """Bytes that the buffers take in a bucket."""
    return sum(map(packed_size, buffers))
