"""Small plots as SVG text, without a plotting library. `python benchmarks/charts.py FILE.json` draws the curves of a
result of `nerfturbo bench scene` beside it."""

import json
import math
import sys
from collections.abc import Sequence
from dataclasses import dataclass
from html import escape
from pathlib import Path

COLORS = ("#2a6fbb", "#d1662a", "#3c9a5f", "#8a57b5", "#b03a48", "#6b7280")
FONT = 'font-family="system-ui, sans-serif" font-size="12"'
ROW, LABEL, PANEL, GAP = 22, 220, 260, 30
CHARACTER = 6.8  # pixels of a letter at this size, at most on average: names must not leave the picture


@dataclass(frozen=True)
class Bars:
    """One panel: a number per row; `from_zero` False shows differences between large numbers."""

    title: str
    values: Sequence[float | None]
    from_zero: bool = True


def bar_chart(title: str, names: Sequence[str], panels: Sequence[Bars]) -> str:
    """Rows by name, one panel of horizontal bars beside the other."""
    label = max(LABEL, 16 + math.ceil(CHARACTER * max(map(len, names), default=0)))
    width, height = label + len(panels) * (PANEL + GAP), 60 + ROW * len(names)
    parts = [_text(8, 20, title, weight="600")]
    for row, name in enumerate(names):
        parts.append(_text(label - 8, 60 + ROW * row + 4, name, anchor="end"))
    for index, panel in enumerate(panels):
        left = label + index * (PANEL + GAP)
        parts.append(_text(left, 42, panel.title, color="#555"))
        known = [value for value in panel.values if value is not None and math.isfinite(value)]
        low = 0.0 if panel.from_zero or not known else math.floor(min(known) - 0.5)
        span = max((max(known, default=1.0) - low), 1e-9)
        for row, value in enumerate(panel.values):
            if value is None or not math.isfinite(value):
                continue
            length = (PANEL - 70) * (value - low) / span
            y = 60 + ROW * row - 9
            color = COLORS[0] if row == 0 else COLORS[index % 2 + 1]
            parts.append(f'<rect x="{left}" y="{y}" width="{length:.1f}" height="16" rx="2" fill="{color}"/>')
            parts.append(_text(left + length + 4, y + 12, short(value)))
    return _svg(width, height, parts)


def short(value: float) -> str:
    """Four digits, in thousands or millions where there are more.

    >>> short(0.5), short(1231.3), short(448_442.0), short(29.9e6)
    ('0.5', '1231', '448.4 k', '29.9 M')
    """
    for least, unit, name in ((1e6, 1e6, "M"), (1e4, 1e3, "k")):
        if abs(value) >= least:
            return f"{value / unit:.4g} {name}"
    return f"{value:.4g}"


@dataclass(frozen=True)
class Curve:
    """One line of a plot."""

    name: str
    x: Sequence[float]
    y: Sequence[float]


def line_chart(title: str, curves: Sequence[Curve], *, x_label: str, y_label: str) -> str:
    """Curves over one pair of axes, with a legend."""
    width, height, left, top, right, bottom = 560, 320, 60, 40, 130, 40
    xs = [value for curve in curves for value in curve.x]
    ys = [value for curve in curves for value in curve.y if math.isfinite(value)]
    x_ticks, y_ticks = round_ticks(xs), round_ticks(ys)
    x0, x1, y0, y1 = x_ticks[0], x_ticks[-1], y_ticks[0], y_ticks[-1]
    inner = (width - left - right, height - top - bottom)

    def place(x: float, y: float) -> tuple[float, float]:
        return left + inner[0] * (x - x0) / (x1 - x0), top + inner[1] * (1.0 - (y - y0) / (y1 - y0))

    parts = [_text(8, 20, title, weight="600")]
    for y in y_ticks:
        _, py = place(x0, y)
        parts.append(f'<line x1="{left}" x2="{left + inner[0]}" y1="{py:.1f}" y2="{py:.1f}" stroke="#ddd"/>')
        parts.append(_text(left - 6, py + 4, f"{y:.6g}", anchor="end", color="#555"))
    for x in x_ticks:
        px, _ = place(x, y0)
        parts.append(_text(px, height - bottom + 16, f"{x:.6g}", anchor="middle", color="#555"))
    parts.append(_text(left + inner[0] / 2, height - 6, x_label, anchor="middle", color="#555"))
    parts.append(_text(left, top - 6, y_label, color="#555"))
    for index, curve in enumerate(curves):
        color = COLORS[index % len(COLORS)]
        points = [place(x, y) for x, y in zip(curve.x, curve.y, strict=True) if math.isfinite(y)]
        path = " ".join(f"{x:.1f},{y:.1f}" for x, y in points)
        parts.append(f'<polyline points="{path}" fill="none" stroke="{color}" stroke-width="2"/>')
        parts += [f'<circle cx="{x:.1f}" cy="{y:.1f}" r="2.5" fill="{color}"/>' for x, y in points]
        y = top + 14 + 18 * index
        parts.append(f'<rect x="{width - right + 12}" y="{y - 9}" width="12" height="10" fill="{color}"/>')
        parts.append(_text(width - right + 30, y, curve.name))
    return _svg(width, height, parts)


def round_ticks(values: Sequence[float], most: int = 6) -> list[float]:
    """Round numbers (1, 2 or 5 times a power of ten apart), at most so many, around all values; at least two."""
    known = [value for value in values if math.isfinite(value)]
    low, high = min(known, default=0.0), max(known, default=1.0)
    high = high if high > low else low + max(1.0, abs(low))
    power = 10.0 ** math.floor(math.log10((high - low) / most))
    steps = (power * factor for factor in (1.0, 2.0, 5.0, 10.0, 20.0, 50.0))  # the last is always enough
    step = next(step for step in steps if math.ceil(high / step) - math.floor(low / step) < most)
    return [k * step for k in range(math.floor(low / step), math.ceil(high / step) + 1)]


def _text(x: float, y: float, text: str, *, anchor: str = "start", color: str = "#111", weight: str = "400") -> str:
    style = f'text-anchor="{anchor}" fill="{color}" font-weight="{weight}"'
    return f'<text x="{x:.1f}" y="{y:.1f}" {FONT} {style}>{escape(text)}</text>'


def _svg(width: int, height: int, parts: Sequence[str]) -> str:
    head = f'<svg xmlns="http://www.w3.org/2000/svg" width="{width}" height="{height}" viewBox="0 0 {width} {height}">'
    return "\n".join([head, '<rect width="100%" height="100%" fill="#fff"/>', *parts, "</svg>"]) + "\n"


def draw_scene(path: Path) -> Path:
    """The curves of a record of `nerfturbo bench scene`, as FILE.svg."""
    values = json.loads(path.read_text())["values"]
    curves = [
        Curve(
            f"seed {run['seed']}", [mark["seconds"] for mark in run["marks"]], [mark["psnr"] for mark in run["marks"]]
        )
        for run in values["runs"]
    ]
    title = f"{values['scene']}: quality over training time"
    plot = line_chart(title, curves, x_label="seconds of training", y_label="PSNR, dB")
    path.with_suffix(".svg").write_text(plot, encoding="utf-8")
    return path.with_suffix(".svg")


if __name__ == "__main__":
    print("\n".join(str(draw_scene(Path(name))) for name in sys.argv[1:]))
