"""From a field to splats: seeds on its surfaces, colours from several sides, refined against what cameras see."""

import math
from collections.abc import Callable, Iterable
from dataclasses import replace

import torch
import torch.nn.functional as F
from torch import Tensor

from ...data.cameras import Cameras
from ...data.images import ImagePool
from ...data.scene import Scene
from ...ops.adam import AdamRule, AdamState, adam_update
from ...ops.spherical_harmonics import spherical_harmonics
from ...rendering.model import NerfModel
from ...rendering.render import surface_normals
from .. import Progress, quiet
from ..mesh import COLOR_REACH, colors_from_outside, voxel_size
from ..points import RIM, surface_pixels
from . import BASE, N_VALUES, OPACITY, POINT, REST, SCALES, TURN, WIDTHS
from .raster import BEYOND, render

LOOKS = 4.0  # pixels that are rendered for each splat
WIDTH, THICKNESS = 0.55, 0.12  # deviations of a seed along and across the surface, in distances of seeds
OPAQUE = 0.9
FINEST = 3.5  # radii of a pixel between splats, at least
SIDES = 6  # from which a colour is looked at
RIDGE = 0.02  # that holds down harmonics, the finer the more, of which few sides say little
CHUNK = 1 << 14
WINDOW = {"cpu": 128, "cuda": 1024}  # pixels a side of what one step draws
RATES = (0.1, 0.02, 0.004, 0.05, 0.03, 0.02)  # of learning, in the order of WIDTHS; positions in sizes of seeds
FINAL = 0.1  # of the rates
RULE = AdamRule(betas=(0.9, 0.99), eps=1e-12)
FAINT = 0.02  # opacity below which a splat is dropped


@torch.no_grad()
def seed(model: NerfModel, cameras: Cameras, n: int, *, progress: Progress = quiet) -> Tensor:
    """(m, 59): about `n` flat splats, at most, on what the cameras see; dense where pixels are small."""
    n = min(n, int(cameras.size.prod(-1).max()))  # more than an image has pixels take time and show no more
    rim, part = 0.0 if _unbounded(model) else RIM, lambda share: progress(0.6 * share)  # far things are large and thin
    points, _, radii = surface_pixels(model, cameras, None, LOOKS * n, rim=rim, progress=part)
    points, spacing = thin(points, radii, n)
    normals = surface_normals(model.field, model.grid, points)
    up = torch.where(normals[:, 2:] < 0.0, -normals, normals)  # a Gaussian has no front and no back
    splats = torch.zeros(len(points), N_VALUES, device=points.device)
    opacity = -torch.expm1(-model.field.density(points).float() * spacing)
    splats[:, POINT], splats[:, OPACITY] = points, opacity.clamp(2.0 * FAINT, OPAQUE).logit()[:, None]
    splats[:, SCALES] = (spacing[:, None] * spacing.new_tensor([WIDTH, WIDTH, THICKNESS])).log()
    clear = normals.abs().sum(-1, keepdim=True) > 0.0
    half = torch.stack([1.0 + up[:, 2], -up[:, 1], up[:, 0], torch.zeros_like(up[:, 0])], dim=-1)  # z to the normal
    splats[:, TURN] = torch.where(clear, F.normalize(half, dim=-1), half.new_tensor([1.0, 0.0, 0.0, 0.0]))
    splats[:, SCALES] = torch.where(clear, splats[:, SCALES], splats[:, SCALES].mean(-1, keepdim=True))
    coefficients = fit_colors(model, cameras, points, normals, progress=lambda share: progress(0.6 + 0.4 * share))
    splats[:, BASE], splats[:, REST] = coefficients[..., 0], coefficients[..., 1:].flatten(1)
    return splats


def _unbounded(model: NerfModel) -> bool:
    return model.config.grid.levels > 1 or model.config.grid.contraction != "none"


def thin(points: Tensor, radii: Tensor, n: int) -> tuple[Tensor, Tensor]:
    """At most `n` points (m, 3), means over cells whose size follows the pixels' (m,), and their distances (n,)."""
    level = radii.log2().round()

    def cells(size: float) -> Tensor:
        place = torch.cat([points / (size * level.exp2())[:, None], level[:, None]], dim=-1).floor().long()
        return (place * place.new_tensor([73856093, 19349663, 83492791, 2654435761])).sum(-1)

    low, high = FINEST, 256.0
    for _ in range(12):
        middle = math.sqrt(low * high)
        low, high = (low, middle) if len(torch.unique(cells(middle))) <= n else (middle, high)
    _, index, counts = torch.unique(cells(high), return_inverse=True, return_counts=True)
    sums = points.new_zeros(len(counts), 4)
    sums.index_add_(0, index, torch.cat([points, (high * level.exp2())[:, None]], dim=-1))
    means = sums / counts[:, None]
    return means[:, :3], means[:, 3]


def fit_colors(
    model: NerfModel, cameras: Cameras, points: Tensor, normals: Tensor, *, progress: Progress = quiet
) -> Tensor:
    """(n, 3, 16): harmonics of the field's colour at points (n, 3), by least squares over directions to cameras that
    the surface faces; its normal stands in for others."""
    eyes, generator = cameras.positions.to(points.device), torch.Generator().manual_seed(0)
    basis, colors, reach = [], [], COLOR_REACH * voxel_size(model, 256)
    for side in range(SIDES):
        chosen = torch.randint(len(eyes), (len(points),), generator=generator).to(points.device)
        towards = F.normalize(eyes[chosen] - points, dim=-1)
        facing = (towards * normals).sum(-1, keepdim=True) > 0.1
        towards = torch.where(facing | (normals.abs().sum(-1, keepdim=True) == 0.0), towards, normals)
        basis.append(spherical_harmonics(-towards, 4))
        colors.append(colors_from_outside(model, points, towards, reach).to(points.device) - 0.5)
        progress((side + 1) / SIDES)
    band = torch.arange(16, device=points.device).sqrt().floor()
    ridge = RIDGE * band * (band + 1.0) + 1e-4
    parts = zip(torch.stack(basis, 1).split(CHUNK), torch.stack(colors, 1).split(CHUNK), strict=True)
    return torch.cat([torch.linalg.solve(a.mT @ a + ridge.diag(), a.mT @ y).mT for a, y in parts])


Window = tuple[int, int, int, int]  # left, top, width and height in pixels
Teacher = Callable[[int, Window], Tensor]  # what part of a view shows: (height, width, 4), without a background


def as_pinholes(cameras: Cameras) -> Cameras:
    """Cameras in the same places without lens distortion, at time 0: what splats can be drawn for."""
    times = None if cameras.times is None else torch.zeros_like(cameras.times)
    return replace(cameras, times=times, model="pinhole", distortion=None)


def photo_through(scene: Scene, index: int, camera: Cameras) -> Tensor:
    """(height, width, 3 or 4): what a photo shows along the rays of a camera in its place; beyond its rim, the rim."""
    (width, height), rays, own = camera.size[0].tolist(), camera.image_rays(0), scene.cameras[index].to(camera.device)
    pixels, _ = own.project(torch.zeros(1, dtype=torch.int64), rays.origins + rays.directions)
    places = (pixels / own.size * 2.0 - 1.0).view(1, height, width, 2)
    photo = scene.images.image(index, camera.device).permute(2, 0, 1)[None]
    return F.grid_sample(photo, places, padding_mode="border", align_corners=False)[0].permute(1, 2, 0)


def undistorted(scene: Scene) -> Scene:
    """The scene as cameras without lens distortion take it."""
    if scene.cameras.model == "pinhole":
        return scene
    cameras = replace(as_pinholes(scene.cameras), times=scene.cameras.times)
    images = [photo_through(scene, index, cameras[index]) for index in range(len(scene))]
    return replace(scene, cameras=cameras, images=ImagePool.from_images(images))


def teacher_of(model: NerfModel, scene: Scene, cameras: Cameras, *, cropped: bool) -> Teacher:
    """The photos, which are sharper, where they show just what the field does; else the field, through `cameras`."""
    whole, look = scene.has_alpha or _unbounded(model), model.config.photo
    own_look = look.exposure or look.appearance or scene.cameras.times is not None
    if whole and not (own_look or cropped or scene.images.mask is not None):

        def photo(index: int, window: Window) -> Tensor:
            part = photo_through(scene, index, through(cameras[index], window).to(model.device))
            alpha = part[..., 3:] if part.shape[-1] == 4 else torch.ones_like(part[..., :1])
            return torch.cat([part[..., :3] * alpha, alpha], dim=-1)

        return photo

    def field(index: int, window: Window) -> Tensor:
        image = model.render_image(through(cameras[index], window), 0, torch.zeros(3, device=model.device))
        return torch.cat([image.rgb, image.opacity[..., None]], dim=-1)

    return field


def through(camera: Cameras, window: Window) -> Cameras:
    """What one camera sees through a window of its picture: left, top, width, height."""
    corner, size = torch.tensor(window[:2], device=camera.device), torch.tensor([window[2:]], device=camera.device)
    return replace(camera, center=camera.center - corner, size=size)


def refine(splats: Tensor, cameras: Cameras, teacher: Teacher, *, pace: Iterable[float]) -> tuple[Tensor, int]:
    """The splats after a gradient step for each share that `pace` gives, less faint ones; and how many steps."""
    side, generator = WINDOW.get(splats.device.type, WINDOW["cuda"]), torch.Generator().manual_seed(0)
    rates = torch.cat([splats.new_full((width,), rate) for width, rate in zip(WIDTHS, RATES, strict=True)])
    rates = rates.repeat(len(splats), 1)
    rates[:, POINT] *= splats[:, SCALES].amax(-1, keepdim=True).exp()
    free, learns = splats / rates, (splats != 0.0).any(0)  # one rate for all; splats without harmonics stay so
    state, sizes, cameras = AdamState.of(free), cameras.size.tolist(), cameras.to(splats.device)
    for share in pace:
        index = int(torch.randint(len(cameras), (), generator=generator))
        width, height = sizes[index]
        left, top = (int(torch.randint(max(1, whole - side + 1), (), generator=generator)) for whole in (width, height))
        window = (left, top, min(side, width), min(side, height))
        camera = through(cameras[index], window)
        places, ahead = camera.project(torch.zeros(1, dtype=torch.int64), free[:, POINT] * rates[:, POINT])
        edge = BEYOND * camera.focal
        rows = (((places > -edge) & (places < camera.size + edge)).all(-1) & (ahead > 0.0)).nonzero()[:, 0]
        some = free[rows].requires_grad_()
        error = render(some * rates[rows], camera) - teacher(index, window)
        error = error[..., :3] - error[..., 3:] * torch.rand(3, generator=generator).to(splats.device)  # any background
        (gradient,) = torch.autograd.grad(error.square().mean(), some)
        gradient = torch.zeros_like(free).index_copy_(0, rows, gradient * learns)
        adam_update(free, gradient, state, free.new_tensor(FINAL**share), rule=RULE)
        state.step.add_(1)
    splats = free * rates
    return splats[splats[:, OPACITY].sigmoid()[:, 0] > FAINT], int(state.step)


@torch.no_grad()
def picture(splats: Tensor, cameras: Cameras, index: int) -> Tensor:
    """(height, width, 3) of what one of the cameras sees of splats over white."""
    drawn = render(splats, cameras[index].to(splats.device))
    return (drawn[..., :3] + 1.0 - drawn[..., 3:]).clamp(0.0, 1.0)
