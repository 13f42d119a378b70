"""What learning each photo's exposure, look and depth buys where it should: two scenes whose trouble is known.

    python benchmarks/photos.py exposed OUTPUT.json --scene toybox --downscale 3 --steps 350 --seeds 0 1
    python benchmarks/photos.py few OUTPUT.json --scene COLMAP_FOLDER --photos 12 --steps 400 --seeds 0 1

`exposed` multiplies the odds of every training picture's colours by known gains per channel, as a camera that meters
each photo for itself does, and scores test views as they were: without the switches, with exposure, with appearance,
and trained on the pictures as they were. `few` trains a COLMAP scene on few of its photos, with and without the depth
of its points, and scores the photos held out: PSNR, and how far the rays of their features end from the points, as the
median of |log(depth / distance)|.
"""

from __future__ import annotations

import argparse
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch

from nerfturbo.bench.record import Record, machine, write_json
from nerfturbo.config import Config, PhotoConfig
from nerfturbo.data.fitting import fitted_config
from nerfturbo.data.images import ImagePool
from nerfturbo.data.keypoints import load_keypoints
from nerfturbo.data.scene import Scene, hold_out, load_scene
from nerfturbo.evaluation.evaluate import choose_views, evaluate
from nerfturbo.presets import preset
from nerfturbo.rendering.model import NerfModel
from nerfturbo.training.trainer import Trainer

STRENGTH = 0.5  # of the gains, as a logarithm: one standard deviation
FEATURES = 4096  # that depth is measured at


def exposed(scene: Scene, seed: int) -> Scene:
    """The scene as a camera with a mind of its own would have taken it; gains have no mean over the photos."""
    gains = STRENGTH * torch.randn(len(scene), 1, 1, 3, generator=torch.Generator().manual_seed(seed))
    gains = gains - gains.mean(0, keepdim=True)
    pictures = []
    for index, gain in enumerate(gains):
        picture = scene.images.image(index).clone()
        odds = picture[..., :3] * gain.exp()
        picture[..., :3] = odds / (1.0 - picture[..., :3] + odds)
        pictures.append((picture * 255.0 + 0.5).to(torch.uint8))
    return replace(scene, images=ImagePool.from_images(torch.stack(pictures)))


def trained(config: Config, scene: Scene, photo: PhotoConfig, seed: int, args: argparse.Namespace) -> Trainer:
    config, _ = fitted_config(replace(config, photo=photo), scene)
    limits = {"steps": args.steps, "seed": seed}
    trainer = Trainer(replace(config, train=replace(config.train, **limits)), scene, device=args.device)
    trainer.fit()
    return trainer


def depth_error(model: NerfModel, test: Scene) -> float:
    """Median of |log(depth / distance)| over features of the test photos."""
    points = load_keypoints(test)
    some = torch.randperm(len(points), generator=torch.Generator().manual_seed(0))[:FEATURES]
    rays, distances = points.rays[some], points.distances[some]
    with torch.no_grad():
        depth = model.render_rays(rays).depth
    return float((depth.clamp(min=1e-6) / distances.to(depth)).log().abs().median())


def score(trainer: Trainer, test: Scene, *, depth: bool) -> dict[str, float]:
    with trainer.optimizer.averaged():
        model = trainer.model.eval()
        result = {"psnr": evaluate(model, test, with_ssim=False).psnr}
        return result | ({"depth_error": depth_error(model, test)} if depth else {})


def run(args: argparse.Namespace) -> list[dict[str, Any]]:
    base, rows = preset("auto", torch.device(args.device).type), []
    given = load_scene(args.scene, "train", downscale=args.downscale)
    if args.what == "exposed":
        test = load_scene(args.scene, "test", downscale=args.downscale)
        cases = {"": PhotoConfig(), "photo.exposure": PhotoConfig(exposure=True, lr=args.lr)}
        cases |= {"photo.appearance 8": PhotoConfig(appearance=8, lr=args.lr), "pictures as they were": PhotoConfig()}
    else:
        given, test = hold_out(given, 8)
        given = given.select(choose_views(len(given), args.photos))
        cases = {"": PhotoConfig(), "photo.depth-weight 0.05": PhotoConfig(depth_weight=0.05)}
    test = test.select(choose_views(len(test), args.views))
    for seed in args.seeds:
        for name, photo in cases.items():
            scene = exposed(given, seed) if args.what == "exposed" and name != "pictures as they were" else given
            trainer = trained(base, scene, photo, seed, args)
            rows.append({"case": name, "seed": seed, **score(trainer, test, depth=args.what == "few")})
            print(rows[-1], flush=True)
    return rows


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("what", choices=["exposed", "few"])
    parser.add_argument("output", type=Path)
    parser.add_argument("--scene", default="toybox")
    parser.add_argument("--downscale", type=int, default=1)
    parser.add_argument("--photos", type=int, default=12)
    parser.add_argument("--steps", type=int, default=350)
    parser.add_argument("--seeds", type=int, nargs="*", default=[0, 1])
    parser.add_argument("--views", type=int, default=8)
    parser.add_argument("--lr", type=float, default=PhotoConfig().lr)
    parser.add_argument("--device", default="cuda" if torch.cuda.is_available() else "cpu")
    args = parser.parse_args()
    rows = run(args)
    protocol = f"{args.steps} steps of the preset that auto picks, pictures / {args.downscale}, {args.views} test views"
    what = f"{args.what}: {Path(args.scene).name}"
    write_json(args.output, Record(what, protocol, args.seeds[0], rows, machine=machine(args.device)))


if __name__ == "__main__":
    main()
