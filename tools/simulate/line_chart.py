"""Figures as SVG: panels of lines or bars, no dependency, no script, readable on any background."""

from __future__ import annotations

import math
from collections.abc import Sequence
from xml.sax.saxutils import escape

from .figure import Figure, Series

# Pixels.
_PANEL_WIDTH = 560
_MARGIN = 24
_HEAD = 64
_PLOT_LEFT = 62
_PLOT_WIDTH = 330
_PLOT_TOP = 56
_PLOT_HEIGHT = 210
_PANEL_HEIGHT = 350
_LABEL_GAP = 14

_FONT = "-apple-system, 'Segoe UI', 'Helvetica Neue', Arial, 'DejaVu Sans', sans-serif"
_STYLE = f"""
  text {{ font-family: {_FONT}; font-size: 12px; fill: #1f2933; }}
  .title {{ font-size: 18px; font-weight: 600; }}
  .panel {{ font-size: 13.5px; font-weight: 600; }}
  .quiet {{ fill: #66727f; font-size: 11.5px; }}
"""

# A colour by the backend in a line's label; a dash by what else distinguishes it.
_COLOURS = (("gradsync", "#1667c7"), ("nccl", "#3f8f4f"), ("gloo", "#d9822b"))
_OTHERS = ("#7b4fb5", "#b83b5e", "#1667c7", "#3f8f4f", "#d9822b")
_DASHES = ("", "6 3", "2 3", "9 3 2 3")


def picture(title: str, subtitle: str, figures: Sequence[Figure], columns: int = 2) -> str:
    """The text of an SVG file: a panel for each figure.

    Args:
      title: at the top.
      subtitle: below it.
      figures: from the left to the right, then down.
      columns: panels side by side.
    """
    columns = min(columns, len(figures))
    rows = -(-len(figures) // columns)
    width = 2 * _MARGIN + columns * _PANEL_WIDTH
    height = _HEAD + rows * _PANEL_HEIGHT + _MARGIN // 2
    body = [
        _panel(
            figure,
            _MARGIN + index % columns * _PANEL_WIDTH,
            _HEAD + index // columns * _PANEL_HEIGHT,
        )
        for index, figure in enumerate(figures)
    ]
    return "\n".join(
        [
            f'<svg xmlns="http://www.w3.org/2000/svg" width="{width}" height="{height}" '
            f'viewBox="0 0 {width} {height}" role="img" aria-label="{_attribute(title)}">',
            f"<style>{_STYLE}</style>",
            f'<rect width="{width}" height="{height}" rx="8" fill="#ffffff"/>',
            _text(_MARGIN, 30, title, "title"),
            _text(_MARGIN, 50, subtitle, "quiet"),
            *body,
            "</svg>",
            "",
        ]
    )


def _panel(figure: Figure, left: float, top: float) -> str:
    values = [value for series in figure.series for value in series.values if value is not None]
    low = figure.y_from
    ticks = _ticks(low, max(values, default=low + 1.0))
    high = ticks[-1]
    plot_left, plot_top = left + _PLOT_LEFT, top + _PLOT_TOP
    bottom = plot_top + _PLOT_HEIGHT

    def at(index: int, value: float) -> tuple[float, float]:
        y = bottom - (value - low) / (high - low) * _PLOT_HEIGHT
        if figure.bars:
            return plot_left + (index + 0.5) * _PLOT_WIDTH / len(figure.x), y
        return plot_left + index * _PLOT_WIDTH / max(1, len(figure.x) - 1), y

    parts = [
        _text(left, top + 18, figure.title, "panel"),
        _text(left, top + 36, figure.y_label, "quiet"),
    ]
    for tick in ticks:
        y = at(0, tick)[1]
        parts.append(
            f'<line x1="{plot_left}" y1="{y:.1f}" x2="{plot_left + _PLOT_WIDTH}" y2="{y:.1f}" '
            f'stroke="{"#9aa5b1" if tick == low else "#e4e8ec"}"/>'
        )
        parts.append(_text(plot_left - 8, y + 4, f"{tick:g}", "quiet", "end"))
    for index, label in enumerate(figure.x):
        for line, part in enumerate(label.split(", ")):
            parts.append(_text(at(index, low)[0], bottom + 17 + 15 * line, part, "quiet", "middle"))
    middle = plot_left + _PLOT_WIDTH / 2
    parts.append(_text(middle, bottom + 50, figure.x_label, "quiet", "middle"))
    ends = []
    if figure.bars:
        for number, series in enumerate(figure.series):
            colour, _ = _look(figure.series, number)
            for index, value in enumerate(series.values):
                if value is None:
                    continue
                width = 0.72 * _PLOT_WIDTH / len(figure.x) / len(figure.series)
                x, y = at(index, value)
                x += (number - len(figure.series) / 2) * width
                parts.append(
                    f'<rect x="{x:.1f}" y="{y:.1f}" width="{width - 1:.1f}" '
                    f'height="{bottom - y:.1f}" fill="{colour}"/>'
                )
                parts.append(_text(x + width / 2, y - 4, f"{value:.0f}", "quiet", "middle"))
            ends.append((bottom - 40 + 20 * number, series.label, colour, ""))
        parts += _labels(ends, plot_left + _PLOT_WIDTH + 10, plot_top, bottom)
        return "\n".join(parts)
    for number, series in enumerate(figure.series):
        points = [
            at(index, value) for index, value in enumerate(series.values) if value is not None
        ]
        if not points:
            continue
        colour, dash = _look(figure.series, number)
        path = " ".join(f"{x:.1f},{y:.1f}" for x, y in points)
        parts.append(
            f'<polyline points="{path}" fill="none" stroke="{colour}" stroke-width="2" '
            f'stroke-dasharray="{dash}"/>'
        )
        for index, value in enumerate(series.values):
            if value is None:
                continue
            x, y = at(index, value)
            if series.marked == index:
                parts.append(
                    f'<circle cx="{x:.1f}" cy="{y:.1f}" r="6" fill="#ffffff" stroke="{colour}" '
                    'stroke-width="2"/>'
                )
            parts.append(f'<circle cx="{x:.1f}" cy="{y:.1f}" r="2.6" fill="{colour}"/>')
        ends.append((points[-1][1], series.label, colour, dash))
    parts += _labels(ends, plot_left + _PLOT_WIDTH + 10, plot_top, bottom)
    return "\n".join(parts)


def _labels(
    ends: list[tuple[float, str, str, str]], left: float, top: float, bottom: float
) -> list[str]:
    """The names of the lines where they end, moved apart."""
    ends = sorted(ends)
    ys = [max(top, min(bottom, y)) for y, *_ in ends]
    for index in range(1, len(ys)):
        ys[index] = max(ys[index], ys[index - 1] + _LABEL_GAP)
    for index in reversed(range(len(ys))):
        limit = bottom + 4 if index == len(ys) - 1 else ys[index + 1] - _LABEL_GAP
        ys[index] = min(ys[index], limit)
    parts = []
    for y, (_, label, colour, dash) in zip(ys, ends):
        parts.append(
            f'<line x1="{left}" y1="{y:.1f}" x2="{left + 18}" y2="{y:.1f}" stroke="{colour}" '
            f'stroke-width="2" stroke-dasharray="{dash}"/>'
        )
        parts.append(_text(left + 24, y + 4, label, "quiet"))
    return parts


def _look(series: Sequence[Series], number: int) -> tuple[str, str]:
    """Colour and dash: lines of a backend have one colour, and differ in their dashes."""
    label = series[number].label
    for backend, colour in _COLOURS:
        if backend in label:
            before = sum(backend in other.label for other in series[:number])
            return colour, _DASHES[before % len(_DASHES)]
    return _OTHERS[number % len(_OTHERS)], ""


def _ticks(least: float, most: float) -> list[float]:
    """From `least` to at least `most`, a round number apart."""
    if most <= least:
        return [least, least + 1.0]
    rough = (most - least) / 4
    power = 10.0 ** math.floor(math.log10(rough))
    step = next(factor * power for factor in (1, 2, 2.5, 5, 10) if factor * power >= rough * 0.999)
    count = math.ceil((most - least) / step * 0.999)
    return [least + index * step for index in range(count + 1)]


def _text(x: float, y: float, text: str, kind: str, anchor: str = "start") -> str:
    return (
        f'<text x="{x:.1f}" y="{y:.1f}" class="{kind}" text-anchor="{anchor}">{escape(text)}</text>'
    )


def _attribute(text: str) -> str:
    return escape(text, {'"': "&quot;"})
