"""Plots of benchmark results as SVG files: bars and lines, drawn without a library, for light and dark pages."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from html import escape
from pathlib import Path

COLORS = ("#2f6fdb", "#d9612e", "#2a9d63", "#9b4fd0", "#c23a5f", "#7a7f87")
INK, FAINT = "#6b7280", "#9aa1ab"
WIDTH, FONT = 720, "font-family='system-ui, sans-serif' font-size='12'"
Point = tuple[float, float]


def bar_chart(title: str, rows: Sequence[tuple[str, float]], unit: str) -> str:
    """One horizontal bar a row, its value behind it.

    >>> "4.0x" in bar_chart("speed", [("march", 4.0)], "x")
    True
    """
    left, step = 24 + 7 * max((len(label) for label, _ in rows), default=0), 26
    largest = max((value for _, value in rows if math.isfinite(value)), default=1.0) or 1.0
    scale = (WIDTH - left - 90) / largest
    parts = [_text(16, 24, title, weight="600")]
    for index, (label, value) in enumerate(rows):
        top = 40 + index * step
        length = max(1.0, value * scale) if math.isfinite(value) else 1.0
        parts.append(_text(left - 8, top + 14, label, anchor="end"))
        parts.append(f"<rect x='{left}' y='{top}' width='{length:.1f}' height='18' rx='2' fill='{COLORS[0]}'/>")
        parts.append(_text(left + length + 6, top + 14, f"{_number(value)}{unit}"))
    return _svg(40 + len(rows) * step + 14, parts)


def line_chart(title: str, series: Mapping[str, Sequence[Point]], x_label: str, y_label: str) -> str:
    """Lines through points, with ticks at round numbers; names stand at the lines' ends and in a legend.

    >>> "seconds" in line_chart("quality", {"seed 0": [(1.0, 30.0), (2.0, 32.0)]}, "seconds", "dB")
    True
    """
    points = [point for line in series.values() for point in line if all(map(math.isfinite, point))]
    height, left, right, top, bottom = 360, 60, 20, 64, 50
    (x_low, x_high), (y_low, y_high) = (_range([point[axis] for point in points]) for axis in (0, 1))

    def place(point: Point) -> tuple[float, float]:
        x = left + (point[0] - x_low) / (x_high - x_low) * (WIDTH - left - right)
        return x, height - bottom - (point[1] - y_low) / (y_high - y_low) * (height - top - bottom)

    parts = [_text(16, 24, title, weight="600"), _text(WIDTH / 2, height - 12, x_label, anchor="middle")]
    parts.append(_text(16, 46, y_label))
    for tick in _ticks(y_low, y_high):
        y = place((x_low, tick))[1]
        parts.append(
            f"<line x1='{left}' y1='{y:.1f}' x2='{WIDTH - right}' y2='{y:.1f}' stroke='{FAINT}' opacity='.3'/>"
        )
        parts.append(_text(left - 8, y + 4, _number(tick), anchor="end"))
    for tick in _ticks(x_low, x_high):
        parts.append(_text(place((tick, y_low))[0], height - bottom + 18, _number(tick), anchor="middle"))
    for index, (name, line) in enumerate(series.items()):
        color = COLORS[index % len(COLORS)]
        places = [place(point) for point in line if all(map(math.isfinite, point))]
        path = " ".join(f"{x:.1f},{y:.1f}" for x, y in places)
        parts.append(f"<polyline points='{path}' fill='none' stroke='{color}' stroke-width='2'/>")
        parts += [f"<circle cx='{x:.1f}' cy='{y:.1f}' r='3' fill='{color}'/>" for x, y in places]
        x = 90 + 130 * (index % 5)
        parts.append(f"<rect x='{x}' y='{37 + 14 * (index // 5)}' width='10' height='10' fill='{color}'/>")
        parts.append(_text(x + 15, 46 + 14 * (index // 5), name))
    return _svg(height, parts)


def write_plot(path: Path, svg: str) -> Path:
    """Beside a result `FILE.json`: FILE.svg."""
    target = path.with_suffix(".svg")
    target.write_text(svg, encoding="utf-8")
    return target


def _svg(height: float, parts: Sequence[str]) -> str:
    head = f"<svg xmlns='http://www.w3.org/2000/svg' viewBox='0 0 {WIDTH} {height:.0f}' {FONT} fill='{INK}'>"
    return "\n".join([head, *parts, "</svg>", ""])


def _text(x: float, y: float, text: str, *, anchor: str = "start", weight: str = "400") -> str:
    place = f"x='{x:.1f}' y='{y:.1f}' text-anchor='{anchor}' font-weight='{weight}'"
    return f"<text {place}>{escape(text)}</text>"


def _number(value: float) -> str:
    return f"{value:.1f}" if 1.0 <= abs(value) < 100.0 else f"{value:.3g}"


def _range(values: Sequence[float]) -> Point:
    low, high = (min(values), max(values)) if values else (0.0, 1.0)
    margin = 0.05 * (high - low) or 0.5
    return (0.0 if 0.0 <= low < 0.3 * high else low - margin), high + margin


def _ticks(low: float, high: float) -> list[float]:
    rough = (high - low) / 6
    unit = 10.0 ** math.floor(math.log10(rough))
    step = next(unit * factor for factor in (1, 2, 5, 10) if unit * factor >= rough)
    first = math.ceil(low / step)
    return [round(k * step, 10) for k in range(first, math.floor(high / step) + 1)]
