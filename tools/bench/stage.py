"""What a run of step.py or allreduce.py is made on: a daemon, the ranks, and their files."""

from __future__ import annotations

import contextlib
import dataclasses
import os
import tempfile
from collections.abc import Iterator
from typing import Any, Callable

from daemon_process import DaemonProcess
from rank_barrier import RankBarrier
from rank_team import RankFailed, RankTeam


@dataclasses.dataclass(frozen=True)
class Meeting:
    """How a rank meets the others.

    Attributes:
      ranks: how many there are.
      threads: that compute, in each.
      socket: of the daemon.
      store: path of a file for torch.distributed.
      barrier: path of a file for RankBarrier.
    """

    ranks: int
    threads: int
    socket: str
    store: str
    barrier: str


@dataclasses.dataclass(frozen=True)
class Stage:
    """A daemon and ranks that wait for commands."""

    daemon: DaemonProcess
    team: RankTeam

    def cpu_seconds(self) -> float:
        """Of this script and everything that it has started, so far."""
        ranks: float = sum(self.team.call("cpu_seconds"))
        return ranks + self.daemon.cpu_seconds() + sum(os.times()[:2])


@contextlib.contextmanager
def stage(
    make: Callable[..., Any],
    *,
    ranks: int,
    threads: int,
    program: str,
    reduce_threads: int,
    options: dict[str, Any],
    environment: dict[str, str],
) -> Iterator[Stage]:
    """Starts a daemon in a temporary directory, and ranks; ends both and leaves no file.

    Args:
      make: of RankTeam; gets `meeting`, a Meeting, besides `options`.
      ranks: how many.
      threads: that compute in each rank.
      program: path of gradsyncd.
      reduce_threads: of the daemon; 0: its default.
      options: for `make`.
      environment: for the ranks.

    Raises:
      DaemonFailed: the daemon did not start.
      RankFailed: a rank failed; says what it and the daemon have said last.
    """
    # Short: sockets lie in it.
    with contextlib.ExitStack() as stack:
        directory = stack.enter_context(tempfile.TemporaryDirectory(prefix="gradsync-bench-"))
        daemon = stack.enter_context(DaemonProcess(program, directory, reduce_threads))
        meeting = Meeting(
            ranks=ranks,
            threads=threads,
            socket=daemon.socket,
            store=os.path.join(directory, "store"),
            barrier=os.path.join(directory, "barrier"),
        )
        RankBarrier.create(meeting.barrier, ranks)
        everything = {
            "OMP_NUM_THREADS": str(threads),
            "WORLD_SIZE": str(ranks),
            # Importing some parts of PyTorch makes a folder of this name.
            "TORCHINDUCTOR_CACHE_DIR": os.path.join(directory, "inductor"),
            **environment,
        }
        try:
            team = stack.enter_context(
                RankTeam(
                    make,
                    ranks,
                    {"meeting": meeting, **options},
                    everything,
                    os.path.join(directory, "ranks.log"),
                )
            )
            yield Stage(daemon, team)
        except RankFailed as error:
            raise RankFailed(f"{error}\ngradsyncd says:\n{daemon.last_output()}") from None
