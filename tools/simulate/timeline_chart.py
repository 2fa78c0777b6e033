"""One step as it happened, as SVG: what computed, reduced and travelled when."""

from __future__ import annotations

from collections.abc import Sequence
from xml.sax.saxutils import escape

from .training_run import Span

# Pixels.
_WIDTH = 960
_LEFT = 110
_RIGHT = 30
_TOP = 74
_ROW = 34
_BAR = 22
_FONT = "-apple-system, 'Segoe UI', 'Helvetica Neue', Arial, 'DejaVu Sans', sans-serif"
_ROWS = (("backward", "#9aa5b1"), ("reduce", "#1667c7"), ("exchange", "#d9822b"))
_LEAST_FOR_NUMBER = 13  # of a bar that its bucket's number fits into


def timeline(title: str, subtitle: str, spans: Sequence[Span]) -> str:
    """The text of an SVG file: a row for each kind of span, a bar for each bucket."""
    rows = [(what, colour) for what, colour in _ROWS if any(s.what == what for s in spans)]
    start = min(span.start for span in spans)
    end = max(span.end for span in spans)
    scale = (_WIDTH - _LEFT - _RIGHT) / (end - start or 1.0)
    bottom = _TOP + len(rows) * _ROW
    parts = [
        f'<svg xmlns="http://www.w3.org/2000/svg" width="{_WIDTH}" height="{bottom + 44}" '
        f'viewBox="0 0 {_WIDTH} {bottom + 44}" role="img">',
        f"<style>text {{ font-family: {_FONT}; font-size: 12px; fill: #1f2933; }} "
        ".title { font-size: 18px; font-weight: 600; } .quiet { fill: #66727f; } "
        ".number { font-size: 10.5px; fill: #ffffff; }</style>",
        f'<rect width="{_WIDTH}" height="{bottom + 44}" rx="8" fill="#ffffff"/>',
        f'<text x="24" y="30" class="title">{escape(title)}</text>',
        f'<text x="24" y="52" class="quiet">{escape(subtitle)}</text>',
    ]
    for index, (what, colour) in enumerate(rows):
        top = _TOP + index * _ROW
        parts.append(f'<text x="{_LEFT - 12}" y="{top + 15}" text-anchor="end">{what}</text>')
        for span in spans:
            if span.what != what:
                continue
            left = _LEFT + (span.start - start) * scale
            width = max(0.5, (span.end - span.start) * scale - 1)
            parts.append(
                f'<rect x="{left:.1f}" y="{top}" width="{width:.1f}" height="{_BAR}" '
                f'fill="{colour}"/>'
            )
            if width >= _LEAST_FOR_NUMBER:
                parts.append(
                    f'<text x="{left + width / 2:.1f}" y="{top + 15}" class="number" '
                    f'text-anchor="middle">{span.bucket}</text>'
                )
    for index in range(6):
        x = _LEFT + (_WIDTH - _LEFT - _RIGHT) * index / 5
        time = (end - start) * index / 5 * 1e3
        parts.append(
            f'<text x="{x:.1f}" y="{bottom + 24}" class="quiet" text-anchor="middle">'
            f"{time:.1f} ms</text>"
        )
    return "\n".join([*parts, "</svg>", ""])
