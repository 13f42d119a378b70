"""Splats: pixels against the reference and closed forms, files that another parser reads, and a field as splats."""

from __future__ import annotations

import itertools
import math
import struct
from dataclasses import replace
from pathlib import Path
from typing import Literal

import numpy as np
import pytest
import torch
from torch import Tensor

from nerfturbo.data.builtin import builtin_scene
from nerfturbo.data.cameras import Cameras, look_at, transform_points
from nerfturbo.data.images import ImagePool
from nerfturbo.errors import InputError
from nerfturbo.evaluation.evaluate import compare
from nerfturbo.export import paced
from nerfturbo.export.splats import BASE, N_VALUES, OPACITY, POINT, REST, SCALES, TURN, cpu, make, raster
from nerfturbo.export.splats.files import placed, write_splats
from nerfturbo.export.splats.make import (
    as_pinholes,
    fit_colors,
    photo_through,
    picture,
    refine,
    seed,
    teacher_of,
    thin,
    through,
    undistorted,
)
from nerfturbo.ops import use_backend
from nerfturbo.ops.spherical_harmonics import spherical_harmonics
from nerfturbo.presets import preset
from nerfturbo.rendering.model import NerfModel
from nerfturbo.training.trainer import Trainer
from nerfturbo.types import Aabb

from ..evaluation.test_camera_path import similarity
from ..tiny import ball_scene
from .test_exports import HollowBall, make_model

PARTS = {"point": POINT, "base": BASE, "rest": REST, "opacity": OPACITY, "scales": SCALES, "turn": TURN}
C0 = 0.28209479177387814


def some_splats(n: int, *, scale: float = 0.15, key: int = 0) -> Tensor:
    """About the origin, one in ten behind the camera of `view`, from faint to opaque."""
    made = 0.3 * torch.randn(n, N_VALUES, generator=torch.Generator().manual_seed(key))
    made[:, POINT] *= 2.0
    made[::10, 0] += 4.0
    made[:, SCALES] += math.log(scale)
    made[:, OPACITY] *= 10.0
    made[:, TURN] += torch.tensor([1.0, 0.2, -0.5, 0.3])
    return made


def view(width: int = 75, height: int = 45) -> Cameras:
    eye = torch.tensor([[2.0, 1.0, 0.5]])
    return Cameras.pinhole(look_at(eye, torch.zeros(3)), width=width, height=height, field_of_view_x=1.0)


def reference(splats: Tensor, camera: Cameras) -> Tensor:
    return raster.composite(*raster.project(splats, camera), tuple(camera.size[0].tolist()))


Kernels = tuple[Literal["cpu", "triton"], torch.device]


@pytest.fixture(params=["cpu", "triton"])
def kernels(request: pytest.FixtureRequest) -> Kernels:
    """A backend and the device that it runs on here."""
    return request.param, request.getfixturevalue("kernel_device") if request.param == "triton" else torch.device("cpu")


def compared(splats: Tensor, camera: Cameras, kernels: Kernels) -> tuple[Tensor, Tensor]:
    """Pixels of kernels and the gradients that these give to splats, after a comparison with the reference."""
    (width, height), (backend, device), found = camera.size[0].tolist(), kernels, []
    weights = torch.randn(height, width, 4, generator=torch.Generator().manual_seed(1)).to(device)
    for way in ("reference", backend):
        values = splats.clone().to(device).requires_grad_()
        with use_backend(way):
            image = raster.render(values, camera.to(device))
            (image * weights).sum().backward()
        assert values.grad is not None
        found.append((image.detach(), values.grad))
    (truth, grads), (image, ours) = found
    torch.testing.assert_close(image, truth, rtol=1e-4, atol=1e-5)
    for name, part in PARTS.items():
        size = max(float(grads[:, part].abs().max()), 1e-9) if len(splats) else 1.0
        torch.testing.assert_close(ours[:, part] / size, grads[:, part] / size, rtol=1e-3, atol=1e-5, msg=name)
    return image, ours


def test_the_reference_has_the_gradients_of_its_values() -> None:
    splats, camera = some_splats(3, key=4).double(), view(19, 17)  # of four tiles
    splats[0, POINT] = torch.tensor([0.1, 0.0, 0.1])
    assert float(reference(splats, camera)[..., 3].max()) > 0.5
    assert torch.autograd.gradcheck(lambda one: reference(one, camera), splats.requires_grad_(), fast_mode=True)


@pytest.mark.parametrize(
    ("n", "width", "height", "scale"),
    [(120, 75, 45, 0.15), (40, 33, 65, 1.0), (500, 64, 32, 0.01), (7, 1, 1, 0.3), (1, 5, 3, 0.5), (0, 40, 3, 1.0)],
)
def test_kernels_give_the_pixels_and_gradients_of_the_reference(
    n: int, width: int, height: int, scale: float, kernels: Kernels, poisoned_empty: None
) -> None:
    image, grads = compared(some_splats(n, scale=scale), view(width, height), kernels)
    assert image.shape == (height, width, 4)
    assert n < 100 or min(float(grads[:, part].abs().max()) for part in PARTS.values()) > 1e-3
    assert n < 40 or 0.1 < float(image[..., 3].mean()) < 1.0


def test_nothing_is_learnt_behind_opaque_splats(kernels: Kernels, poisoned_empty: None) -> None:
    """More of them than a kernel looks at in one go, each more opaque than any may count."""
    wall = some_splats(1).repeat(90, 1)
    wall[:, OPACITY], wall[:, SCALES] = 9.0, torch.tensor([0.0, 0.3, -0.3])
    wall[:, POINT] = view().positions * torch.linspace(0.0, 0.4, 90)[:, None]
    image, grads = compared(wall, view(21, 19), kernels)
    assert float(image[..., 3].min()) > 0.989 and not grads[:40].any() and bool(grads[85:].abs().amax(-1).all())
    wall[:40, BASE] = math.nan  # which shows in what is looked at
    with use_backend(kernels[0]):
        assert torch.equal(raster.render(wall.to(kernels[1]), view(21, 19).to(kernels[1])), image)


def test_kernels_refuse_what_they_would_round(kernels: Kernels) -> None:
    splats = some_splats(3).double().to(kernels[1])
    with use_backend(kernels[0]), pytest.raises(InputError, match="float64"):
        raster.render(splats, view().to(kernels[1]))


@pytest.mark.gpu
def test_many_splats_on_a_gpu() -> None:
    """As the reference but where rounding moves an alpha across its least value; and the same bits every time."""
    camera, splats = view(512, 384).to("cuda"), some_splats(20_000, scale=0.02).cuda()
    weights = torch.randn(384, 512, 4, generator=torch.Generator().manual_seed(1)).cuda()
    found = []
    for backend in ("reference", "triton", "triton"):
        values = splats.clone().requires_grad_()
        with use_backend(backend):
            image = raster.render(values, camera)
            (gradient,) = torch.autograd.grad((image * weights).sum(), values)
        found.append((image.detach(), gradient))
    (truth, grads), (image, ours), again = found
    assert torch.equal(again[0], image) and torch.equal(again[1], ours)
    assert 0.1 < float(truth[..., 3].mean()) < 1.0
    off = (image - truth).abs()
    assert float(off.max()) < 0.02 and float((off > 1e-4).float().mean()) < 1e-3
    for name, part in PARTS.items():
        off, size = (ours - grads)[:, part].norm(), grads[:, part].norm()
        assert float(off) < 1e-2 * float(size), name


def test_nothing_behind_the_camera_is_drawn_and_tiles_change_no_pixel(monkeypatch: pytest.MonkeyPatch) -> None:
    splats, camera = some_splats(120), view()
    behind = camera.project(torch.zeros(120, dtype=torch.int64), splats[:, POINT])[1] < raster.NEAR
    assert 5 < int(behind.sum()) < 60
    whole = reference(splats, camera)
    torch.testing.assert_close(reference(splats[~behind], camera), whole)
    assert not reference(splats[behind], camera).any()
    shuffled = splats[torch.randperm(120, generator=torch.Generator().manual_seed(0))]
    torch.testing.assert_close(reference(shuffled, camera), whole)
    places, _ = camera.project(torch.zeros(120, dtype=torch.int64), splats[:, POINT])
    low, high = torch.tensor([13, 9]), torch.tensor([53, 39])
    near = (torch.maximum(low - places, places - high) < 0.149 * camera.focal).all(-1)
    part = reference(splats[near & ~behind], through(camera, (13, 9, 40, 30)))
    torch.testing.assert_close(part, reference(splats[near & ~behind], camera)[9:39, 13:53])
    for tile in (8, 64):
        monkeypatch.setattr(raster, "TILE", tile)
        torch.testing.assert_close(reference(splats, camera), whole)


@pytest.mark.parametrize("side", [(-1.0, 0.0), (1.0, 0.0), (0.0, -1.0), (0.0, 1.0)])
def test_splats_far_outside_the_picture_veil_nothing(side: tuple[float, float]) -> None:
    """The largest would cover all of it, by a derivative that holds at their middle alone."""
    camera, splat = view(60, 40), some_splats(2)[1:]
    splat[:, SCALES], splat[:, OPACITY] = 0.0, 5.0
    border = torch.tensor(side) * 0.5 * camera.size / camera.focal
    for beyond, drawn in ((0.14, True), (0.16, False)):
        local = torch.cat([border[0] + torch.tensor(side) * beyond, torch.ones(1)]) * torch.tensor([1.0, -1.0, -1.0])
        splat[:, POINT] = camera.camera_to_world[0, :, :3] @ local + camera.positions[0]
        assert bool(reference(splat, camera).any()) is drawn


@pytest.mark.parametrize("backend", ["reference", "cpu"])
def test_a_ball_of_splat_is_a_gaussian_of_its_size_and_colour(backend: Literal["reference", "cpu"]) -> None:
    """On the axis the projection is exact: deviation focal * sigma / depth, and 0.3 pixels squared more."""
    camera, sigma, opacity = view(41, 41), 0.05, 0.7
    splat = torch.zeros(1, N_VALUES)
    splat[:, SCALES], splat[:, OPACITY] = math.log(sigma), math.log(opacity / (1.0 - opacity))
    splat[:, TURN], splat[:, BASE] = torch.tensor([0.3, 0.5, -0.2, 0.4]), (torch.tensor([0.9, 0.5, 0.1]) - 0.5) / C0
    depth, focal = float(camera.positions[0].norm()), float(camera.focal[0, 0])
    row, column = torch.meshgrid(torch.arange(41) - 20.0, torch.arange(41) - 20.0, indexing="ij")
    alpha = opacity * torch.exp(-0.5 * (row**2 + column**2) / ((focal * sigma / depth) ** 2 + 0.3))
    alpha = torch.where(alpha < 1.0 / 255.0, 0.0, alpha)
    wall = splat.repeat(50, 1)
    wall[:, OPACITY], wall[:, 0] = 8.0, torch.linspace(-0.1, 0.1, 50)
    with use_backend(backend):
        image = raster.render(splat, camera)
        torch.testing.assert_close(image[..., 3], alpha, atol=1e-4, rtol=1e-3)
        torch.testing.assert_close(image[20, 20, :3], alpha[20, 20] * torch.tensor([0.9, 0.5, 0.1]))
        assert 0.999 < float(raster.render(wall, camera)[20, 20, 3]) <= 1.0 - 0.999 * raster.LAST_LIGHT


def test_moved_splats_look_the_same_to_a_camera_that_moved_along() -> None:
    """Positions, sizes, turns and the harmonics: they would show another colour if they stayed behind."""
    splats, camera, move = some_splats(200), view(), similarity()
    splats[:, REST] *= 2.0
    pose, scale = camera.camera_to_world[0].double(), float(move[:3, :3].det()) ** (1.0 / 3.0)
    turned = torch.cat([move[:3, :3] / scale @ pose[:, :3], transform_points(pose[:, 3][None], move).T], dim=1)
    there = replace(camera, camera_to_world=turned.float()[None])
    truth = reference(splats, camera)
    far = splats[:, POINT].norm(dim=-1) < 2.0  # NEAR is a length, and does not move along
    torch.testing.assert_close(
        reference(placed(splats[far], move), there), reference(splats[far], camera), atol=2e-3, rtol=1e-3
    )
    plain = placed(splats[far], move)
    plain[:, REST] = splats[far][:, REST]
    assert float((reference(plain, there) - truth).abs().max()) > 0.02


def parse_ply(path: Path) -> dict[str, np.ndarray]:
    """As a viewer reads it: by the names and types of the header."""
    content = path.read_bytes()
    header, _, body = content.partition(b"end_header\n")
    lines = header.decode("ascii").splitlines()
    assert lines[:2] == ["ply", "format binary_little_endian 1.0"]
    (count,) = (int(line.split()[2]) for line in lines if line.startswith("element vertex"))
    names = [line.split()[2] for line in lines if line.startswith("property float ")]
    assert len(body) == 4 * count * len(names) and len(names) == sum(line.startswith("property") for line in lines)
    numbers = struct.unpack(f"<{count * len(names)}f", body)
    return {name: np.array(numbers[k :: len(names)]) for k, name in enumerate(names)}


@pytest.mark.parametrize("to_original", [None, similarity()], ids=["own", "moved"])
def test_a_ply_has_the_layout_that_viewers_open(tmp_path: Path, to_original: Tensor | None) -> None:
    splats = some_splats(23)
    write_splats(tmp_path / "a.ply", splats, to_original)
    found = parse_ply(tmp_path / "a.ply")
    numbered = [("f_dc", 3), ("f_rest", 45), ("opacity", 0), ("scale", 3), ("rot", 4)]
    names = [[f"{name}_{k}" for k in range(count)] or [name] for name, count in numbered]
    assert list(found) == ["x", "y", "z", "nx", "ny", "nz", *itertools.chain(*names)]
    rows = np.stack(list(found.values()), axis=1)
    truth = placed(splats, to_original)
    order = (truth[:, SCALES].sum(-1).exp() * truth[:, OPACITY].sigmoid()[:, 0]).argsort(descending=True)
    truth[:, TURN] = torch.nn.functional.normalize(truth[:, TURN], dim=-1)
    np.testing.assert_allclose(np.delete(rows, [3, 4, 5], axis=1), truth[order].numpy(), rtol=1e-6)
    assert not rows[:, 3:6].any()
    # Red has the first fifteen of f_rest: from above, where z alone counts, a viewer sees this.
    z = splats[order][:, 6 + 1].numpy()
    assert to_original is not None or np.allclose(found["f_rest_1"], z)


def test_a_splat_file_has_32_bytes_a_splat(tmp_path: Path) -> None:
    splats = some_splats(9)
    write_splats(tmp_path / "a.splat", splats)
    content = (tmp_path / "a.splat").read_bytes()
    assert len(content) == 32 * 9
    order = (splats[:, SCALES].sum(-1).exp() * splats[:, OPACITY].sigmoid()[:, 0]).argsort(descending=True)
    for k, row in enumerate(splats[order]):
        *floats, r, g, b, a, w, x, y, z = struct.unpack_from("<6f8B", content, 32 * k)
        np.testing.assert_allclose(floats, [*row[POINT].tolist(), *row[SCALES].exp().tolist()], rtol=1e-6)
        color = [min(255, max(0, round(255.0 * (0.5 + C0 * float(value))))) for value in row[BASE]]
        assert [r, g, b] == pytest.approx(color, abs=1) and a == pytest.approx(255 * float(row[51].sigmoid()), abs=1)
        turn = torch.nn.functional.normalize(row[TURN], dim=0) * 128.0 + 128.0
        assert [w, x, y, z] == pytest.approx(turn.clamp(max=255.0).tolist(), abs=1)


def test_thinning_keeps_places_and_follows_the_size_of_pixels() -> None:
    points = torch.rand(20_000, 3, generator=torch.Generator().manual_seed(0)) * torch.tensor([1.0, 1.0, 0.0])
    radii = torch.where(points[:, 0] < 0.5, 0.004, 0.016)
    kept, spacing = thin(points, radii, 800)
    assert 300 < len(kept) <= 800 and float(kept[:, 2].abs().max()) == 0.0
    fine, coarse = spacing[kept[:, 0] < 0.49], spacing[kept[:, 0] > 0.51]
    assert float(coarse.min() / fine.max()) == pytest.approx(4.0, rel=1e-3) and len(fine) > 8 * len(coarse)
    assert float(torch.cdist(points[::50], kept).amin(1).max()) < 2.0 * float(coarse.max())


def test_seeds_lie_flat_on_the_surface_and_have_the_colours_of_their_sides() -> None:
    model, scene = make_model(HollowBall()), ball_scene(n_views=6, size=48)
    with use_backend("cpu"):
        made = seed(model, scene.cameras, 600)
    radius = made[:, POINT].norm(dim=-1)
    assert 150 < len(made) <= 600 and float((radius - 0.9).abs().quantile(0.95)) < 0.04
    axes = raster.rotations(made[:, TURN])[:, :, 2]  # the thin one
    assert float((axes * made[:, POINT]).sum(-1).abs().div(radius).quantile(0.1)) > 0.95
    assert bool((made[:, 54] < made[:, 52] - 1.0).all())
    red, blue = (made[:, BASE] * C0 + 0.5)[made[:, 0].abs() > 0.1][:, [0, 2]].unbind(-1)
    left = made[:, 0][made[:, 0].abs() > 0.1] < 0.0
    assert float((red > 0.7)[left].float().mean()) > 0.95 and float((blue > 0.7)[~left].float().mean()) > 0.95


class Shiny(HollowBall):
    """Red where one looks along x, green where against it."""

    def forward(self, positions, directions, times=None, camera_indices=None):
        x = 0.4 * directions[:, :1]
        return torch.cat([0.5 + x, 0.5 - x, torch.full_like(x, 0.3)], dim=-1), self.density(positions)


def test_harmonics_are_those_of_the_direction_one_looks_along() -> None:
    scene, model = ball_scene(n_views=12, size=32), make_model(Shiny())
    points = torch.nn.functional.normalize(torch.randn(60, 3, generator=torch.Generator().manual_seed(2)), dim=-1)
    points[:, 2] = points[:, 2].abs()  # no camera stands below
    with use_backend("cpu"):
        found = fit_colors(model, scene.cameras, 0.9 * points, points)
    eyes = scene.cameras.positions
    along = torch.nn.functional.normalize(0.9 * points - eyes[(points @ eyes.T).argmax(-1)], dim=-1)
    colors = (found * spherical_harmonics(along, 4)[:, None]).sum(-1) + 0.5
    truth, even = model.field(points, along)[0], found[..., 0] * C0 + 0.5
    assert float((colors - truth).abs().mean()) < 0.04
    assert float((colors - truth).square().mean()) < 0.2 * float((even - truth).square().mean())


def test_the_field_teaches_where_photos_show_something_else() -> None:
    model, scene = make_model(HollowBall()), ball_scene(n_views=2, size=24)
    window, whole = (4, 6, 12, 10), scene.images.image(0)
    photo = teacher_of(model, scene, scene.cameras, cropped=False)(0, window)
    truth = whole[6:16, 4:16]
    torch.testing.assert_close(photo, torch.cat([truth[..., :3] * truth[..., 3:], truth[..., 3:]], dim=-1))
    with use_backend("cpu"):
        image = model.render_image(scene.cameras, 0, torch.zeros(3))
        field = teacher_of(model, scene, scene.cameras, cropped=True)(0, window)
    torch.testing.assert_close(field[..., :3], image.rgb[6:16, 4:16], atol=1e-3, rtol=0.0)
    moving = replace(scene.cameras, times=torch.ones(2))
    assert as_pinholes(moving).model == "pinhole" and not as_pinholes(moving).times.any()  # type: ignore[union-attr]
    late = teacher_of(model, replace(scene, cameras=moving), as_pinholes(scene.cameras), cropped=False)
    with use_backend("cpu"):
        torch.testing.assert_close(late(0, window), field)


def test_photos_of_bent_lenses_are_straightened() -> None:
    """A photo whose colours are the slopes of its rays shows, straightened, those of a pinhole camera."""
    plain = replace(ball_scene(n_views=2, size=48).cameras, distortion=None)
    bent = replace(
        plain, model="opencv", distortion=torch.tensor([[-0.6, 0.05, 0.003, -0.002, 0, 0, 0, 0]]).repeat(2, 1)
    )

    def slopes(cameras: Cameras, index: int) -> Tensor:
        axes = cameras.camera_to_world[index, :, :3]
        local = cameras.image_rays(index).directions @ axes
        x, y = (local[:, :2] / -local[:, 2:]).unbind(-1)
        return torch.stack([0.5 + 0.8 * x, 0.5 + 0.8 * y, torch.full_like(x, 0.25)], -1).view(48, 48, 3)

    pool = ImagePool.from_images([slopes(bent, index) for index in range(2)])
    scene = replace(ball_scene(n_views=2, size=48), cameras=bent, images=pool)
    straight = undistorted(scene)
    assert straight.cameras.model == "pinhole" and undistorted(straight) is straight
    for index in range(2):
        torch.testing.assert_close(straight.images.image(index), slopes(plain, index), atol=0.008, rtol=0.0)
    part = photo_through(scene, 1, through(plain[1], (5, 7, 20, 12)))
    torch.testing.assert_close(part, slopes(plain, 1)[7:19, 5:25], atol=0.008, rtol=0.0)
    assert float((pool.image(1) - slopes(plain, 1)).abs().max()) > 0.03  # the lens shows


@pytest.fixture(scope="module")
def toybox() -> NerfModel:
    """The trained field that comes with the package."""
    with use_backend("auto"):
        trainer = Trainer(preset("ngp-cpu"), builtin_scene("toybox", resolution=40, n_views=2))
        trainer.warm_start("zoo:toybox-cpu")
    return trainer.model


def test_splats_of_a_trained_field_come_close_to_it(toybox: NerfModel) -> None:
    train, test = (builtin_scene("toybox", split, resolution=80, n_views=16) for split in ("train", "test"))
    with use_backend("cpu"):
        seeds = seed(toybox, train.cameras, 4000)
        before = compare(toybox, test, lambda *view: (picture(seeds, *view), None), views=2)
        teacher = teacher_of(toybox, train, train.cameras, cropped=False)
        made, steps = refine(seeds, train.cameras, teacher, pace=paced(math.inf, 60))
        after = compare(toybox, test, lambda *view: (picture(made, *view), None), views=2)
    assert steps == 60 and 0.5 * len(seeds) < len(made) <= len(seeds) <= 4000
    assert after.against_photos is not None and before.against_photos is not None
    assert after.field_against_photos is not None and after.field_against_photos == before.field_against_photos
    assert before.against_photos > 15.0 and after.against_photos > before.against_photos + 2.0
    assert after.against_photos > after.field_against_photos - 3.0


def test_there_are_no_more_splats_than_an_image_has_pixels(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(make, "FINEST", 1e-3)
    model, scene = make_model(HollowBall()), ball_scene(n_views=6, size=24)
    with use_backend("cpu"):
        assert 24 * 24 // 2 < len(seed(model, scene.cameras, 100_000)) <= 24 * 24


def test_splats_of_one_colour_learn_no_others() -> None:
    model, scene = make_model(HollowBall()), ball_scene(n_views=6, size=48)
    with use_backend("cpu"):
        seeds = seed(model, scene.cameras, 300)
        assert float(seeds[:, REST].abs().max()) > 0.0
        seeds[:, REST] = 0.0
        made, _ = refine(seeds, scene.cameras, teacher_of(model, scene, scene.cameras, cropped=False), pace=[0.5] * 4)
    assert len(made) == len(seeds) and not made[:, REST].any()
    assert float((made - seeds)[:, BASE].abs().max()) > 0.01


def test_no_seconds_leave_splats_as_they_are() -> None:
    splats = some_splats(50)
    splats[:, OPACITY] = torch.linspace(-8.0, 2.0, 50)[:, None]
    made, steps = refine(splats, view(), lambda *_: torch.zeros(0), pace=paced(0.0))
    assert steps == 0
    torch.testing.assert_close(made, splats[splats[:, 51].sigmoid() > 0.02])


def test_a_box_leaves_only_what_is_inside() -> None:
    model, scene = make_model(HollowBall()), ball_scene(n_views=6, size=48)
    model.crop(Aabb((-1.5, -1.5, 0.2), (1.5, 1.5, 1.5)))
    with use_backend("cpu"):
        made = seed(model, scene.cameras, 400)
    assert len(made) > 50 and float(made[:, 2].min()) > 0.1
    assert cpu.TILE != raster.TILE  # so that comparisons with the reference see tiles of both sizes
