"""What a page costs and how good it is: `python benchmarks/web.py RUN OUT.json [PAGE.html [FIELD.npz [SECONDS]]]`.

Bakes one run with and without fine-tuning, scores both against the field's own render and the test photos, keeps the
page, and the field's pictures of the scored views, so that `benchmarks/web_page.py` can compare them with a browser's.
SECONDS adds bakes of several learning rates and budgets that are tuned for so long.
"""

from __future__ import annotations

import json
import sys
import time
from dataclasses import asdict, replace
from pathlib import Path

import numpy as np
import torch

from nerfturbo.cli.common import load_run, open_views
from nerfturbo.data.scene import Scene
from nerfturbo.evaluation.evaluate import choose_views
from nerfturbo.export.web.bake import BakeSettings, bake, score
from nerfturbo.export.web.page import PageFacts, room_for_data, write_page
from nerfturbo.rendering.model import NerfModel

DEFAULT = BakeSettings(room_for_data(30e6), 4.0 / 3.0)


def variants(seconds: float) -> dict[str, BakeSettings]:
    """What is compared; the default comes last, so that everything is compiled when it is timed."""
    short = replace(DEFAULT, tune_seconds=seconds)
    others = {
        "short": short,
        "short, learning rate 0.02": replace(short, lr=2e-2),
        "short, learning rate 0.005": replace(short, lr=5e-3),
        "short, 10 MB": replace(short, budget_bytes=room_for_data(10e6)),
    }
    return {"not tuned": replace(DEFAULT, tune_seconds=0.0)} | (others if seconds else {}) | {"default": DEFAULT}


def keep_field(model: NerfModel, test: Scene, path: str, views: int) -> None:
    """The field's pictures of the scored views, as bytes."""
    chosen = choose_views(len(test), views)
    pictures = [model.render_image(test.cameras, index).rgb.clamp(0.0, 1.0) * 255.0 for index in chosen]
    np.savez_compressed(
        path, views=np.array(chosen), rgb=np.stack([one.round().to(torch.uint8).cpu().numpy() for one in pictures])
    )


def main(run: str, out: str, page: str | None = None, field: str | None = None, seconds: str = "0") -> None:
    device = "cuda" if torch.cuda.is_available() else "cpu"
    opened = load_run(run, device)
    train, test = open_views(opened.config)
    views = 10 if device == "cuda" else 2
    document = {"what": "web page", "command": " ".join(sys.argv), "device": device, "values": {}}
    for name, settings in variants(float(seconds)).items():
        started = time.perf_counter()
        result = bake(opened.model, train.cameras, settings)
        taken = time.perf_counter() - started
        found = score(opened.model, result.baked, test, views=views)
        blocks = result.baked.blocks
        document["values"][name] = {
            "seconds": taken,
            "seconds_by_part": result.seconds,
            "tune_steps": result.tune_steps,
            "losses": list(result.losses[:: max(1, len(result.losses) // 12)]),
            "megabytes": result.data_bytes * settings.bytes_per_byte / 1e6,
            "first_megabytes": result.first_bytes * settings.bytes_per_byte / 1e6,
            "blocks": blocks.n_blocks,
            "vertices": blocks.n_vertices,
            "cells": blocks.lattice.cells,
            "features": result.baked.n_features,
            **asdict(found),
        }
        print(name, json.dumps(document["values"][name]), flush=True)
        Path(out).write_text(json.dumps(document, indent=1) + "\n")
        if page is not None and name == "default":
            write_page(Path(page), result, train.cameras, PageFacts(train.name, found, taken))
    if field is not None:
        keep_field(opened.model, test, field, views)


if __name__ == "__main__":
    main(*sys.argv[1:])
