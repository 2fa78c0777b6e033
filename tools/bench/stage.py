"""What a run of step.py or allreduce.py is made on: daemons, the ranks, and their files."""

from __future__ import annotations

import contextlib
import dataclasses
import os
import sys
import tempfile
from collections.abc import Iterator, Sequence
from typing import Any, Callable

from daemon_process import DaemonProcess
from node_network import Node, interpreter_on
from rank_barrier import RankBarrier
from rank_team import RankFailed, RankTeam
from source_tree import find_beside


@dataclasses.dataclass(frozen=True)
class Meeting:
    """How a rank meets the others.

    Attributes:
      ranks: how many there are, node by node.
      threads: that compute, in each.
      sockets: of the nodes' daemons.
      coordinator: "host:port" of the first node's daemon for the others; "" on one node.
      store: path of a file for torch.distributed.
      barrier: path of a file for RankBarrier.
    """

    ranks: int
    threads: int
    sockets: tuple[str, ...]
    coordinator: str
    store: str
    barrier: str

    def socket_of(self, rank: int) -> str:
        """Of the daemon of that rank's node."""
        return self.sockets[rank * len(self.sockets) // self.ranks]


@dataclasses.dataclass(frozen=True)
class Stage:
    """Daemons and ranks that wait for commands."""

    daemons: Sequence[DaemonProcess]
    team: RankTeam

    def daemon_cpu_seconds(self) -> float:
        """Of all daemons so far."""
        return sum(daemon.cpu_seconds() for daemon in self.daemons)

    def cpu_seconds(self) -> float:
        """Of this script and everything that it has started, so far."""
        ranks: float = sum(self.team.call("cpu_seconds"))
        return ranks + self.daemon_cpu_seconds() + sum(os.times()[:2])


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
    nodes: Sequence[Node] = (Node(),),
) -> Iterator[Stage]:
    """Starts daemons in a temporary directory, and ranks; ends both and leaves no file.

    Args:
      make: of RankTeam; gets `meeting`, a Meeting, besides `options`.
      ranks: how many on each node.
      threads: that compute in each rank.
      program: path of gradsyncd.
      reduce_threads: of the daemon; 0: its default.
      options: for `make`.
      environment: for the ranks.
      nodes: each has a daemon.

    Raises:
      DaemonFailed: a daemon did not start.
      RankFailed: a rank failed; says what it and the daemons have said last.
    """
    # Short: sockets lie in it.
    with contextlib.ExitStack() as stack:
        directory = stack.enter_context(tempfile.TemporaryDirectory(prefix="gradsync-bench-"))
        daemons = [
            stack.enter_context(DaemonProcess(program, directory, reduce_threads, node, number))
            for number, node in enumerate(nodes)
        ]
        coordinator = ""
        if len(nodes) > 1:
            gradsyncctl = find_beside(program, "tools/gradsyncctl/gradsyncctl")
            coordinator = daemons[0].peer_address(gradsyncctl)
            # PyTorch's Gloo would look for this machine's name.
            environment = {"GLOO_SOCKET_IFNAME": nodes[0].interface, **environment}
        all_ranks = ranks * len(nodes)
        interpreters = [
            interpreter_on(node, sys.executable, directory, number)
            for number, node in enumerate(nodes)
            for _ in range(ranks)
        ]
        meeting = Meeting(
            ranks=all_ranks,
            threads=threads,
            sockets=tuple(daemon.socket for daemon in daemons),
            coordinator=coordinator,
            store=os.path.join(directory, "store"),
            barrier=os.path.join(directory, "barrier"),
        )
        RankBarrier.create(meeting.barrier, all_ranks)
        everything = {
            "OMP_NUM_THREADS": str(threads),
            "WORLD_SIZE": str(all_ranks),
            # Importing some parts of PyTorch makes a folder of this name.
            "TORCHINDUCTOR_CACHE_DIR": os.path.join(directory, "inductor"),
            **environment,
        }
        try:
            team = stack.enter_context(
                RankTeam(
                    make,
                    interpreters,
                    {"meeting": meeting, **options},
                    everything,
                    os.path.join(directory, "ranks.log"),
                )
            )
            yield Stage(daemons, team)
        except RankFailed as error:
            said = "\n".join(daemon.last_output() for daemon in daemons)
            raise RankFailed(f"{error}\ngradsyncd says:\n{said}") from None
