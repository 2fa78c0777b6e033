"""The state of the model, which a survivor gives to the process that replaces a lost rank."""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping, Sequence
from typing import Any, Callable, NamedTuple, Optional

from gradsync.layout_spec import Bucket, Parameter


class StateMemory(NamedTuple):
    """Memory of one item of a state that is no Python buffer.

    Attributes:
      address: where it begins; host memory.
      nbytes: number of bytes.
      owner: an object that keeps the memory alive.
    """

    address: int
    nbytes: int
    owner: object


# Returns the items of the state, in the same order on every rank. An item is a name, and the memory
# that has the value: a contiguous buffer (a NumPy array, bytes, ...), or a StateMemory.
StateReader = Callable[[], Sequence[tuple[str, Any]]]


@dataclasses.dataclass(frozen=True)
class CurrentLayout:
    """A layout of the job, as a replacement has to register it; from Session.current_layouts().

    Attributes:
      name: this and the following ones are the arguments of Session.register_layout().
      parameters: see there; empty for a layout of explicit buckets.
      explicit_buckets: see there.
      bucket_cap_bytes: see there.
      first_bucket_cap_bytes: see there.
      last_bucket_cap_bytes: see there.
      op: see there.
      buffer_bytes: see there.
      step: the running step, or the next one if none is running.
    """

    name: str
    parameters: tuple[Parameter, ...]
    explicit_buckets: tuple[Bucket, ...]
    bucket_cap_bytes: Optional[int]
    first_bucket_cap_bytes: Optional[int]
    last_bucket_cap_bytes: Optional[int]
    op: str
    buffer_bytes: int
    step: int


@dataclasses.dataclass(frozen=True)
class StateImage:
    """The state of the model, from Session.fetch_state().

    Attributes:
      source: the rank that gave it.
      items: by name, in the order of the source. The memory belongs to this process, is aligned to
        64 bytes, and lives as long as one of the views.
    """

    source: int
    items: Mapping[str, memoryview]
