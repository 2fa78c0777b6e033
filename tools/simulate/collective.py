"""What a collective costs: a ring over ranks, latency and bandwidth.

An all-reduce of S bytes over a ring of n members takes 2(n-1) turns; in each, every member sends
S/n bytes to the next one:

  time = base + turns that stay on a node * hop_within + turns that wait for a link * hop_between
         + 2(n-1)/n * S / bandwidth

The bandwidth is that of the slowest hop. All members move in step, and a node's link carries one
stream in each direction.
"""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Sequence


@dataclasses.dataclass(frozen=True)
class Protocol:
    """How a library sends: NCCL takes the one that it expects to be faster.

    Attributes:
      base: seconds of a collective of any size.
      hop_within: seconds of a turn between two ranks of a node.
      hop_between: seconds of a turn between two nodes.
      share: the part of the bandwidth that carries data.
    """

    base: float
    hop_within: float
    hop_between: float
    share: float = 1.0


@dataclasses.dataclass(frozen=True)
class Ring:
    """The paths of a ring.

    Attributes:
      protocols: to choose from.
      within: bytes per second from a rank to the next one on its node.
      between: bytes per second that one stream between nodes reaches on an idle link.
      link: bytes per second of payload that a node's link carries in each direction.
    """

    protocols: tuple[Protocol, ...]
    within: float
    between: float
    link: float


@dataclasses.dataclass(frozen=True)
class Cost:
    """The cost of one collective.

    Attributes:
      latency: seconds in which no data moves.
      transfer: seconds in which the links are busy.
      link_bytes: bytes that each node sends to another node.
      total_bytes: bytes that all members send, also within a node.
    """

    latency: float
    transfer: float
    link_bytes: float
    total_bytes: float

    @property
    def seconds(self) -> float:
        """How long it takes while no other collective runs."""
        return self.latency + self.transfer


def ring_all_reduce(nbytes: float, ranks_of_node: Sequence[int], ring: Ring) -> Cost:
    """A ring through all ranks, node by node.

    Args:
      nbytes: size of the buffer that every rank has.
      ranks_of_node: how many members each node has.
      ring: the paths.
    """
    members = sum(ranks_of_node)
    nodes = len(ranks_of_node)
    if members < 2:
        return Cost(0.0, 0.0, 0.0, 0.0)
    turns = 2 * (members - 1)
    streams = 1 if nodes > 1 else 0
    # A message meets a link once a node and round, and the ring goes around twice (NCCL's tuning
    # counts 2 * nodes, too).
    between = min(turns, 2 * nodes * streams)
    sent = turns / members * nbytes
    rate = math.inf
    if streams:
        rate = min(ring.between, ring.link)
    if turns > between:
        rate = min(rate, ring.within)

    def cost(protocol: Protocol) -> Cost:
        latency = protocol.base + between * protocol.hop_between
        latency += (turns - between) * protocol.hop_within
        return Cost(latency, sent / (rate * protocol.share), streams * sent, sent * members)

    return min((cost(protocol) for protocol in ring.protocols), key=lambda each: each.seconds)
