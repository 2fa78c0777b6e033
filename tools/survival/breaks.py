"""Breaks parts of healing on purpose: then the chain must show a difference."""

from __future__ import annotations

import contextlib
import os
import pathlib
from collections.abc import Iterator
from typing import Any, Optional

import gradsync
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
    """Breaks one part in this process, if it is a replacement.

    It works on the trainer's own objects, after the package has healed them, and on the package's
    calls: no product has a switch for this.

    Args:
      name: one of BREAKS, or None: nothing is broken.
      folder: that all processes of the training share.
      rank: this process's.
      ranks: how many there are.
    """

    def __init__(self, name: Optional[str], folder: pathlib.Path, rank: int, ranks: int) -> None:
        self._name = name
        self._folder = folder
        self._rank = rank
        self._ranks = ranks
        self._module: Any = None
        self._optimizer: Any = None
        self._first_step = 0  # of a replacement
        self._own: Optional[torch.Tensor] = None

    def watch(self, module: torch.nn.Module, optimizer: torch.optim.Optimizer) -> None:
        """Says what is trained, as long as both are new."""
        self._module, self._optimizer = module, optimizer
        self._new_buffers = {name: buffer.clone() for name, buffer in module.named_buffers()}

    def wrap(self) -> None:
        """Puts itself into the package's calls."""
        confirm_state = gradsync.Session.confirm_state
        mark_ready, wait_step = gradsync.Layout.mark_ready, gradsync.Layout.wait_step

        def confirm(session: Any, *rest: Any, **more: Any) -> None:
            confirm_state(session, *rest, **more)
            self._healed(max(layout.step for layout in session.current_layouts()))

        def mark(layout: Any, step: int, bucket: int) -> None:
            if self._name == DROPPED and step == self._first_step and bucket == 0:
                self._own = self._module.code.grad.clone()
            mark_ready(layout, step, bucket)

        def wait(layout: Any, step: int, *rest: Any) -> Any:
            result = wait_step(layout, step, *rest)
            if self._own is not None:
                self._module.code.grad += self._own / self._ranks
                self._own = None
            return result

        if self._name is not None:
            gradsync.Session.confirm_state = confirm
            gradsync.Layout.mark_ready = mark
            gradsync.Layout.wait_step = wait

    @contextlib.contextmanager
    def seeding(self) -> Iterator[None]:
        """The package seeds the generators of this rank for a step."""
        if self._name != UNSEEDED or not self._first_step:
            yield
            return
        before = torch.get_rng_state()
        yield
        torch.set_rng_state(before)

    def after_step(self, step: int) -> None:
        """A step is complete, and the optimizer has used it."""
        if self._name == LATE and self._rank == self._ranks - 1:
            path = self._folder / f"state-{step}"
            torch.save((self._module.state_dict(), self._optimizer.state_dict()), f"{path}.part")
            os.rename(f"{path}.part", path)

    def _healed(self, step: int) -> None:
        self._first_step = step
        if self._name == BUFFERS:
            for name, buffer in self._module.named_buffers():
                buffer.copy_(self._new_buffers[name])
        if self._name == LATE:
            module, optimizer = torch.load(self._folder / f"state-{step - 2}", weights_only=False)
            self._module.load_state_dict(module)
            self._optimizer.load_state_dict(optimizer)
