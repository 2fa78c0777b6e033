"""How parameters are cut into buckets: the rule of daemon/job/layout_plan.cc, in Python.

Parameters in reverse order of registration; a bucket for each dtype is being filled and is closed
when the next parameter would exceed its cap, padding not counted; the first bucket of each dtype
has a cap of its own. Buckets are numbered as they close, which is the order of reduction.
Source: VLDB 2020, sections 3.2.3 and 4.2.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence

MIB = 1 << 20
CAP_BYTES = 25 * MIB
FIRST_CAP_BYTES = MIB

# As in proto/gradsync/shared_memory.h.
BUCKET_ALIGNMENT = 128
PARAMETER_ALIGNMENT = 64
_PAGE = 4096

ITEM_SIZES = {"float32": 4, "float64": 8, "float16": 2, "bfloat16": 2}


@dataclasses.dataclass(frozen=True)
class Parameter:
    """What a rank registers: elements of one dtype."""

    name: str
    elements: int
    dtype: str = "float32"

    @property
    def nbytes(self) -> int:
        """Of its gradient."""
        return self.elements * ITEM_SIZES[self.dtype]


@dataclasses.dataclass(frozen=True)
class Bucket:
    """What is reduced at once.

    Attributes:
      dtype: of all its elements.
      parameters: indices, in the order in which backward finishes them.
      count: elements, with the padding between parameters.
      offset: bytes from the arena's start.
    """

    dtype: str
    parameters: tuple[int, ...]
    count: int
    offset: int

    @property
    def nbytes(self) -> int:
        """What travels."""
        return self.count * ITEM_SIZES[self.dtype]


@dataclasses.dataclass(frozen=True)
class Layout:
    """All buckets, in the order of reduction, and the bytes of one rank's arena."""

    buckets: tuple[Bucket, ...]
    arena_bytes: int


def plan(
    parameters: Sequence[Parameter],
    cap_bytes: int = CAP_BYTES,
    first_cap_bytes: int = FIRST_CAP_BYTES,
) -> Layout:
    """Cuts a model into buckets. Caps of 0 give every parameter a bucket of its own."""
    buckets = []
    end = 0
    for dtype, members in _groups(parameters, cap_bytes, first_cap_bytes):
        offset = _round_up(end, BUCKET_ALIGNMENT)
        cursor = offset
        for member in members:
            cursor = _round_up(cursor, PARAMETER_ALIGNMENT) + parameters[member].nbytes
        end = cursor
        count = (end - offset) // ITEM_SIZES[dtype]
        buckets.append(Bucket(dtype, tuple(members), count, offset))
    return Layout(tuple(buckets), max(_PAGE, _round_up(end, _PAGE)))


def _groups(
    parameters: Sequence[Parameter], cap_bytes: int, first_cap_bytes: int
) -> list[tuple[str, list[int]]]:
    filling: dict[str, list[int]] = {}
    filled_bytes: dict[str, int] = {}
    past_first: set[str] = set()
    closed = []
    for index in reversed(range(len(parameters))):
        parameter = parameters[index]
        dtype = parameter.dtype
        cap = cap_bytes if dtype in past_first else first_cap_bytes
        members = filling.setdefault(dtype, [])
        if members and filled_bytes[dtype] + parameter.nbytes > cap:
            closed.append((dtype, members))
            past_first.add(dtype)
            members = filling[dtype] = []
        if not members:
            filled_bytes[dtype] = 0
        members.append(index)
        filled_bytes[dtype] += parameter.nbytes
    # What is still open closes in the order of its first parameter.
    rest = [(dtype, members) for dtype, members in filling.items() if members]
    return closed + sorted(rest, key=lambda group: -group[1][0])


def _round_up(value: int, multiple: int) -> int:
    return -(-value // multiple) * multiple
