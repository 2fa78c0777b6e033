"""Training for ranks with different numbers of steps."""

from __future__ import annotations

import contextlib
from typing import TYPE_CHECKING, Iterator, Sequence

from gradsync.torch import _session

if TYPE_CHECKING:
    from gradsync.torch.distributed import DistributedDataParallel


@contextlib.contextmanager
def join(
    modules: Sequence[DistributedDataParallel],
    divide_by_initial_world_size: bool | None = None,
    enable: bool = True,
    timeout: float | None = None,
) -> Iterator[None]:
    """`DistributedDataParallel.join` for several wrapped modules of one session.

    Args:
      modules: all that are trained in the context, in the same order on every rank.
      divide_by_initial_world_size: see there.
      enable: see there.
      timeout: see there.

    Raises:
      ValueError: no modules, several sessions, or a divisor that is not the session's.
      gradsync.Error: as there.
    """
    if not enable:
        yield
        return
    if not modules:
        raise ValueError("gradsync: join() of no module")
    synchronizers = [module._in_job() for module in modules]
    session = synchronizers[0].session
    if any(synchronizer.session is not session for synchronizer in synchronizers):
        raise ValueError("gradsync: join() of modules of several sessions")
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
        synchronizer.abandon_stale("its backward pass did not finish")
        synchronizer.settle()
    with _session.noting(session):
        last = session.leave_and_stay(timeout)
    for synchronizer in synchronizers:
        synchronizer.come_back(last)
