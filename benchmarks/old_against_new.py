"""One side of two versions of the package, for `results/h200/structure.json`: step, frame, first step, memory.

PYTHONPATH=VERSION python benchmarks/old_against_new.py NAME OUT.json LEGO ngp vanilla proposal voxels
"""

import json
import statistics
import sys
import time
from dataclasses import replace
from pathlib import Path

import torch

import nerfturbo as nt
from nerfturbo.rendering.frame import FrameRenderer

FAST = ("ngp", "quality", "voxels")  # presets whose steps take less than a millisecond


def seconds(work) -> float:
    torch.cuda.synchronize()
    start = time.perf_counter()
    work()
    torch.cuda.synchronize()
    return time.perf_counter() - start


def run(trainer: nt.Trainer, steps: int) -> None:
    end = trainer.step + steps
    while trainer.step < end:
        trainer.advance()
    trainer.stepper.finish()


def frame_ms(model, test: nt.Scene) -> float:
    cameras, white = test.cameras.to("cuda"), torch.ones(3, device="cuda")
    options = {"settings": model.settings, "background": white}
    renderer = FrameRenderer(model.field, model.grid, width=800, height=800, **options)
    views = [(cameras.camera_to_world[i], cameras.focal[i], cameras.center[i]) for i in range(len(test))]
    times = [seconds(lambda view=view: renderer.render(*view)) for _ in range(11) for view in views]
    return 1e3 * statistics.median(times[len(views) :])


def measure(name: str, scene: nt.Scene, test: nt.Scene) -> dict:
    began, config = time.perf_counter(), nt.preset(name, "cuda")
    trainer = nt.Trainer(replace(config, train=replace(config.train, steps=1 << 30)), scene, device="cuda")
    trainer.begin()
    run(trainer, 1)
    row = {"first_step_seconds": time.perf_counter() - began}
    warm, window = (2048, 512) if name in FAST else (256, 128)
    run(trainer, warm)
    torch.cuda.reset_peak_memory_stats()
    row["step_ms_all"] = [1e3 * seconds(lambda: run(trainer, window)) / window for _ in range(7)]
    row |= {"step_ms": statistics.median(row["step_ms_all"]), "peak_bytes": torch.cuda.max_memory_allocated()}
    with trainer.as_finished():
        if name == "ngp":
            row["frame_ms"] = frame_ms(trainer.model, test)
    return row


if __name__ == "__main__":
    side, out, folder, *presets = sys.argv[1:]
    scenes = [nt.load_scene(folder, split) for split in ("train", "test")]
    Path(out).write_text(json.dumps({"side": side, "presets": {name: measure(name, *scenes) for name in presets}}))
