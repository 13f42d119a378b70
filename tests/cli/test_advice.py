"""A person with forty photos and no GPU is told before training, not after it, that scoring them takes hours."""

from __future__ import annotations

import pytest

from nerfturbo.cli.session import PATIENCE, scoring_notes
from nerfturbo.presets import preset

from ..tiny import ball_scene


@pytest.mark.parametrize(
    ("name", "side", "limit", "says"),
    [
        ("proposal-cpu", 3500, None, "5 test views of 3500 x 3500 will take a CPU about 2 hours: --downscale 4"),
        ("proposal-cpu", 3500, 1, "1 test views of 3500 x 3500 will take a CPU about 29 minutes: --downscale 2"),
        ("proposal-cpu", 1000, None, ""),
        ("ngp-cpu", 3500, None, "about 20 minutes: --downscale 2"),
        ("ngp-cpu", 2800, None, ""),
    ],
)
def test_large_pictures_on_a_cpu(name: str, side: int, limit: int | None, says: str) -> None:
    cameras = ball_scene(n_views=5, size=10).cameras.scaled(side / 10)
    notes = scoring_notes(cameras, limit, preset(name), "cpu")
    assert says in notes[0] if says else notes == (), notes
    assert scoring_notes(cameras, limit, preset(name), "cuda:0") == ()


def test_what_is_advised_is_enough() -> None:
    cameras, config = ball_scene(n_views=5, size=10).cameras, preset("proposal-cpu")
    for side in (1400, 2400, 5000, 9000):
        large = cameras.scaled(side / 10)
        note = scoring_notes(large, None, config, "cpu")[0]
        divisor = int(note.split("--downscale ")[1].split(",")[0])
        assert scoring_notes(large.scaled(1.0 / divisor), None, config, "cpu") == (), f"{side}, {PATIENCE} s"
