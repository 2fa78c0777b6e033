"""The types of elements that gradsync reduces."""

from __future__ import annotations

import enum


class DataType(enum.IntEnum):
    """Type of a parameter's, a gradient's or a bucket's elements."""

    FLOAT32 = 1
    FLOAT64 = 2
    FLOAT16 = 3
    BFLOAT16 = 4

    @property
    def item_size(self) -> int:
        """Bytes of one element."""
        return _ITEM_SIZES[self]


_ITEM_SIZES = {
    DataType.FLOAT32: 4,
    DataType.FLOAT64: 8,
    DataType.FLOAT16: 2,
    DataType.BFLOAT16: 2,
}
