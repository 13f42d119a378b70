"""Plots without a plotting library: axes at round numbers, and every name inside the picture."""

from __future__ import annotations

import math
import re
import shutil
from pathlib import Path
from xml.etree import ElementTree

import pytest

from charts import CHARACTER, Bars, Curve, bar_chart, draw_scene, line_chart, round_ticks


@pytest.mark.parametrize(
    ("values", "expected"),
    [
        ([0.4262, 16.39], [0.0, 5.0, 10.0, 15.0, 20.0]),
        ([28.37, 35.39], [28.0, 30.0, 32.0, 34.0, 36.0]),
        ([0.0, 1.0], [0.0, 0.2, 0.4, 0.6, 0.8, 1.0]),
        ([-3.0, 4e-9, math.nan, math.inf], [-3.0, -2.0, -1.0, 0.0, 1.0]),
        ([7.0], [6.0, 8.0, 10.0, 12.0, 14.0]),
        ([], [0.0, 0.2, 0.4, 0.6, 0.8, 1.0]),
    ],
)
def test_ticks_are_round_and_hold_all_values(values: list[float], expected: list[float]):
    ticks = round_ticks(values)
    assert ticks == pytest.approx(expected)
    finite = [value for value in values if math.isfinite(value)]
    assert all(ticks[0] <= value <= ticks[-1] for value in finite)


@pytest.mark.parametrize("span", [1e-12, 3.7e-5, 1.0, 9.99, 10.0, 123456.0])
@pytest.mark.parametrize("low", [0.0, -2.5, 999.5])
def test_there_are_two_to_six_ticks(low: float, span: float):
    assert 2 <= len(round_ticks([low, low + span])) <= 6


def test_long_names_stay_inside_the_picture():
    names = ["a", "+ a view scored 8 times, early more often, and much else besides"]
    root = ElementTree.fromstring(bar_chart("title", names, [Bars("s", [1.0, 2.0])]))
    ends = {node.text: float(node.attrib["x"]) for node in root if node.attrib.get("text-anchor") == "end"}
    assert set(ends) == set(names)
    assert all(end >= CHARACTER * len(name) for name, end in ends.items())
    bars = [node for node in root if node.attrib.get("rx")]
    assert len(bars) == 2 and all(float(bar.attrib["x"]) > max(ends.values()) for bar in bars)


def test_every_point_of_a_curve_lies_between_the_axes():
    picture = line_chart("t", [Curve("c", [0.4, 3.0, 16.4], [28.4, 33.0, 35.4])], x_label="s", y_label="dB")
    points = [(float(x), float(y)) for x, y in re.findall(r'<circle cx="([\d.]+)" cy="([\d.]+)"', picture)]
    assert len(points) == 3
    assert all(60 <= x <= 430 and 40 <= y <= 280 for x, y in points)


def test_the_curves_of_a_benchmark_are_drawn_beside_it(tmp_path: Path):
    for name in ("h200/lego_scene.json", "cpu/toybox_scene.json"):
        shutil.copy(Path(__file__).parents[2] / "benchmarks" / "results" / name, tmp_path / "a.json")
        root = ElementTree.fromstring(draw_scene(tmp_path / "a.json").read_text())
        assert "quality over training time" in "".join(root.itertext()) and "seed 0" in "".join(root.itertext())
