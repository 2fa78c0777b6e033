"""A module's parameters and buffers, made the same on every rank."""

from __future__ import annotations

import hashlib
import json
from typing import Collection, Iterable, Sequence

import torch

import gradsync
from gradsync.torch import _session

# Tensors are packed into groups of this many bytes, so that a model of many small ones costs few
# operations.
_GROUP_BYTES = 32 << 20
# Before each tensor: enough for every dtype.
_ALIGNMENT = 16
_MESSAGE_BYTES = 1024


class ModuleState:
    """The parameters and buffers of one wrapped module, which every rank shall have alike.

    Args:
      module: it.
      ignored: names that stay out.
      session: in which.
      name: of its layout, in errors.
    """

    def __init__(
        self,
        module: torch.nn.Module,
        ignored: Collection[str],
        session: gradsync.Session,
        name: str,
    ) -> None:
        self._module = module
        self._ignored = ignored
        self._session = session
        self._name = name
        self._timeout = session.options.step_timeout

    def agree(
        self, options: Sequence[str], trainable: Collection[str], timeout: float | None
    ) -> None:
        """Checks that every rank has the same module, and gives all of them rank 0's.

        Args:
          options: a line for each choice that must be the same.
          trainable: names of parameters that are synchronized.
          timeout: seconds to wait for the other ranks; None: 30 min.

        Raises:
          ValueError: on every rank, names the first difference and both ranks.
          gradsync.Error: a rank was lost or did not come.
        """
        entries = self._entries()
        lines = [f"the name '{self._name}'", *options]
        lines += [
            describe(kind, name, tensor)
            + (", frozen" if kind == "parameter" and name not in trainable else "")
            for kind, name, tensor in entries
        ]
        with _session.noting(self._session):
            verify(self._session, lines, timeout)
        self.broadcast([tensor for _, _, tensor in entries], 0, "the state", timeout)

    def broadcast_all(self, root: int, what: str) -> None:
        """Overwrites everything with the root's; `what` it is, for errors."""
        self.broadcast([tensor for _, _, tensor in self._entries()], root, what)

    def broadcast_buffers(self) -> None:
        """Overwrites the buffers with those of the lowest live rank."""
        buffers = [b for name, b in self._module.named_buffers() if name not in self._ignored]
        if buffers:
            self.broadcast(buffers, gradsync.LOWEST_LIVE_RANK, "the buffers")

    def broadcast(
        self,
        tensors: Sequence[torch.Tensor],
        root: int,
        what: str,
        timeout: float | None = None,
    ) -> None:
        """Overwrites `tensors` with the root's; `timeout` is in seconds, None: a step's."""
        if timeout is None:
            timeout = self._timeout
        with _session.noting(self._session):
            broadcast_tensors(self._session, tensors, root, f"{what} of '{self._name}'", timeout)

    def _entries(self) -> list[tuple[str, str, torch.Tensor]]:
        """(kind, name, tensor) of all that ranks must have in common."""
        entries = [("parameter", name, p.detach()) for name, p in self._module.named_parameters()]
        entries += [("buffer", name, b) for name, b in self._module.named_buffers()]
        return [entry for entry in entries if entry[1] not in self._ignored]


def verify(session: gradsync.Session, description: Sequence[str], timeout: float | None) -> None:
    """Checks that every rank describes its module alike.

    Args:
      session: all of its ranks call this.
      description: a line for each parameter and buffer.
      timeout: seconds to wait for the other ranks; None: 30 min.

    Raises:
      ValueError: on every rank, names the first difference and both ranks.
    """
    mine = json.dumps(list(description)).encode()
    length = bytearray(len(mine).to_bytes(8, "little"))
    session.broadcast(length, 0, timeout)
    text = bytearray(int.from_bytes(length, "little"))
    text[: len(mine)] = mine[: len(text)]
    session.broadcast(text, 0, timeout)
    differs = torch.zeros(session.world_size)
    message = bytearray(_MESSAGE_BYTES)
    if bytes(text) != mine:
        differs[session.rank] = 1
        difference = _difference(json.loads(text), description, session.rank).encode()
        message[: len(difference)] = difference[:_MESSAGE_BYTES]
    session.all_reduce_address(
        differs.data_ptr(), differs.numel(), gradsync.DataType.FLOAT32, "sum", timeout
    )
    ranks = differs.nonzero().flatten().tolist()
    if not ranks:
        return
    session.broadcast(message, ranks[0], timeout)
    raise ValueError(message.rstrip(b"\0").decode(errors="replace"))


def _difference(theirs: Sequence[str], mine: Sequence[str], rank: int) -> str:
    advice = "Build the same model, in the same order, on every rank."
    for a, b in zip(theirs, mine):
        if a != b:
            return (
                f"gradsync: the modules differ: rank 0 has {a}, but rank {rank} has {b}. {advice}"
            )
    longer, first_extra = (
        (0, theirs[len(mine)]) if len(theirs) > len(mine) else (rank, mine[len(theirs)])
    )
    return (
        f"gradsync: the modules differ: rank {longer} has {first_extra}, which rank "
        f"{rank - longer} does not have. {advice}"
    )


def describe(kind: str, name: str, tensor: torch.Tensor) -> str:
    """A line for `verify`: `parameter 'fc.weight' of shape [2, 3], float32`."""
    dtype = str(tensor.dtype).replace("torch.", "")
    # Gradients are added as they lie in memory.
    strides = "" if tensor.is_contiguous() else f", strides {list(tensor.stride())}"
    return f"{kind} '{name}' of shape {list(tensor.size())}{strides}, {dtype}"


def broadcast_tensors(
    session: gradsync.Session,
    tensors: Iterable[torch.Tensor],
    root: int,
    tag: str,
    timeout: float | None,
) -> None:
    """Overwrites `tensors` with the root's.

    Args:
      session: every live rank calls this with tensors of the same shapes and dtypes.
      tensors: dense, of any dtype, anywhere; they travel through host memory.
      root: a rank, or `gradsync.LOWEST_LIVE_RANK`.
      tag: what this is; ranks that broadcast different things are told so.
      timeout: seconds to wait for the other ranks; None: 30 min.

    Raises:
      RuntimeError: the root broadcasts something else than this rank.
    """
    mark = hashlib.sha256(tag.encode()).digest()[:_ALIGNMENT]
    group: list[torch.Tensor] = []
    size = _ALIGNMENT
    for tensor in tensors:
        nbytes = _padded(tensor)
        if group and size + nbytes > _GROUP_BYTES:
            _broadcast_group(session, group, size, root, mark, tag, timeout)
            group, size = [], _ALIGNMENT
        group.append(tensor)
        size += nbytes
    if group:
        _broadcast_group(session, group, size, root, mark, tag, timeout)


def _padded(tensor: torch.Tensor) -> int:
    return -(-tensor.numel() * tensor.element_size() // _ALIGNMENT) * _ALIGNMENT


def _broadcast_group(
    session: gradsync.Session,
    tensors: Sequence[torch.Tensor],
    size: int,
    root: int,
    mark: bytes,
    tag: str,
    timeout: float | None,
) -> None:
    with torch.no_grad():
        packed = torch.empty(size, dtype=torch.uint8)
        packed[:_ALIGNMENT] = torch.frombuffer(bytearray(mark), dtype=torch.uint8)
        spans = []
        offset = _ALIGNMENT
        for tensor in tensors:
            nbytes = tensor.numel() * tensor.element_size()
            span = packed[offset : offset + nbytes].view(tensor.dtype).view(tensor.size())
            span.copy_(tensor)
            spans.append(span)
            offset += _padded(tensor)
        session.broadcast_address(packed.data_ptr(), size, root, timeout, owner=packed)
        if bytes(packed[:_ALIGNMENT].tolist()) != mark:
            raise RuntimeError(
                f"gradsync: rank {session.rank} synchronizes {tag}, but another rank something "
                "else at the same time; run the wrapped modules in the same order on every rank"
            )
        for tensor, span in zip(tensors, spans):
            # Another graph may have saved a buffer that never changes for its backward pass.
            if not _same_bits(tensor.cpu(), span):
                tensor.copy_(span)


def _same_bits(a: torch.Tensor, b: torch.Tensor) -> bool:
    a, b = (tensor.reshape(-1).contiguous().view(torch.uint8) for tensor in (a, b))
    return torch.equal(a, b)
