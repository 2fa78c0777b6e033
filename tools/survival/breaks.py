"""Parts of healing that are broken on purpose: a chain that does not show it proves nothing."""

from __future__ import annotations

import contextlib
import os
import pathlib
from collections.abc import Iterator
from typing import Optional

import torch

UNSEEDED = "unseeded"
BUFFERS = "buffers"
LATE = "late"
DROPPED = "dropped"
# What each does, for --help and the report.
BREAKS = {
    UNSEEDED: "a replacement's random generators are not seeded",
    BUFFERS: "a replacement has the buffers of a new model",
    LATE: "a replacement has the state of one step before",
    DROPPED: "a replacement adds its own gradients to an average that was there before",
}


class Break:
    """Breaks one part in this process, if it is a replacement. What is called without: nothing.

    It works on the trainer's own objects, after the package has healed them: no product has a
    switch for this.

    Args:
      name: one of BREAKS, or None.
      module: that is trained.
      optimizer: of the module.
      folder: that all processes of the training share.
      rank: this process's.
    """

    def __init__(
        self,
        name: Optional[str],
        module: torch.nn.Module,
        optimizer: torch.optim.Optimizer,
        folder: pathlib.Path,
        rank: int,
    ) -> None:
        self._name = name
        self._module = module
        self._optimizer = optimizer
        self._folder = folder
        self._rank = rank
        self._first = {n: b.clone() for n, b in module.named_buffers()}
        self._own: list[torch.Tensor] = []

    def after_step(self, step: int) -> None:
        """Every rank: a step is complete and the optimizer has used it."""
        if self._name == LATE and self._rank == 0:
            path = self._folder / f"state-{step}"
            torch.save((self._module.state_dict(), self._optimizer.state_dict()), f"{path}.part")
            os.rename(f"{path}.part", path)

    def healed(self, step: int) -> None:
        """A replacement has its state; `step` is its first."""
        if self._name == BUFFERS:
            with torch.no_grad():
                for name, buffer in self._module.named_buffers():
                    buffer.copy_(self._first[name])
        if self._name == LATE:
            module, optimizer = torch.load(self._folder / f"state-{step - 2}", weights_only=False)
            self._module.load_state_dict(module)
            self._optimizer.load_state_dict(optimizer)

    @contextlib.contextmanager
    def seeding(self) -> Iterator[None]:
        """The package sets this rank's position, in a replacement."""
        if self._name != UNSEEDED:
            yield
            return
        before = torch.get_rng_state()
        yield
        torch.set_rng_state(before)

    def marks(self, gradient: torch.Tensor) -> None:
        """A replacement is about to mark a reduced bucket, whose own gradient this is."""
        if self._name == DROPPED:
            self._own.append(gradient.clone())

    def averages(self, gradient: torch.Tensor, ranks: int) -> None:
        """The average has come into the memory of that gradient."""
        while self._own:
            gradient += self._own.pop() / ranks


