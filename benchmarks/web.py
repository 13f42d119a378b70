"""What a page costs and how good it is, for several ways to bake it: `python benchmarks/web.py RUN OUT.json [PAGE]`.

Bakes one run with and without fine-tuning and features and under several budgets, and scores each against the field's
own render and the test photos. The page of the default settings is kept where a third argument names it.
"""

from __future__ import annotations

import json
import sys
import time
from dataclasses import asdict, replace
from pathlib import Path

import torch

from nerfturbo.cli.common import load_run, open_views
from nerfturbo.export.web.bake import BakeSettings, bake, score
from nerfturbo.export.web.page import PageFacts, room_for_data, write_page

DEFAULT = BakeSettings(room_for_data(30e6), 4.0 / 3.0)


def variants(quick: bool) -> dict[str, BakeSettings]:
    """The default last, so that everything is compiled when it is timed."""
    short = 2.0 if quick else 12.0
    return {
        "not tuned": replace(DEFAULT, tune_seconds=0.0),
        "short": replace(DEFAULT, tune_seconds=short),
        "short, learning rate 0.02": replace(DEFAULT, tune_seconds=short, lr=2e-2),
        "short, learning rate 0.005": replace(DEFAULT, tune_seconds=short, lr=5e-3),
        "short, 10 MB": replace(DEFAULT, tune_seconds=short, budget_bytes=room_for_data(10e6)),
        "default": replace(DEFAULT, tune_seconds=short) if quick else DEFAULT,
    }


def main(run: str, out: str, page: str | None = None) -> None:
    device = "cuda" if torch.cuda.is_available() else "cpu"
    opened = load_run(run, device)
    train, test = open_views(opened.config)
    document = {"what": "web page", "command": " ".join(sys.argv), "device": device, "values": {}}
    for name, settings in variants(quick=device == "cpu").items():
        started = time.perf_counter()
        result = bake(opened.model, train.cameras, settings)
        seconds = time.perf_counter() - started
        found = score(opened.model, result.baked, test, views=10 if device == "cuda" else 1)
        blocks = result.baked.blocks
        document["values"][name] = {
            "seconds": seconds,
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
            write_page(Path(page), result, train.cameras, PageFacts(train.name, found, seconds))


if __name__ == "__main__":
    main(*sys.argv[1:])
