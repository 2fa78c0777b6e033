"""Uneven inputs: ranks with different numbers of steps."""

from __future__ import annotations

import contextlib
from typing import Iterator, Sequence

from gradsync.torch import _session
from gradsync.torch._synchronizer import Synchronizer


@contextlib.contextmanager
def uneven_inputs(
    synchronizers: Sequence[Synchronizer],
    divide_by_initial_world_size: bool | None,
    timeout: float | None,
) -> Iterator[None]:
    """`gradsync.torch.join` for the synchronizers of its modules; see there."""
    if not synchronizers:
        raise ValueError("gradsync: join() got no module; pass every module that is trained")
    session = synchronizers[0].session
    if any(synchronizer.session is not session for synchronizer in synchronizers):
        raise ValueError(
            "gradsync: join() got modules of several sessions; use one join() for each session"
        )
    by_world = session.options.divisor == "world"
    if divide_by_initial_world_size not in (None, by_world):
        raise ValueError(
            "gradsync: this session divides by "
            f"{'the world size' if by_world else 'the live ranks'}; join it with "
            f"gradsync.torch.init(divisor='{'live_ranks' if by_world else 'world'}') on every "
            "rank, before the first module is wrapped"
        )
    yield
    for synchronizer in synchronizers:
        synchronizer.outcomes.abandon_stale("its backward pass did not finish")
        synchronizer.outcomes.settle()
    with _session.noting(session):
        last = session.leave_and_stay(timeout)
    for synchronizer in synchronizers:
        synchronizer.outcomes.come_back(last)
