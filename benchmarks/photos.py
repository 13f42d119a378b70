"""What learning each photo's exposure, look and depth buys where it should: two scenes whose trouble is known.

    python benchmarks/photos.py exposed OUTPUT.json --scene toybox --downscale 3 --steps 350 --seeds 0 1
    python benchmarks/photos.py few OUTPUT.json --scene COLMAP_FOLDER --photos 10 --steps 300 --seeds 0 1 2
    python benchmarks/photos.py few OUTPUT.json --scene toybox --photos 5 --steps 300 --seeds 0 1 2

`exposed` multiplies the odds of every training picture's colours by known gains per channel, as a camera that meters
each photo for itself does, and scores views that were held out, as they were: without the switches, with exposure, with
appearance; and the same trained on the pictures as they were. `right_halves` is what the literature reports: exposure
or look fitted to the left half of each view, PSNR of the right half; `plain_right_halves` is that half without a fit.

`few` trains a COLMAP scene on few of its photos, with and without the depth of its points, or a built-in scene with and
without exact depths at random places of its pictures. Scored are photos held out, by PSNR, and the rays through their
features by where they end; the points of these are held out too, every fourth of COLMAP's. `depth_error` is the median
of |log(depth / distance)|, `there` the share of the rays' light that ends within a tenth of the distance.
"""

from __future__ import annotations

import argparse
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch

from exact_depth import exact_keypoints
from nerfturbo.bench.record import Record, machine, write_json
from nerfturbo.config import Config, LossConfig, PhotoConfig
from nerfturbo.data.images import ImagePool
from nerfturbo.data.keypoints import TRAINED_PHOTOS, Keypoints, load_keypoints
from nerfturbo.data.scene import Scene, hold_out, is_builtin, load_scene
from nerfturbo.data.scene_defaults import fitted_config
from nerfturbo.evaluation.align import right_halves
from nerfturbo.evaluation.evaluate import Evaluation, choose_views, evaluate, score_view, truth_image
from nerfturbo.ops.packed import packed_sum
from nerfturbo.presets import preset
from nerfturbo.rendering import photos
from nerfturbo.rendering.model import NerfModel
from nerfturbo.training.trainer import Trainer

STRENGTH = 0.5  # of the gains, as a logarithm: one standard deviation
EXACT_FEATURES = 200  # places per picture of a built-in scene
HELD_OUT_POINTS = 4  # every fourth point is never trained with
NEAR = 0.1  # of the distance
UNTOUCHED = "pictures as they were"
FITTING_STEPS = 100


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


def trained(config: Config, scene: Scene, args: argparse.Namespace, known: Keypoints | None = None) -> Trainer:
    config, _ = fitted_config(config, scene, auto=preset("auto", torch.device(args.device).type))
    config = replace(config, train=replace(config.train, steps=args.steps))
    trainer = Trainer(config, replace(scene, keypoints=known), device=args.device)
    trainer.fit()
    return trainer


def known_depths(given: Scene, test: Scene) -> tuple[Keypoints, Keypoints]:
    """Features of the training photos to train with, and those of held-out photos to score at, of other points."""
    if is_builtin(given.source):
        return exact_keypoints(given, EXACT_FEATURES, seed=0), exact_keypoints(test, EXACT_FEATURES, seed=1)
    known, asked = load_keypoints(given, min_photos=TRAINED_PHOTOS), load_keypoints(test)
    assert known.points is not None and asked.points is not None
    return known[known.points % HELD_OUT_POINTS > 0], asked[asked.points % HELD_OUT_POINTS == 0]


def depth_scores(model: NerfModel, points: Keypoints) -> dict[str, float]:
    points = points.to(model.device)
    with torch.no_grad():
        out = model.render_rays(points.rays)
    error = (out.depth.clamp(min=1e-6) / points.distances).log().abs()
    samples = out.samples
    assert samples is not None
    away = (samples.midpoints() / points.distances[samples.ray_indices.long()] - 1.0).abs()
    there = packed_sum(out.weights * (away < NEAR).float(), samples.offsets)
    return {"depth_error": float(error.median()), "there": float(there.mean())}


def right_scores(model: NerfModel, test: Scene) -> dict[str, float]:
    """PSNR of the views' right halves, and where looks were learned, in those of their left halves."""
    if model.photos is not None:
        fitted, plain = (right_halves(model, test, steps=steps).psnr for steps in (FITTING_STEPS, 0))
        return {"plain_right_halves": plain, "right_halves": fitted}
    scores = []
    for index in range(len(test)):
        truth, half = truth_image(test, index, device=model.device), int(test.cameras.size[index, 0]) // 2
        rgb = model.render_image(test.cameras, index).rgb[:, half:]
        scores.append(score_view(index, rgb, truth[:, half:], torch.ones_like(truth[:, half:, 0], dtype=torch.bool)))
    return {"plain_right_halves": Evaluation.of(scores).psnr}


def score(trainer: Trainer, test: Scene, points: Keypoints | None = None) -> dict[str, float]:
    with trainer.optimizer.averaged():
        model = trainer.model.eval()
        result = {"psnr": evaluate(model, test, with_ssim=False).psnr}
        return result | (right_scores(model, test) if points is None else depth_scores(model, points))


def run(args: argparse.Namespace) -> list[dict[str, Any]]:
    base, rows = preset("auto", torch.device(args.device).type), []
    given, known, asked = load_scene(args.scene, "train", downscale=args.downscale), None, None
    if is_builtin(args.scene):
        test = load_scene(args.scene, "test", downscale=args.downscale)
    else:
        given, test = hold_out(given, 8)
    test = test.select(choose_views(len(test), args.views))
    if args.what == "exposed":
        cases = {"": {}, "photo.exposure": {"photo": PhotoConfig(exposure=True)}}
        cases |= {"photo.appearance 8": {"photo": PhotoConfig(appearance=8)}}
        cases |= {f"{UNTOUCHED} {name}".strip(): values for name, values in cases.items()}
    else:
        given = given.select(choose_views(len(given), args.photos))
        known, asked = known_depths(given, test)
        cases = {"": {}} | {f"loss.depth {weight:g}": {"loss": LossConfig(depth=weight)} for weight in args.weights}
    for seed in args.seeds:
        for name, values in cases.items():
            scene = exposed(given, seed) if args.what == "exposed" and not name.startswith(UNTOUCHED) else given
            config = replace(base, **values, train=replace(base.train, seed=seed))
            trainer = trained(config, scene, args, known)
            rows.append({"case": name, "seed": seed, **score(trainer, test, asked)})
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
    parser.add_argument("--weights", type=float, nargs="*", default=[0.05], help="of depth, for few")
    parser.add_argument("--lr", type=float, default=photos.PHOTO_LR, help="of exposures and appearances")
    parser.add_argument("--device", default="cuda" if torch.cuda.is_available() else "cpu")
    args = parser.parse_args()
    photos.PHOTO_LR = args.lr
    rows = run(args)
    protocol = f"{args.steps} steps of the preset that auto picks, pictures / {args.downscale}, {args.views} test views"
    protocol += f", {args.photos} photos" if args.what == "few" else ""
    what = f"{args.what}: {Path(args.scene).name}"
    write_json(args.output, Record(what, protocol, args.seeds[0], rows, machine=machine(args.device)))


if __name__ == "__main__":
    main()
