"""How much memory training needs for pictures that fill a disk rather than memory.

    python benchmarks/large_pool.py benchmarks/results/cpu/large_pool.json [--pictures 200 --width 3840 --seconds 60]

Writes JPEG files of a built-in scene, enlarged, with their cameras into a temporary folder, trains on them from the
memory-mapped pool twice (the second start finds the pool), and reads the peak of each process's resident memory.
"""

from __future__ import annotations

import argparse
import json
import os
import subprocess
import sys
import tempfile
import time
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import torch
from PIL import Image

from nerfturbo.bench.record import Record, write_json
from nerfturbo.data.builtin import builtin_scene
from nerfturbo.data.images import composite_over
from nerfturbo.data.options import LoadOptions
from nerfturbo.data.scene import load_scene
from nerfturbo.training import Trainer

SHRUNK = 16  # a picture is rendered this many times smaller than it is written
BOTTOM = [0.0, 0.0, 0.0, 1.0]


def write_scene(folder: Path, n_pictures: int, width: int) -> int:
    """A transforms.json with pictures of 16 : 9; returns the bytes of their pixels."""
    small = max(16, width // SHRUNK)
    rows, height = small * 9 // 16, small * 9 // 16 * SHRUNK
    scene = builtin_scene("toybox", "train", resolution=small, n_views=n_pictures)
    (folder / "images").mkdir(parents=True)
    top = (small - rows) // 2

    def write(index: int) -> None:
        picture = composite_over(scene.images.image(index), 1.0)[top : top + rows]
        image = Image.fromarray((picture * 255.0).byte().numpy())
        image = image.resize((small * SHRUNK, height), Image.Resampling.NEAREST)
        image.save(folder / "images" / f"{index:03d}.jpg", quality=85)

    with ThreadPoolExecutor(max_workers=2) as threads:
        list(threads.map(write, range(n_pictures)))
    focal = float(scene.cameras.focal[0, 0]) * SHRUNK
    frames = [
        {"file_path": f"images/{index:03d}.jpg", "transform_matrix": [*pose.tolist(), BOTTOM]}
        for index, pose in enumerate(scene.cameras.camera_to_world)
    ]
    document = {"fl_x": focal, "fl_y": focal, "w": small * SHRUNK, "h": height, "aabb_scale": 1, "frames": frames}
    (folder / "transforms.json").write_text(json.dumps(document))
    return n_pictures * small * SHRUNK * height * 3


def train(folder: Path, work: Path, name: str, seconds: float) -> dict[str, Any]:
    """Train in a process of its own; its peak resident memory, how long it took, and what it reached."""
    command = [sys.executable, __file__, str(work / f"{name}.json"), "--train", str(folder), "--seconds", str(seconds)]
    start = time.monotonic()
    process = subprocess.Popen(command, env=os.environ | {"NERFTURBO_CACHE": str(work / "cache")})
    _, status, usage = os.wait4(process.pid, 0)
    if os.waitstatus_to_exitcode(status) != 0:
        raise SystemExit(f"{' '.join(command)} failed")
    unit = 1 if sys.platform == "darwin" else 1024
    found = {"peak_rss_bytes": usage.ru_maxrss * unit, "seconds": round(time.monotonic() - start, 1)}
    return found | json.loads((work / f"{name}.json").read_text())


def train_here(folder: Path, seconds: float) -> dict[str, Any]:
    """Open both splits, train for a while, and look at the pictures of one whole split once."""
    start = time.monotonic()
    options = LoadOptions(cache="disk")
    scene, test = load_scene(folder, "train", options=options), load_scene(folder, "test", options=options)
    opened = time.monotonic() - start
    trainer = Trainer.for_scene(scene, time_limit=seconds)
    losses: list[float] = []
    trainer.callbacks.append(lambda trainer, record: losses.append(record.loss))
    summary = trainer.fit()
    mean = sum(float(test.images.image(index).mean()) for index in range(len(test))) / len(test)
    values = {"opened_seconds": round(opened, 1), "steps": summary.steps, "rays": summary.rays}
    return values | {"loss": [losses[0], sum(losses[-10:]) / len(losses[-10:])], "test_mean": mean}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("output", type=Path)
    parser.add_argument("--pictures", type=int, default=200)
    parser.add_argument("--width", type=int, default=3840)
    parser.add_argument("--seconds", type=float, default=60.0)
    parser.add_argument("--train", type=Path, help=argparse.SUPPRESS)
    args = parser.parse_args()
    if args.train is not None:
        args.output.write_text(json.dumps(train_here(args.train, args.seconds)))
        return
    with tempfile.TemporaryDirectory() as name:
        work = Path(name)
        n_bytes = write_scene(work / "scene", args.pictures, args.width)
        print(f"{args.pictures} pictures, {n_bytes / 2**30:.2f} GiB of pixels", flush=True)
        rows = {run: train(work / "scene", work, run, args.seconds) for run in ("first", "again")}
    values = {"pictures": args.pictures, "width": args.width, "pixel_bytes": n_bytes, "runs": rows}
    protocol = (
        "peak resident memory (ru_maxrss) of a process that opens both splits, trains and reads the test pictures"
    )
    record = Record("train from a memory-mapped pool", protocol, 0, values)
    print(json.dumps(values, indent=2))
    write_json(args.output, record)


if __name__ == "__main__":
    torch.set_num_threads(2)
    main()
