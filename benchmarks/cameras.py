"""What refining cameras and learning each photo's exposure, look and depth buy: a table of docs/studies/photos.md.

    python benchmarks/cameras.py perturbed SCENE OUTPUT.json [--seconds 20] [--device cuda] [--degrees 1] [--shift 0.02]
    python benchmarks/cameras.py captures OUTPUT.json SCENE... [--seconds 60] [--device cuda] [--cases refine exposure]

`perturbed` turns and moves every training camera of a scene by known amounts, or gives both axes of its lenses one
focal length, and trains with the true cameras, the wrong ones, and both learned. Test views are moved along with the
frame of the training cameras (the best similarity between the learned and the true ones); a second score fits each of
them to the scene. `captures` trains scenes as they are, with one technique at a time.
"""

from __future__ import annotations

import argparse
import json
import math
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch

from camera_errors import camera_errors, has_keypoints
from nerfturbo.bench.record import Record, machine, write_json
from nerfturbo.config import CameraConfig, Config, LossConfig, PhotoConfig
from nerfturbo.data.cameras import Cameras
from nerfturbo.data.images import save_image
from nerfturbo.data.scene import MissingSplitError, Scene, hold_out, load_scene
from nerfturbo.data.scene_defaults import fitted_config
from nerfturbo.evaluation.align import aligned_to, camera_changes
from nerfturbo.evaluation.camera_path import transform_poses
from nerfturbo.evaluation.evaluate import choose_views, evaluate, truth_image
from nerfturbo.fields.field import read_halves
from nerfturbo.presets import preset
from nerfturbo.rendering import photos as photos_module
from nerfturbo.rendering.photos import rotation_matrices
from nerfturbo.training.precision import half_dtype
from nerfturbo.training.trainer import Trainer

PIXELS = 3  # of a picture for one of the render
CASES: dict[str, dict[str, Any]] = {
    "as configured": {},
    "refine": {"cameras": CameraConfig(refine=True)},
    "coarse": {"cameras": CameraConfig(refine=True, coarse=True)},
    "refine, focal": {"cameras": CameraConfig(refine=True, focal=True)},
    "exposure": {"photo": PhotoConfig(exposure=True)},
    "appearance": {"photo": PhotoConfig(appearance=8)},
    "refine, exposure": {"cameras": CameraConfig(refine=True), "photo": PhotoConfig(exposure=True)},
    "depth": {"loss": LossConfig(depth=0.05)},
}


def perturbed(cameras: Cameras, degrees: float, shift: float, seed: int) -> Cameras:
    """Every camera turned by `degrees` and moved by `shift`, each in a random direction."""
    generator = torch.Generator().manual_seed(seed)
    axes, moves = (
        torch.nn.functional.normalize(torch.randn(len(cameras), 3, generator=generator), dim=-1) for _ in range(2)
    )
    turns = rotation_matrices(axes * math.radians(degrees))
    poses = cameras.camera_to_world
    moved = torch.cat([turns @ poses[:, :, :3], poses[:, :, 3:] + shift * moves[:, :, None]], dim=-1)
    return replace(cameras, camera_to_world=moved)


def one_focal(cameras: Cameras) -> Cameras:
    return replace(cameras, focal=cameras.focal.mean(-1, keepdim=True).expand(-1, 2).contiguous())


def open_both(source: str, downscale: int) -> tuple[Scene, Scene]:
    train = load_scene(source, "train", downscale=downscale)
    try:
        return train, load_scene(source, "test", downscale=downscale)
    except MissingSplitError:
        return hold_out(train, 8)


def train(config: Config, scene: Scene, args: argparse.Namespace) -> tuple[Trainer, float]:
    limit = {"time_limit": args.seconds, "steps": 1_000_000_000} if args.steps is None else {"steps": args.steps}
    limit["seed"] = args.seed
    start = preset("auto", torch.device(args.device).type)
    config, _ = fitted_config(replace(config, train=replace(config.train, **limit)), scene, auto=start)
    trainer = Trainer(config, scene, device=args.device)
    return trainer, trainer.fit().train_seconds


def score(trainer: Trainer, test: Scene, args: argparse.Namespace) -> dict[str, float]:
    """PSNR as the cameras are, and after each test view was fitted to the scene."""
    test = test.select(choose_views(len(test), args.views))
    with trainer.optimizer.averaged():
        model = trainer.model.eval()
        # As trained, but without the trainer's gradient buffers, which take no part in what follows.
        read_halves(model, half_dtype(trainer.config, trainer.device))
        result = {"psnr": evaluate(model, test, with_ssim=False).psnr}
        if args.align:
            result["psnr_aligned"] = evaluate(model, aligned_to(model, test, steps=args.align), with_ssim=False).psnr
    return result


def run_perturbed(args: argparse.Namespace) -> list[dict[str, Any]]:
    given, test = open_both(args.scene, args.downscale)
    unit = given.aabb.diagonal / (2.0 * math.sqrt(3.0))
    wrong = replace(given, cameras=perturbed(given.cameras, args.degrees, args.shift * unit, args.seed))
    away = float((given.cameras.positions - torch.tensor(given.aabb.center)).norm(dim=-1).mean())
    base, rows = preset("auto", torch.device(args.device).type), []
    rates = {"POSE_PIXELS": args.lr, "COARSE_PIXELS": args.lr, "FADE_IN": args.fade_in}
    for name, value in (rates | {"FIRST_LEVELS": args.first_levels}).items():
        if value is not None:
            setattr(photos_module, name, value)
    strip = [truth_image(test, 0)]
    cases = {
        "true cameras": (given, CameraConfig()),
        "true cameras, refined": (given, CameraConfig(refine=True)),
        "wrong cameras": (wrong, CameraConfig()),
        "wrong cameras, refined": (wrong, CameraConfig(refine=True)),
        "wrong cameras, coarse": (wrong, CameraConfig(refine=True, coarse=True)),
        "one focal length": (replace(given, cameras=one_focal(given.cameras)), CameraConfig()),
        "one focal length, learned": (replace(given, cameras=one_focal(given.cameras)), CameraConfig(focal=True)),
    }
    for name, (scene, cameras) in cases.items():
        if args.cases and name not in args.cases:
            continue
        trainer, seconds = train(replace(base, cameras=cameras), scene, args)
        photos = trainer.model.photos
        found = scene.cameras if photos is None else photos.refined(scene.cameras)
        before, after = (camera_errors(cameras, given.cameras, away) for cameras in (scene.cameras, found))
        poses = transform_poses(test.cameras.camera_to_world.double(), torch.linalg.inv(after.similarity)).float()
        seen = one_focal(test.cameras) if name.startswith("one") else test.cameras
        moved = replace(test, cameras=replace(seen, camera_to_world=poses))
        row = {
            "scene": given.name,
            "case": name,
            "seed": args.seed,
            "degrees_before": before.degrees,
            "degrees_after": after.degrees,
            "distance_before": before.distance / unit,
            "distance_after": after.distance / unit,
            "seen_before": before.seen / unit,
            "seen_after": after.seen / unit,
            **score(trainer, moved, args),
            "steps": trainer.step,
            "train_seconds": seconds,
        }
        rows.append(row)
        print(json.dumps(row), flush=True)
        with trainer.optimizer.averaged():
            strip.append(trainer.model.render_image(moved.cameras, 0).rgb.cpu())
    if args.picture is not None:
        shown = torch.cat(strip, dim=1).clamp(0.0, 1.0).repeat_interleave(PIXELS, 0).repeat_interleave(PIXELS, 1)
        save_image(args.picture, (shown * 255.0 + 0.5).to(torch.uint8))
    return rows


def run_captures(args: argparse.Namespace) -> list[dict[str, Any]]:
    base, rows = preset("auto", torch.device(args.device).type), []
    for source in args.scenes:
        given, test = open_both(source, args.downscale)
        for name, values in CASES.items():
            asked = not args.cases or name in args.cases
            if not asked or (name == "depth" and not has_keypoints(source)):
                continue
            config = replace(base, **values)
            trainer, seconds = train(config, given, args)
            row = {"scene": given.name, "case": name, **score(trainer, test, args)}
            row |= {"steps": trainer.step, "train_seconds": seconds, "resolution": given.cameras.size[0].tolist()}
            if trainer.model.photos is not None and config.cameras.learns:
                refined = replace(given, cameras=trainer.model.photos.refined(given.cameras))
                row |= camera_changes(given, refined)
            rows.append(row)
            print(json.dumps(row), flush=True)
    return rows


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    kinds = parser.add_subparsers(dest="kind", required=True)
    one = kinds.add_parser("perturbed")
    one.add_argument("scene")
    one.add_argument("output", type=Path)
    one.add_argument("--degrees", type=float, default=1.0)
    one.add_argument("--shift", type=float, default=0.03, help="in half sides of the scene's box")
    one.add_argument("--picture", type=Path, help="the first test view: truth, then every case")
    one.add_argument("--lr", type=float, help="peak learning rate of poses, in pixels")
    one.add_argument("--fade-in", type=float)
    one.add_argument("--first-levels", type=int)
    many = kinds.add_parser("captures")
    many.add_argument("output", type=Path)
    many.add_argument("scenes", nargs="+")
    for part in (one, many):
        part.add_argument("--seconds", type=float, default=20.0)
        part.add_argument("--steps", type=int, help="in place of a time limit")
        part.add_argument("--device", default="cpu")
        part.add_argument("--downscale", type=int, default=1)
        part.add_argument("--views", type=int, default=10, help="test views that are scored, evenly spaced")
        part.add_argument("--align", type=int, default=0, help="steps of fitting each test view before a second score")
        part.add_argument("--cases", nargs="*")
        part.add_argument("--seed", type=int, default=0)
    args = parser.parse_args()
    rows = run_perturbed(args) if args.kind == "perturbed" else run_captures(args)
    text = (
        "trained for the same time by the device's preset; white background; means of per-image PSNR; degrees and "
        "distances (of cameras, and of what they see at the distance of the scene's middle) are means over the "
        "training cameras after the best similarity to the true ones, distances in half sides of the box"
    )
    write_json(args.output, Record(f"cameras: {args.kind}", text, args.seed, rows, machine=machine(args.device)))


if __name__ == "__main__":
    main()
