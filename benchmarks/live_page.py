"""What the live page costs training: steps a second without it, with an idle client, and with a camera that moves.

    python benchmarks/live_page.py benchmarks/results/h200/live_page.json [SCENE] [--seconds 20] [--rounds 3]

The client stands in for a browser: pictures are encoded for it and dropped, and in the moving phase it sends a new
camera thirty times a second.
"""

from __future__ import annotations

import argparse
import json
import statistics
import threading
import time
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace

import numpy as np
import torch

from nerfturbo.bench.record import Record, machine, write_json
from nerfturbo.config import DataConfig
from nerfturbo.data.scene import open_scenes
from nerfturbo.data.scene_defaults import fitted_config
from nerfturbo.presets import preset
from nerfturbo.training.callbacks import MetricsLog
from nerfturbo.training.trainer import Trainer
from nerfturbo.viewer.page import LivePage, ViewedTraining
from nerfturbo.viewer.painter import Painter, View
from nerfturbo.viewer.panel import Client, SceneFacts

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


class _Looker(Client):
    """One that looks, without controls."""

    def __init__(self) -> None:
        self.handle, self.painter, self.view = _Handle(), Painter(), None  # type: ignore[assignment]
        self.moved, self.moving, self.fresh, self.lock = 0.0, False, False, threading.Lock()
        self.quality, self.cells_on = (SimpleNamespace(value=value) for value in (1280, False))  # type: ignore
        self.note = SimpleNamespace(content="")  # type: ignore[assignment]


class Rehearsal:
    """A training with a page and one client, run for some seconds in one phase or another."""

    def __init__(self, scene: str, device: str) -> None:
        train, test = open_scenes(scene)
        config = preset("auto", device)
        config = replace(config, data=DataConfig(scene), train=replace(config.train, steps=1_000_000_000))
        self.config, _ = fitted_config(config, train)
        self.name, self.poses = train.name, test.cameras.camera_to_world.cpu()
        self.trainer = Trainer(self.config, train, device=device)
        self.page = LivePage(SceneFacts(train.name, train, test, train.aabb, Path("."), True))
        self.client = _Looker()
        self.phase, self.ends, self.over = "warm-up", 0.0, threading.Event()
        log = MetricsLog(None, every_steps=20)
        self.trainer.callbacks += [log, ViewedTraining(self.page, log, Path(".")), self._until]
        threading.Thread(target=self._move, daemon=True).start()

    def _move(self) -> None:
        place = 0
        while not self.over.wait(1.0 / 30.0):
            if self.phase == "moving" or self.client.view is None:
                place = (place + 1) % len(self.poses)
                view = self.page._panel.dress(View(self.poses[place], 0.7, 1.6))
                with self.page._lock:
                    self.client.view, self.client.moved = view, time.monotonic()
                    self.client.fresh = self.client.moving = True

    def _until(self, trainer: Trainer, record: object) -> None:
        if time.monotonic() >= self.ends:
            trainer.stop("callback")

    def run(self, phase: str, seconds: float) -> dict[str, float]:
        self.phase = phase
        self.page._clients = {} if phase in ("alone", "warm-up") else {0: self.client}
        first, sent, begun = self.trainer.step, self.page.frames_sent, time.monotonic()
        self.ends, self.trainer.should_stop = begun + seconds, False
        self.trainer.fit()
        rate = (self.trainer.step - first) / (time.monotonic() - begun)
        return {"steps_per_second": rate, "pictures": self.page.frames_sent - sent}

    def close(self) -> None:
        self.over.set()
        self.page.close()


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("output", type=Path)
    parser.add_argument("scene", nargs="?", default="toybox")
    parser.add_argument("--seconds", type=float, default=20.0)
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--device", default="cuda" if torch.cuda.is_available() else "cpu")
    args = parser.parse_args()
    rehearsal = Rehearsal(args.scene, args.device)
    rehearsal.run("warm-up", args.seconds)
    rehearsal.run("moving", min(args.seconds, 10.0))  # kernels of the renderer compile
    found: dict[str, list[dict[str, float]]] = {phase: [] for phase in PHASES}
    for turn in range(args.rounds):
        first = turn % len(PHASES)  # steps change while a scene is learned: no phase is always the first
        for phase in PHASES[first:] + PHASES[:first]:
            found[phase].append(rehearsal.run(phase, args.seconds))
            print(phase, found[phase][-1], flush=True)
    rehearsal.close()
    rates = {phase: statistics.median(entry["steps_per_second"] for entry in runs) for phase, runs in found.items()}
    cost = {phase: 1.0 - rates[phase] / rates["alone"] for phase in ("idle", "moving")}
    values = {"scene": rehearsal.name, "seconds_each": args.seconds, "cost": cost, "steps_per_second": rates}
    values |= {"runs": found}
    print(json.dumps(values, indent=1))
    protocol = "median over rounds of steps a second of wall time; cost = 1 - rate / rate alone; share at its default"
    seed = rehearsal.config.train.seed
    write_json(args.output, Record("cost of the live page", protocol, seed, values, machine=machine(args.device)))


if __name__ == "__main__":
    main()
