"""How parameters are cut into buckets: the rule of daemon/job/layout_plan.cc for one dtype.

Parameters fill buckets in reverse order of registration. A bucket closes when the next parameter
would exceed its cap, padding not counted; the first bucket has a cap of its own. Buckets are
numbered as they close, which is the order of reduction. Source: VLDB 2020, sections 3.2.3 and 4.2.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence

MIB = 1 << 20
CAP_BYTES = 25 * MIB
FIRST_CAP_BYTES = MIB
# A bucket size is good if its step takes at most so many times the best one's.
NEAR = 1.02

# As in proto/gradsync/shared_memory.h.
PARAMETER_ALIGNMENT = 64


@dataclasses.dataclass(frozen=True)
class Bucket:
    """Parameters that are reduced together.

    Attributes:
      parameters: indices, in the order in which backward finishes them.
      nbytes: what is reduced, with the padding between parameters.
    """

    parameters: tuple[int, ...]
    nbytes: int


def plan(
    sizes: Sequence[int], cap_bytes: int = CAP_BYTES, first_cap_bytes: int = FIRST_CAP_BYTES
) -> list[Bucket]:
    """Cuts parameters of `sizes` bytes into buckets, in the order of reduction.

    Caps of 0 give every parameter a bucket of its own.
    """
    buckets: list[Bucket] = []
    members: list[int] = []
    for index in reversed(range(len(sizes))):
        cap = cap_bytes if buckets else first_cap_bytes
        if members and sum(sizes[member] for member in members) + sizes[index] > cap:
            buckets.append(_bucket(members, sizes))
            members = []
        members.append(index)
    if members:
        buckets.append(_bucket(members, sizes))
    return buckets


def _bucket(members: Sequence[int], sizes: Sequence[int]) -> Bucket:
    end = 0
    for member in members:
        end = -(-end // PARAMETER_ALIGNMENT) * PARAMETER_ALIGNMENT + sizes[member]
    return Bucket(tuple(members), end)
