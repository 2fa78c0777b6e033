"""A module's parameters and buffers, made the same on every rank."""

from __future__ import annotations

from typing import Collection, Sequence

import torch

import gradsync
from gradsync.torch import _session
from gradsync.torch._agreement import check_agreement, describe
from gradsync.torch._broadcast import broadcast_tensors


class ModuleState:
    """Makes the parameters and buffers of one wrapped module the same on every rank.

    Args:
      module: the module.
      ignored: names of parameters and buffers that stay out.
      session: the session.
      name: name of the module's layout, for errors.

    Attributes:
      module: as given.
    """

    def __init__(
        self,
        module: torch.nn.Module,
        ignored: Collection[str],
        session: gradsync.Session,
        name: str,
    ) -> None:
        self.module = module
        self._ignored = ignored
        self._session = session
        self._name = name
        self._timeout = session.options.step_timeout

    def agree(
        self,
        options: Sequence[str],
        trainable: Collection[str],
        root: int,
        timeout: float | None,
        buffers: bool,
    ) -> None:
        """Checks that every rank has the same module, and gives all ranks the state of `root`.

        Args:
          options: a line for each option that must be the same on every rank.
          trainable: names of the parameters that are synchronized.
          root: the rank whose state counts; the same on every rank.
          timeout: seconds to wait for the other ranks; None: 30 min.
          buffers: whether the state has the buffers.

        Raises:
          ValueError: the modules differ; every rank gets the first difference and both ranks.
          gradsync.Error: a rank was lost or did not come.
        """
        entries = self._entries(buffers)
        lines = [f"the name '{self._name}'", *options]
        lines += [
            describe(kind, name, tensor)
            + (", frozen" if kind == "parameter" and name not in trainable else "")
            for kind, name, tensor in entries
        ]
        with _session.noting(self._session):
            check_agreement(self._session, lines, timeout)
        self.broadcast([tensor for _, _, tensor in entries], root, "the state", timeout)

    def broadcast_all(self, root: int, what: str, buffers: bool) -> None:
        """Overwrites the parameters with the root's, and the buffers, too, if `buffers`.

        `what` names them in errors.
        """
        self.broadcast([tensor for _, _, tensor in self._entries(buffers)], root, what)

    def buffers(self) -> dict[str, torch.Tensor]:
        """The buffers that all ranks have, by name."""
        return {n: b for n, b in self.module.named_buffers() if n not in self._ignored}

    def broadcast_buffers(self) -> None:
        """Overwrites the buffers with those of the lowest live rank."""
        buffers = list(self.buffers().values())
        if buffers:
            self.broadcast(buffers, gradsync.LOWEST_LIVE_RANK, "the buffers")

    def broadcast(
        self,
        tensors: Sequence[torch.Tensor],
        root: int,
        what: str,
        timeout: float | None = None,
    ) -> None:
        """Overwrites `tensors` with the root's. `timeout` is in seconds; None: step_timeout."""
        if timeout is None:
            timeout = self._timeout
        with _session.noting(self._session):
            broadcast_tensors(self._session, tensors, root, f"{what} of '{self._name}'", timeout)

    def _entries(self, buffers: bool) -> list[tuple[str, str, torch.Tensor]]:
        """(kind, name, tensor) of parameters that all ranks have; if `buffers`, of buffers, too."""
        entries = [("parameter", name, p.detach()) for name, p in self.module.named_parameters()]
        if buffers:
            entries += [("buffer", name, b) for name, b in self.module.named_buffers()]
        return [entry for entry in entries if entry[1] not in self._ignored]
