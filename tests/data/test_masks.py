"""Masks: found by each custom, respected in draws, losses and scores, at any size."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
import torch
from PIL import Image

from nerfturbo.data.batches import PixelSampler
from nerfturbo.data.images import MaskFile, find_mask, load_images, pack_flags
from nerfturbo.data.options import LoadOptions
from nerfturbo.data.scene import Scene, hold_out, load_scene
from nerfturbo.errors import InputError
from nerfturbo.evaluation.evaluate import evaluate
from nerfturbo.evaluation.metrics import psnr, ssim
from nerfturbo.ops import use_backend
from nerfturbo.ops.pixels import PixelMask, pack_words, unpack_words
from nerfturbo.rendering.model import NerfModel, SceneBounds
from nerfturbo.training import Trainer

from ..tiny import ball_scene, tiny_config
from . import folders
from .folders import HEIGHT, WIDTH
from .test_batches import mixed_scene


def left_half(width: int = WIDTH, height: int = HEIGHT) -> np.ndarray:
    """(height, width) bool: the left half counts."""
    flags = np.zeros((height, width), bool)
    flags[:, : width // 2] = True
    return flags


def save_mask(path: Path, counts: np.ndarray, mode: str = "L") -> None:
    path.parent.mkdir(parents=True, exist_ok=True)
    Image.fromarray(counts.astype(np.uint8) * 255).convert(mode).save(path)


def write_listed(folder: Path) -> Path:
    names = [f"view_{index:02d}.png" for index in range(folders.N_VIEWS)]
    folders.write_transforms(folder)
    document = json.loads((folder / "transforms.json").read_text())
    for name, frame in zip(names, document["frames"], strict=True):
        save_mask(folder / "mask_files" / name, left_half())
        frame["mask_path"] = f"./mask_files/{name}"
    (folder / "transforms.json").write_text(json.dumps(document))
    return folder


def write_dynamic(folder: Path) -> Path:
    folders.write_transforms(folder, aabb_scale=1)
    for picture in sorted((folder / "images").glob("view_*.png")):
        save_mask(picture.with_name(f"dynamic_mask_{picture.stem}.png"), ~left_half(), "RGB")
    return folder


def write_folder(folder: Path) -> Path:
    folders.write_colmap(folder)
    for index, picture in enumerate(sorted((folder / "images").iterdir())):
        ending = f"{picture.name}.png" if index % 2 else picture.name  # COLMAP's custom, and the plain one
        save_mask(folder / "masks" / ending, left_half(), "RGBA" if index % 3 else "1")
    return folder


@pytest.mark.parametrize("write", [write_listed, write_dynamic, write_folder])
@pytest.mark.parametrize("downscale", [1, 2])
def test_every_custom_is_found_and_masked_pixels_are_never_drawn(tmp_path: Path, write: object, downscale: int) -> None:
    folder = write(tmp_path / "scene")  # type: ignore[operator]
    scene = load_scene(folder, downscale=downscale)
    expected = torch.from_numpy(left_half(WIDTH // downscale, HEIGHT // downscale))
    for index in range(len(scene)):
        used = scene.used_pixels(index)
        assert used is not None and torch.equal(used, expected)
    assert any("masks for 14 of 14 images: 50.0%" in note for note in scene.notes)
    assert not any(note.startswith("warning") for note in scene.notes)
    batch = PixelSampler(scene, "cpu", 1).draw(0, 3000)
    assert batch.rays.camera_indices is not None
    points = batch.rays.origins + batch.rays.directions
    pixels, _ = scene.cameras.project(batch.rays.camera_indices, points)
    assert float(pixels[:, 0].max()) < WIDTH // downscale / 2 and float(pixels[:, 0].min()) > 0.0


def test_a_shrunk_pixel_counts_only_if_all_of_it_does(tmp_path: Path) -> None:
    Image.new("RGB", (8, 4)).save(tmp_path / "a.png")
    counts = np.ones((4, 8), bool)
    counts[1, 2] = False
    save_mask(tmp_path / "m.png", counts)
    pool = load_images([tmp_path / "a.png"], LoadOptions(2), masks=[MaskFile(tmp_path / "m.png")])
    expected = torch.ones(2, 4, dtype=torch.bool)
    expected[0, 1] = False
    mask = pool.image_mask(0)
    assert mask is not None and torch.equal(mask, expected)


def test_pictures_without_a_mask_count_whole(tmp_path: Path) -> None:
    for name in ("a", "b"):
        Image.new("RGB", (5, 3)).save(tmp_path / f"{name}.png")
    save_mask(tmp_path / "m.png", left_half(5, 3))
    paths = [tmp_path / "a.png", tmp_path / "b.png"]
    pool = load_images(paths, masks=[None, MaskFile(tmp_path / "m.png")])
    first, second = pool.image_mask(0), pool.image_mask(1)
    assert first is not None and bool(first.all()) and pool.mask is not None and pool.mask.n_drawable == 15 + 6
    assert second is not None and torch.equal(second, torch.from_numpy(left_half(5, 3)))
    assert load_images(paths, masks=[None, None]).mask is None
    chosen = pool.select([1]).image_mask(0)
    assert chosen is not None and torch.equal(chosen, second)


def test_bad_masks_are_named(tmp_path: Path) -> None:
    Image.new("RGB", (8, 4)).save(tmp_path / "a.png")
    save_mask(tmp_path / "tall.png", np.ones((8, 4), bool))
    with pytest.raises(InputError, match=r"tall\.png: expected a mask of its picture's shape, 8 x 4, got 4 x 8"):
        load_images([tmp_path / "a.png"], masks=[MaskFile(tmp_path / "tall.png")])
    save_mask(tmp_path / "black.png", np.zeros((4, 8), bool))
    with pytest.raises(InputError, match="at least one pixel"):
        load_images([tmp_path / "a.png"], masks=[MaskFile(tmp_path / "black.png")])
    (tmp_path / "broken.png").write_bytes(b"no")
    with pytest.raises(InputError, match=r"broken\.png"):
        load_images([tmp_path / "a.png"], masks=[MaskFile(tmp_path / "broken.png")])


@pytest.mark.parametrize("value", ["../outside.png", "missing.png", 7])
def test_listed_masks_must_be_there_and_inside(tmp_path: Path, value: object) -> None:
    folder = folders.write_transforms(tmp_path / "scene")
    save_mask(tmp_path / "outside.png", left_half())
    document = json.loads((folder / "transforms.json").read_text())
    document["frames"][3]["mask_path"] = value
    (folder / "transforms.json").write_text(json.dumps(document))
    with pytest.raises(InputError, match=r"frame 3: mask_path"):
        load_scene(folder)


def test_a_scene_without_masks_has_none(tmp_path: Path) -> None:
    folder = folders.write_transforms(tmp_path / "scene")
    assert load_scene(folder).images.mask is None and find_mask(folder, folder / "images" / "view_00.png") is None


def test_flags_are_packed_across_pictures() -> None:
    draw = np.random.default_rng(0)
    parts = [draw.random(n) < 0.5 for n in (1, 63, 64, 65, 200, 0, 7)]
    words = pack_flags(parts)
    flags = torch.from_numpy(np.concatenate(parts))
    assert torch.equal(words, pack_words(flags)) and torch.equal(unpack_words(words, 0, 400), flags)


def masked_ball(split: str = "train") -> Scene:
    """The ball; the lower half of every picture is red noise that its mask excludes."""
    scene = ball_scene(split, n_views=6)
    pixels = scene.images.pixels.view(6, 16, 16, 4).clone()
    pixels[:, 8:] = torch.randint(0, 256, pixels[:, 8:].shape, generator=torch.Generator().manual_seed(1)).byte()
    flags = torch.ones(6, 16, 16, dtype=torch.bool)
    flags[:, 8:] = False
    mask = PixelMask.of_words(pack_words(flags.reshape(-1)))
    return replace(scene, images=replace(scene.images, pixels=pixels.view(-1, 4), mask=mask))


def test_what_is_masked_has_no_influence_on_training() -> None:
    """Two scenes that differ in masked pixels alone give the same model, bit by bit."""
    first = masked_ball()
    black = first.images.pixels.view(6, 16, 16, 4).clone()
    black[:, 8:] = 0
    second = replace(first, images=replace(first.images, pixels=black.view(-1, 4)))
    tables = []
    for scene in (first, second):
        with use_backend("reference"):
            trainer = Trainer(tiny_config(steps=10), scene)
            trainer.fit()
        tables.append([value.clone() for value in trainer.model.parameters()])
    assert all(torch.equal(a, b) for a, b in zip(*tables, strict=True))


def test_what_is_masked_has_no_influence_on_scores() -> None:
    with use_backend("reference"):
        scene = masked_ball("test")
        model = NerfModel(tiny_config(), SceneBounds.of(scene))
        model.grid.set_occupied(torch.zeros(1, 8, 8, 8, dtype=torch.bool))  # renders white
        result = evaluate(model, scene)
        white = torch.ones(8, 16, 3)
        truth = scene.images.image(0)[:8]
        truth = truth[..., :3] * truth[..., 3:] + 1.0 - truth[..., 3:]
        assert result.views[0].psnr == pytest.approx(psnr(white, truth), abs=1e-4)
        blank = scene.images.pixels.view(6, 16, 16, 4).clone()
        blank[:, 8:] = 0
        other = replace(scene, images=replace(scene.images, pixels=blank.view(-1, 4)))
        assert evaluate(model, other).psnr == pytest.approx(result.psnr, abs=1e-5)


def test_ssim_counts_windows_around_used_pixels() -> None:
    draw = torch.Generator().manual_seed(0)
    truth, image = torch.rand(32, 32, 3, generator=draw), torch.rand(32, 32, 3, generator=draw)
    counts = torch.zeros(32, 32, dtype=torch.bool)
    counts[:, :16] = True
    half = image.clone()
    half[:, 16:] = truth[:, 16:]
    assert ssim(half, truth, counts) == pytest.approx(ssim(image, truth, counts), abs=1e-6)
    assert ssim(truth, truth, counts) == pytest.approx(1.0) and ssim(image, truth, counts) < 0.2


def test_a_view_that_is_masked_whole_is_not_scored() -> None:
    with use_backend("reference"):
        scene = masked_ball("test")
        flags = torch.ones(6, 16, 16, dtype=torch.bool)
        flags[2] = False
        mask = PixelMask.of_words(pack_words(flags.reshape(-1)))
        scene = replace(scene, images=replace(scene.images, mask=mask))
        model = NerfModel(tiny_config(), SceneBounds.of(scene))
        assert [view.index for view in evaluate(model, scene, with_ssim=False).views] == [0, 1, 3, 4, 5]


def test_masks_travel_with_held_out_views() -> None:
    scene = mixed_scene()
    flags = torch.rand(scene.images.n_pixels, generator=torch.Generator().manual_seed(3)) < 0.5
    mask = PixelMask.of_words(pack_words(flags))
    scene = replace(scene, images=replace(scene.images, mask=mask))
    kept, held = hold_out(scene, 2)
    for part, views in ((kept, [1]), (held, [0, 2])):
        for position, view in enumerate(views):
            here, there = part.images.image_mask(position), scene.images.image_mask(view)
            assert here is not None and there is not None and torch.equal(here, there)
