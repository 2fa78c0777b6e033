"""A figure of numbers, printed as a table."""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence
from typing import Optional

Number = Optional[float]


@dataclasses.dataclass(frozen=True)
class Series:
    """One column.

    Attributes:
      label: its heading.
      values: one for each of the figure's x; None where there is none.
      marked: index of a value to point at, such as the best one.
    """

    label: str
    values: tuple[Number, ...]
    marked: Optional[int] = None


@dataclasses.dataclass(frozen=True)
class Figure:
    """Columns of numbers over a common x.

    Attributes:
      name: short, for tests.
      title: what is shown.
      x_label: what x is.
      x: the values of x, as text.
      y_label: what the numbers are, with the unit.
      series: the columns.
      notes: sentences below the table.
      digits: after the decimal point.
    """

    name: str
    title: str
    x_label: str
    x: tuple[str, ...]
    y_label: str
    series: tuple[Series, ...]
    notes: tuple[str, ...] = ()
    digits: int = 1

    def line(self, label: str) -> Series:
        """The column with that label."""
        return next(series for series in self.series if series.label == label)

    def value(self, label: str, x: str) -> float:
        """One number, which must exist."""
        value = self.line(label).values[self.x.index(x)]
        assert value is not None
        return value


def text_table(figure: Figure) -> str:
    """The figure as text: x down, series across."""
    rows = [[figure.x_label, *(series.label for series in figure.series)]]
    for index, x in enumerate(figure.x):
        row = [x]
        for series in figure.series:
            value = series.values[index]
            text = "-" if value is None else f"{value:.{figure.digits}f}"
            row.append(text + ("*" if series.marked == index else " "))
        rows.append(row)
    lines = [figure.title, f"  {figure.y_label}"]
    lines += ["  " + line for line in _align(rows)]
    lines += [f"  {note}" for note in figure.notes]
    return "\n".join(lines)


def _align(rows: Sequence[Sequence[str]]) -> list[str]:
    """Columns of equal width: the first to the left, the others to the right."""
    widths = [max(map(len, column)) for column in zip(*rows)]
    return [
        "  ".join(
            cell.ljust(width) if column == 0 else cell.rjust(width)
            for column, (cell, width) in enumerate(zip(row, widths))
        ).rstrip()
        for row in rows
    ]
