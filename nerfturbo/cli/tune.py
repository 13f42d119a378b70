"""`nerfturbo tune`: a config that fits the scene and the machine, for `nerfturbo train --config`."""

from __future__ import annotations

import json
import shlex
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Annotated

import tyro

from ..errors import InputError
from .bench import TrainingArgs, prepare
from .settings import check_positive, parse_settings, resolve_device, starting_config

GPU_BATCH = 1 << 20  # samples: past this a step of an H200 only takes longer
CPU_GROWTH = 4  # times the preset's batch: its steps take as many times longer


@dataclass(frozen=True)
class TuneArgs(TrainingArgs):
    """Find the largest batch that fits the memory and a good learning rate, and write them into a config file."""

    output: Annotated[Path, tyro.conf.arg(metavar="FILE")] = Path("tuned.json")
    """The config file to write: `nerfturbo train --config FILE` takes it."""
    memory: Annotated[float | None, tyro.conf.arg(metavar="GB")] = None
    """Memory that training may take; 80% of what is free unless given."""
    max_batch: Annotated[int | None, tyro.conf.arg(metavar="SAMPLES")] = None
    """Never more samples per step than this: past some size a larger batch only takes longer. A million on a GPU; on a
    CPU, where time ends long before memory does, four times the preset's."""
    steps: Annotated[int, tyro.conf.arg(metavar="N")] = 100
    """Of the range test, and of each short training."""


def main(argv: Sequence[str]) -> int:
    """Search, and write the config."""
    start = starting_config(argv)
    args = parse_settings(TuneArgs, argv, "tune", start)
    limits = {"--memory": args.memory, "--max-batch": args.max_batch, "--steps": args.steps}
    check_positive(limits | {"--downscale": args.downscale})
    import torch

    from ..bench.tune import SMALLEST_BATCH, memory_budget, tune
    from ..evaluation.run_folder import check_result, config_document, finite, write_json
    from .progress import showing

    check_result(args.output)
    if args.max_batch is not None and args.max_batch < SMALLEST_BATCH:
        raise InputError("--max-batch", f"at least {SMALLEST_BATCH} samples", str(args.max_batch))
    name = resolve_device(args.device)
    device = torch.device(name)
    with showing() as display:
        scenes, config = prepare(args, start, name, display)
        budget = memory_budget(device) if args.memory is None else int(args.memory * 1e9)
        most = args.max_batch or (GPU_BATCH if device.type == "cuda" else CPU_GROWTH * config.train.batch_samples)
        size = f"of at most {most} samples within {budget / 1e9:.2f} GB"
        display.phase(f"looking for a batch {size}, then for a learning rate")
        limits = {"budget": budget, "most": most, "steps": args.steps}
        found = tune(config, scenes[0], device=device, **limits, say=display.note)
    args.output.parent.mkdir(parents=True, exist_ok=True)
    write_json(args.output, config_document(found.config))
    train, optim = found.config.train, found.config.optim
    if args.json:
        tried = {"batches": found.batch_trials, "rates": found.rates, "candidates": found.candidates}
        listed = {key: [asdict(item) for item in items] for key, items in tried.items()}
        result = {"config": str(args.output), "batch_samples": train.batch_samples, "lr": optim.lr}
        print(json.dumps(finite(result | listed)))
        return 0
    print(f"batch of {train.batch_samples} samples (at most {train.max_rays} rays), learning rate {optim.lr:.3g}")
    print("  " + shlex.join(["nerfturbo", "train", args.scene, "--config", str(args.output)]))
    return 0
