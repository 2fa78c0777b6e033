"""Groups of horizontal bars as SVG: no dependency, no script, readable on any background."""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence
from xml.sax.saxutils import escape

# Pixels.
_WIDTH = 860
_MARGIN = 28
_LABELS = 190  # where bars begin
_BARS = 430  # the longest one
_ROW = 30
_BAR = 18
_GROUP_HEAD = 48
_GROUP_GAP = 20
_HEAD = 66
_NOTE_LINE = 17

_FONT = "-apple-system, 'Segoe UI', 'Helvetica Neue', Arial, 'DejaVu Sans', sans-serif"
_STYLE = f"""
  text {{ font-family: {_FONT}; font-size: 13px; fill: #1f2933; }}
  .title {{ font-size: 18px; font-weight: 600; }}
  .group {{ font-size: 14px; font-weight: 600; }}
  .quiet {{ fill: #66727f; }}
  .note {{ font-size: 11.5px; fill: #66727f; }}
  .spread {{ stroke: #1f2933; stroke-width: 1.2; stroke-opacity: 0.55; }}
"""

# The fill of a bar by what it is for.
OURS = "#1667c7"
OURS_TOO = "#63a4ea"
REFERENCE = "#c3cad2"
OTHER = "#e2953f"
OTHER_TOO = "#b9713a"


@dataclasses.dataclass(frozen=True)
class Bar:
    """One bar.

    Attributes:
      label: before it.
      value: its length.
      text: behind it, the value with its unit.
      remark: behind the text, paler.
      fill: colour.
      low: where the spread begins.
      high: where it ends.
    """

    label: str
    value: float
    text: str
    remark: str
    fill: str
    low: float
    high: float


@dataclasses.dataclass(frozen=True)
class Group:
    """Bars of one scale, from 0 to the longest of them.

    Attributes:
      title: above them.
      subtitle: behind the title, paler.
      bars: from the top.
    """

    title: str
    subtitle: str
    bars: Sequence[Bar]


def bar_chart(title: str, subtitle: str, groups: Sequence[Group], notes: Sequence[str]) -> str:
    """The picture, as the text of an SVG file.

    Args:
      title: at the top.
      subtitle: below it.
      groups: each with a scale of its own.
      notes: lines at the bottom.
    """
    y = _HEAD
    body = []
    for group in groups:
        body.append(_group(group, y))
        y += _GROUP_HEAD + _ROW * len(group.bars) + _GROUP_GAP
    for note in notes:
        body.append(_text(_MARGIN, y + 4, note, "note"))
        y += _NOTE_LINE
    height = y + 14
    return "\n".join(
        [
            f'<svg xmlns="http://www.w3.org/2000/svg" width="{_WIDTH}" height="{height}" '
            f'viewBox="0 0 {_WIDTH} {height}" role="img" aria-label="{_attribute(title)}">',
            f"<style>{_STYLE}</style>",
            f'<rect width="{_WIDTH}" height="{height}" rx="8" fill="#ffffff"/>',
            _text(_MARGIN, 34, title, "title"),
            _text(_MARGIN, 54, subtitle, "quiet"),
            *body,
            "</svg>",
            "",
        ]
    )


def _group(group: Group, top: float) -> str:
    longest = max(max(bar.value, bar.high) for bar in group.bars)
    scale = _BARS / longest if longest > 0 else 0.0
    rows = len(group.bars)
    parts = [
        f'<line x1="{_MARGIN}" y1="{top + 8}" x2="{_WIDTH - _MARGIN}" y2="{top + 8}" '
        'stroke="#e4e8ec"/>',
        f'<text x="{_MARGIN}" y="{top + 32}"><tspan class="group">{escape(group.title)}</tspan>'
        f'<tspan class="quiet" dx="10">{escape(group.subtitle)}</tspan></text>',
    ]
    for number, bar in enumerate(group.bars):
        parts.append(_bar(bar, top + _GROUP_HEAD + number * _ROW, scale))
    parts.append(
        f'<line x1="{_LABELS}" y1="{top + _GROUP_HEAD - 2}" x2="{_LABELS}" '
        f'y2="{top + _GROUP_HEAD + rows * _ROW - 10}" stroke="#9aa5b1"/>'
    )
    return "\n".join(parts)


def _bar(bar: Bar, top: float, scale: float) -> str:
    middle = top + _BAR / 2
    baseline = middle + 4.5
    low, high = _LABELS + bar.low * scale, _LABELS + bar.high * scale
    end = max(_LABELS + bar.value * scale, high) + 10
    tick = 4
    return "\n".join(
        [
            f'<text x="{_LABELS - 10}" y="{baseline}" text-anchor="end">{escape(bar.label)}</text>',
            f'<rect x="{_LABELS}" y="{top}" width="{bar.value * scale:.1f}" height="{_BAR}" '
            f'rx="2" fill="{bar.fill}"/>',
            f'<path class="spread" fill="none" d="M{low:.1f} {middle - tick}v{2 * tick}'
            f'M{low:.1f} {middle}H{high:.1f}M{high:.1f} {middle - tick}v{2 * tick}"/>',
            f'<text x="{end:.1f}" y="{baseline}">{escape(bar.text)}'
            f'<tspan class="quiet" dx="7">{escape(bar.remark)}</tspan></text>',
        ]
    )


def _text(x: float, y: float, text: str, kind: str) -> str:
    return f'<text x="{x}" y="{y}" class="{kind}">{escape(text)}</text>'


def _attribute(text: str) -> str:
    return escape(text, {'"': "&quot;"})
