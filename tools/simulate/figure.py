"""A figure of numbers: what is drawn, printed and written as JSON."""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence
from typing import Any, Optional

Number = Optional[float]


@dataclasses.dataclass(frozen=True)
class Series:
    """One line.

    Attributes:
      label: of the line; lines of one group have it in common up to the last comma.
      values: one for each of the figure's x; None where there is none.
      marked: index of a value to point at, such as the best one.
    """

    label: str
    values: tuple[Number, ...]
    marked: Optional[int] = None


@dataclasses.dataclass(frozen=True)
class Figure:
    """Lines over common x, and what the numbers are.

    Attributes:
      name: short, for JSON and tests.
      title: says what is shown.
      x_label: what x is.
      x: the labels of x, evenly spaced.
      y_label: what the values are, with the unit.
      series: the lines.
      notes: sentences.
      digits: after the point, in the table.
      y_from: where the picture's y axis begins.
      bars: drawn as bars instead of lines.
    """

    name: str
    title: str
    x_label: str
    x: tuple[str, ...]
    y_label: str
    series: tuple[Series, ...]
    notes: tuple[str, ...] = ()
    digits: int = 1
    y_from: float = 0.0
    bars: bool = False

    def having(self, words: Sequence[str], title: str) -> Figure:
        """The same with only the lines whose label has one of `words`; the title says more."""
        lines = tuple(line for line in self.series if any(word in line.label for word in words))
        return dataclasses.replace(self, title=f"{self.title}, {title}", series=lines)

    def line(self, label: str) -> Series:
        """The series of that label."""
        return next(series for series in self.series if series.label == label)

    def value(self, label: str, x: str) -> float:
        """One value that is there."""
        value = self.line(label).values[self.x.index(x)]
        assert value is not None
        return value

    def to_json(self) -> dict[str, Any]:
        """Everything."""
        return dataclasses.asdict(self)


def text_table(figure: Figure) -> str:
    """For people: x down, series across."""
    head = [figure.x_label, *(series.label for series in figure.series)]
    rows = [head]
    for index, x in enumerate(figure.x):
        row = [x]
        for series in figure.series:
            value = series.values[index]
            text = "-" if value is None else f"{value:.{figure.digits}f}"
            row.append(text + ("*" if series.marked == index else " "))
        rows.append(row)
    lines = [figure.title, f"  {figure.y_label}"]
    lines += ["  " + line for line in align(rows)]
    lines += [f"  {note}" for note in figure.notes]
    return "\n".join(lines)


def align(rows: Sequence[Sequence[str]]) -> list[str]:
    """Columns of equal width: the first to the left, the others to the right."""
    widths = [max(len(row[column]) for row in rows) for column in range(len(rows[0]))]
    return [
        "  ".join(
            cell.ljust(width) if column == 0 else cell.rjust(width)
            for column, (cell, width) in enumerate(zip(row, widths))
        ).rstrip()
        for row in rows
    ]
