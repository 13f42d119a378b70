"""What the live page costs training: steps a second without it, with an idle client, and with a camera that moves.

    python benchmarks/live_page.py benchmarks/h200_live_page.json [SCENE] [--seconds 20] [--rounds 3]

The client stands in for a browser: pictures are encoded for it and dropped, and in the moving phase it sends a new
camera thirty times a second.
"""

from __future__ import annotations

import argparse
import json
import statistics
import threading
import time
from pathlib import Path

import numpy as np
import torch

from nerfturbo.bench.record import Record, machine, write_json
from nerfturbo.cli.scenes import open_scenes
from nerfturbo.config import DataConfig
from nerfturbo.data.fitting import fitted_config
from nerfturbo.presets import preset
from nerfturbo.training.callbacks import MetricsLog
from nerfturbo.training.trainer import Trainer
from nerfturbo.viewer.page import LivePage, _Client
from nerfturbo.viewer.painter import Painter, View
from nerfturbo.viewer.panel import SceneFacts
from nerfturbo.viewer.training import ViewedTraining

PHASES = ("alone", "idle", "moving")


class _Scene:
    """Takes pictures as a browser's connection would: encoded, then dropped."""

    def __init__(self) -> None:
        self.bytes = 0

    def set_background_image(self, image: np.ndarray, *, format: str, jpeg_quality: int) -> None:
        import io

        from PIL import Image

        buffer = io.BytesIO()
        Image.fromarray(image).save(buffer, "JPEG", quality=jpeg_quality)
        self.bytes += buffer.tell()


class _Handle:
    def __init__(self) -> None:
        self.scene = _Scene()


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("output", type=Path)
    parser.add_argument("scene", nargs="?", default="toybox")
    parser.add_argument("--seconds", type=float, default=20.0)
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--device", default="cuda" if torch.cuda.is_available() else "cpu")
    args = parser.parse_args()
    train, test = open_scenes(args.scene, 1)
    from dataclasses import replace

    config = preset("auto", args.device)
    config = replace(config, data=DataConfig(args.scene), train=replace(config.train, steps=1_000_000_000))
    config, _ = fitted_config(config, train)
    trainer = Trainer(config, train, device=args.device)
    page = LivePage(SceneFacts(train.name, train, test, train.aabb, Path("."), True))
    log = MetricsLog(None, every_steps=20)
    client = _Client(_Handle(), Painter())  # type: ignore[arg-type]
    phase = "warm-up"
    poses, stop = test.cameras.camera_to_world.cpu(), threading.Event()

    def move() -> None:
        place = 0
        while not stop.wait(1.0 / 30.0):
            if phase == "moving" or client.view is None:
                place = (place + 1) % len(poses)
                view = page._panel.dress(View(poses[place], 0.7, 1.6))
                with page._lock:
                    client.view, client.moved, client.fresh, client.moving = view, time.monotonic(), True, True

    threading.Thread(target=move, daemon=True).start()
    ends, counts = 0.0, {name: [] for name in PHASES}
    trainer.callbacks += [log, ViewedTraining(page, log, Path("."))]

    def until(_, record) -> None:
        if time.monotonic() >= ends:
            trainer.stop("callback")

    trainer.callbacks.append(until)

    def run(name: str, seconds: float) -> float:
        nonlocal phase, ends
        phase = name
        page._clients = {} if name in ("alone", "warm-up") else {0: client}
        first, begun = trainer.step, time.monotonic()
        ends, trainer.should_stop = begun + seconds, False
        trainer.fit()
        return (trainer.step - first) / (time.monotonic() - begun)

    run("warm-up", args.seconds)
    run("moving", min(args.seconds, 10.0))  # kernels of the renderer compile
    for _ in range(args.rounds):
        for name in PHASES:
            sent = page.frames_sent
            counts[name].append({"steps_per_second": run(name, args.seconds), "pictures": page.frames_sent - sent})
    stop.set()
    page.close()
    rates = {name: statistics.median(entry["steps_per_second"] for entry in found) for name, found in counts.items()}
    cost = {name: 1.0 - rates[name] / rates["alone"] for name in ("idle", "moving")}
    values = {
        "scene": train.name,
        "seconds_each": args.seconds,
        "cost": cost,
        "steps_per_second": rates,
        "runs": counts,
    }
    print(json.dumps(values, indent=1))
    protocol = "median over rounds of steps a second of wall time; cost = 1 - rate / rate alone; share at its default"
    write_json(
        args.output,
        Record("cost of the live page", protocol, config.train.seed, values, machine=machine(args.device)),
    )


if __name__ == "__main__":
    main()
