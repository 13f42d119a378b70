"""`nerfturbo export web RUN OUT`: the scene as one page for any browser."""

from __future__ import annotations

import json
import time
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from typing import TYPE_CHECKING, Annotated, Any

import tyro

from ..errors import InputError
from .export import ExportArgs
from .parse import parse

if TYPE_CHECKING:
    from ..data.scene import Scene
    from ..export.web.baked import Baked
    from ..rendering.model import NerfModel
    from .progress import Display

ALIGN_STEPS = {False: 40, True: 200}  # on a GPU


@dataclass(frozen=True)
class WebArgs(ExportArgs):
    """Write one self-contained page (.html) that shows the scene in real time in any browser with WebGL2."""

    split: bool = False
    """Write a folder of static files for a web server instead; OUT is its name."""
    budget_mb: Annotated[float, tyro.conf.arg(metavar="MB")] = 30.0
    """What the page's files may take; resolution and view-dependent features are chosen to fit."""
    tune_seconds: Annotated[float | None, tyro.conf.arg(metavar="S")] = None
    """Fine-tune for so long; unless given, 30 s on a GPU and 20 s on a CPU. 0 leaves it out."""
    tune_steps: Annotated[int | None, tyro.conf.arg(metavar="N")] = None
    """Fine-tune by so many steps, however long they take: on a CPU two pages of one run are then the same."""
    eval_views: Annotated[int | None, tyro.conf.arg(metavar="N")] = None
    """Compare the page's pictures of this many test views; unless given, 10 on a GPU, fewer large ones on a CPU."""
    time: Annotated[float, tyro.conf.arg(metavar="T")] = 0.0
    """The moment to show of a scene that moves, 0 to 1."""
    name: Annotated[str | None, tyro.conf.arg(metavar="NAME")] = None
    """What the page calls the scene, if not by the name of its folder."""


def main(argv: Sequence[str]) -> int:
    """Open the run, bake, score, write, say what came of it."""
    args = parse(WebArgs, argv, "export web")
    _check(args)
    from ..evaluation.run_folder import check_writable, open_run
    from ..export.web.page import check_page_path

    check_page_path(args.out, split=args.split)
    open_run(args.run)
    check_writable(args.out)
    if args.out.exists() and args.out.is_dir() != args.split:
        what = "a folder" if args.split else "a file"
        raise InputError(str(args.out), what, "a file of that name" if args.split else "a folder of that name")
    if args.out.exists() and not args.overwrite:
        raise InputError(str(args.out), "a new page", "one that is there", "replace it by --overwrite")
    document = _export(args)
    if args.json:
        print(json.dumps(document))
    else:
        _say(document)
    return 0


def _check(args: WebArgs) -> None:
    if not 0.5 <= args.budget_mb <= 2000.0:
        raise InputError("--budget-mb", "0.5 to 2000", str(args.budget_mb))
    if args.tune_seconds is not None and not 0.0 <= args.tune_seconds <= 3600.0:
        raise InputError("--tune-seconds", "0 to 3600", str(args.tune_seconds))
    if args.tune_steps is not None and args.tune_steps < 1:
        raise InputError("--tune-steps", "a number > 0", str(args.tune_steps), "--tune-seconds 0 leaves it out")
    if args.eval_views is not None and args.eval_views < 0:
        raise InputError("--eval-views", "a number >= 0", str(args.eval_views))
    if not 0.0 <= args.time <= 1.0:
        raise InputError("--time", "0 to 1", str(args.time))


def _export(args: WebArgs) -> dict[str, Any]:
    import torch

    from ..evaluation.results import peak_gpu_memory_bytes, peak_memory_bytes
    from ..export.web.bake import BakeSettings, bake, score, views_to_score
    from ..export.web.page import PageFacts, room_for_data, write_page
    from .common import chosen_backend, load_run, open_views, with_data
    from .progress import showing
    from .settings import resolve_device

    device = resolve_device(args.device)
    with showing() as display, chosen_backend(args.backend):
        opened = load_run(args.run, device)
        config = with_data(opened.config, args.data)
        display.phase(f"opening {config.data.source}")
        train, test = open_views(config, opened.model)
        started = time.perf_counter()
        moving = args.time if train.cameras.times is not None else None
        settings = BakeSettings(
            budget_bytes=room_for_data(args.budget_mb * 1e6),
            bytes_per_byte=1.0 if args.split else 4.0 / 3.0,
            tune_seconds=args.tune_seconds,
            tune_steps=args.tune_steps,
            time=moving,
            seed=config.train.seed,
        )
        result = bake(opened.model, train.cameras, settings, say=display.phase, progress=display.update)
        baked = time.perf_counter() - started
        views = views_to_score(test, opened.model.device) if args.eval_views is None else args.eval_views
        found, aligned = None, 0
        if views:
            aligned, test = _where_learned(opened.model, test, display)
            display.phase("comparing with the field and with the test photos")
            found = score(opened.model, result.baked, test, views=views, time=moving, progress=display.update)
        display.phase("writing")
        facts = PageFacts(args.name or train.name, found, baked)
        size = write_page(args.out, result, train.cameras, facts, split=args.split)
        if size > args.budget_mb * 1e6:
            display.note(
                f"{size / 1e6:.1f} MB are more than --budget-mb {args.budget_mb:g}: the scene has no less to give"
            )
    return {
        "file": str(args.out),
        "bytes": size,
        "data_bytes": result.data_bytes,
        **_what_was_baked(result.baked),
        "score": None if found is None else asdict(found),
        "poses_aligned": aligned,
        "tune_steps": result.tune_steps,
        "bake_seconds": baked,
        "seconds_by_part": result.seconds,
        "seconds": time.perf_counter() - started,
        "peak_memory_bytes": peak_memory_bytes(),
        "peak_gpu_memory_bytes": peak_gpu_memory_bytes(torch.device(device)),
    }


def _what_was_baked(baked: Baked) -> dict[str, Any]:
    blocks, lattice = baked.blocks, baked.blocks.lattice
    return {
        "blocks": blocks.n_blocks,
        "vertices": blocks.n_vertices,
        "cells": list(lattice.cells),
        "levels": lattice.levels,
        "features": baked.n_features,
        "voxel": lattice.voxel,
    }


def _where_learned(model: NerfModel, test: Scene, display: Display) -> tuple[int, Scene]:
    """Steps made, and the test views: where cameras were learned, the scene stands a little beside their own poses."""
    from ..evaluation.align import aligned_to

    if not model.config.cameras.refine:
        return 0, test
    steps = ALIGN_STEPS[model.device.type != "cpu"]
    display.phase("fitting the poses of the test views")
    return steps, aligned_to(model, test, steps=steps, report=display.update)


def _say(document: dict[str, Any]) -> None:
    from .progress import duration

    x, y, z = document["cells"]
    levels = f" on {document['levels']} levels" if document["levels"] > 1 else ""
    parts = [f"{x} x {y} x {z} cells{levels}", f"{document['blocks']} blocks", f"{document['features']} features"]
    parts += [f"{document['bytes'] / 1e6:.1f} MB in {duration(document['seconds'])}"]
    print(f"{document['file']}: " + ", ".join(parts))
    found = document["score"]
    if found is not None:
        words = [f"{found['against_field']:.2f} dB against the field's own render"]
        if found["against_photos"] is not None:
            words += [
                f"{found['against_photos']:.2f} dB against the photos (the field: {found['field_against_photos']:.2f})"
            ]
        print(f"  {', '.join(words)}; {found['views']} test views")
        cost = f"{found['steps_per_pixel']:.1f} steps and {found['fetches_per_pixel']:.1f} texture fetches"
        print(f"  a pixel of them takes {cost}")
    is_file = document["file"].endswith(("html", "htm"))
    print("  open it in a browser" if is_file else "  serve the folder, say by python -m http.server")
