"""What stands in the place of the reducer of PyTorch's wrapper."""

from __future__ import annotations

from typing import Any, NoReturn, Sequence

import torch

from gradsync.torch._synchronizer import Synchronizer


class NoReducer:
    """Takes the calls that libraries make around a backward pass; refuses all others by name.

    Lightning makes them in its manual optimization. The wrapper prepares each pass by itself.

    Args:
      synchronizer: the module's; None in a copy that is in no job.
    """

    def __init__(self, synchronizer: Synchronizer | None) -> None:
        self._synchronizer = synchronizer

    def prepare_for_forward(self) -> None:
        """A forward pass begins: nothing to do."""

    def prepare_for_backward(self, outputs: Sequence[torch.Tensor]) -> None:
        """A backward pass that synchronizes begins; the last forward pass must have said so.

        Raises:
          RuntimeError: it ran under no_sync().
        """
        if self._synchronizer is not None and not self._synchronizer.last_forward_synchronizes:
            raise RuntimeError(
                "gradsync: reducer.prepare_for_backward() was called after a forward pass under "
                "no_sync(), whose gradients stay local; run the forward pass of the last "
                "micro-batch outside of no_sync()"
            )

    def _rebuild_buckets(self) -> bool:
        """Buckets change at the end of a step, not here."""
        return False

    def __getattr__(self, name: str) -> NoReturn:
        raise AttributeError(
            f"gradsync: there is no reducer.{name}, because gradsyncd averages the gradients and "
            "PyTorch's reducer is not built; if you need it, use "
            "torch.nn.parallel.DistributedDataParallel with gradsync.torch.allreduce_hook"
        )


def refused(name: str, remedy: str) -> Any:
    """A method that only PyTorch's wrapper has; `remedy` says what to do instead."""

    def method(self: Any, *args: Any, **kwargs: Any) -> NoReturn:
        raise NotImplementedError(f"gradsync: this wrapper has no {name}(): {remedy}")

    method.__name__ = method.__qualname__ = name
    method.__doc__ = f"Raises: NotImplementedError: {remedy}."
    return method
