"""What a pretrained field is worth: steps and seconds to a PSNR with and without `--init-from`.

    python benchmarks/pretrained.py --output benchmarks/results/cpu/pretrained.json
    python benchmarks/pretrained.py --device cuda --preset ngp-cpu --output benchmarks/results/h200/pretrained.json

A field is trained on the toybox. Then other scenes are trained, from random numbers and from that field: the toybox
with a ball of another colour and without a crayon (`recoloured`), with another ball moved besides (`moved`), with a
cone moved too (`edited`), and the armillary sphere.
Test views are scored along the way, the clock stopped. `--zoo FILE` also writes the field as one safetensors file; the
zoo's entry is

    python benchmarks/pretrained.py --scenes --eval-views 20 --every 1500 --zoo nerfturbo/zoo/toybox-cpu.safetensors
"""

from __future__ import annotations

import argparse
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any

import torch

from nerfturbo.bench.record import Record, machine, write_json
from nerfturbo.config import Config
from nerfturbo.data.builtin import builtin_scene
from nerfturbo.data.builtin.render import render_views
from nerfturbo.data.builtin.scenes import TEAL, Material, pack, toybox
from nerfturbo.data.images import ImagePool
from nerfturbo.data.scene import Scene, Split
from nerfturbo.evaluation.evaluate import choose_views, evaluate
from nerfturbo.presets import preset
from nerfturbo.training.step import StepRecord
from nerfturbo.training.trainer import Trainer
from nerfturbo.training.warm_start import KEEP, save_field

RED_BALL, BEACH_BALL, CONE = 3, 4, 5  # places in the toybox's list of solids


@dataclass(frozen=True)
class Point:
    """A score on the way."""

    step: int
    seconds: float
    psnr: float


SPLITS: tuple[Split, Split] = ("train", "test")
EDITS = ("recoloured", "moved", "edited")  # each does what the one before does, and more


def played_with(split: Split, resolution: int, edit: str = "edited") -> Scene:
    """The toybox, edited: the red ball is teal now, a crayon is gone, the beach ball and the cone stand elsewhere."""
    scene = builtin_scene("toybox", split, resolution=resolution)
    solids = toybox()
    ball, beach, cone = (solids[index] for index in (RED_BALL, BEACH_BALL, CONE))
    teal = Material(TEAL, highlight=0.9, shininess=90.0, reflection=1.0)
    solids[RED_BALL] = replace(ball, material=teal)
    if edit != "recoloured":
        solids[BEACH_BALL] = replace(beach, center=(beach.center[0] - 0.02, beach.center[1] + 0.14, beach.center[2]))
    if edit == "edited":
        solids[CONE] = replace(cone, center=(cone.center[0] - 0.12, cone.center[1] - 0.26, cone.center[2]))
    cameras = scene.cameras
    tables = pack(solids[:-2])
    pictures = render_views([tables], cameras.camera_to_world.double().numpy(), float(cameras.focal[0, 0]), resolution)
    return replace(scene, name=f"toybox, {edit}", images=ImagePool.from_images(torch.from_numpy(pictures)))


def train(
    config: Config, scenes: tuple[Scene, Scene], args: argparse.Namespace, source: Path | str | None
) -> tuple[Trainer, list[Point]]:
    points: list[Point] = []
    views = choose_views(len(scenes[1]), args.eval_views)

    def score(trainer: Trainer) -> None:
        with trainer.optimizer.averaged():
            found = evaluate(trainer.model, scenes[1], views=views, with_ssim=False)
        points.append(Point(trainer.step, trainer.train_seconds, found.psnr))

    def follow(trainer: Trainer, record: StepRecord) -> None:
        if record.step >= len(points) * args.every or record.step >= config.train.steps:
            with trainer.clock_stopped():
                score(trainer)

    trainer = Trainer(config, scenes[0], device=args.device, callbacks=[follow])
    if source is not None:
        trainer.warm_start(source, keep=args.keep)
    score(trainer)
    trainer.fit()
    return trainer, points


def reached(points: list[Point], target: float) -> Point | None:
    return next((point for point in points if point.psnr >= target), None)


def compare(plain: list[Point], begun: list[Point], targets: list[float]) -> list[dict[str, Any]]:
    rows = []
    for target in targets:
        one, two = reached(plain, target), reached(begun, target)
        row: dict[str, Any] = {"psnr": target, "plain": one and asdict(one), "pretrained": two and asdict(two)}
        if one and two:
            row["share_of_steps"] = two.step / one.step
            row["share_of_seconds"] = two.seconds / one.seconds
        rows.append(row)
    return rows


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--device", default="cpu")
    parser.add_argument("--preset", default="auto")
    parser.add_argument("--steps", type=int, default=1500, help="of every training")
    parser.add_argument("--every", type=int, default=32, help="steps between scores")
    parser.add_argument("--resolution", type=int, default=200)
    parser.add_argument("--eval-views", type=int, default=5)
    parser.add_argument("--targets", type=float, nargs="+", default=[24.0, 26.0, 28.0, 30.0])
    parser.add_argument("--scenes", nargs="*", choices=(*EDITS, "armillary"), default=[*EDITS, "armillary"])
    parser.add_argument("--source", help="begin from this run, file or zoo:NAME instead of training the first field")
    parser.add_argument("--keep", type=float, default=KEEP, help="of the features, as --init-keep")
    parser.add_argument("--rate", type=float, default=1.0, help="times the preset's learning rate")
    parser.add_argument("--zoo", type=Path, help="also write the first field as one file")
    parser.add_argument("--output", type=Path, default=Path("pretrained.json"))
    args = parser.parse_args()
    config = preset(args.preset, torch.device(args.device).type)
    config = replace(config, train=replace(config.train, steps=args.steps, time_limit=None))
    config = replace(config, optim=replace(config.optim, lr=args.rate * config.optim.lr))

    def pair(name: str) -> tuple[Scene, Scene]:
        made = {"resolution": args.resolution}
        return builtin_scene(name, "train", **made), builtin_scene(name, "test", **made)

    path = args.zoo or args.output.with_suffix(".safetensors")
    values: dict[str, Any] = {"source": args.source, "keep": args.keep, "rate": args.rate}
    if args.source is None:
        first, points = train(config, pair("toybox"), args, None)
        with first.optimizer.averaged():
            psnr = f"{points[-1].psnr:.1f} dB on {args.eval_views} test views"
            about = {"scene": "builtin:toybox", "preset": config.preset, "steps": str(args.steps), "psnr": psnr}
            save_field(first.model, path, about=about)
        print(f"toybox: {points[-1].psnr:.2f} dB after {args.steps} steps; {path}: {path.stat().st_size / 1e6:.2f} MB")
        values["source"] = {"scene": "toybox", "psnr": points[-1].psnr, "bytes": path.stat().st_size}
    for name in args.scenes:
        edited = [played_with(split, args.resolution, name) for split in SPLITS] if name in EDITS else pair(name)
        scenes = (edited[0], edited[1])
        plain = train(config, scenes, args, None)[1]
        begun = train(config, scenes, args, args.source or path)[1]
        rows = compare(plain, begun, args.targets)
        values[name] = {"targets": rows, "plain": [asdict(p) for p in plain], "pretrained": [asdict(p) for p in begun]}
        for row in rows:
            print(name, row, flush=True)
    if args.zoo is None and args.source is None:
        path.unlink()
    protocol = (
        f"{args.steps} steps each with the same schedule and seed; {args.eval_views} test views every {args.every} "
        "steps, the clock stopped; steps and seconds to the first score at or above each target"
    )
    record = Record("a pretrained field against random numbers", protocol, 0, values, machine(args.device))
    print(write_json(args.output, record))


if __name__ == "__main__":
    main()
