"""By how much learning moved cameras, and what of a test view is fitted to the model before it is scored: the pose, or
exposure and look. Refined training cameras live in a frame of their own: the whole of them may be shifted, turned and
scaled a little. A score after `aligned_to` says how good the scene is, not how good the poses of the test views are,
and must say so; so must one of `right_halves`."""

import contextlib
import math
from collections.abc import Callable, Iterator
from dataclasses import replace

import torch
from torch import Tensor
from torch.nn.functional import huber_loss

from ..config import CameraConfig, PhotoConfig
from ..data.batches import PixelBatch, PixelSampler
from ..data.cameras import similarity_scale
from ..data.images import composite_over, pack_flags
from ..data.scene import Scene
from ..errors import InputError
from ..ops.pixels import PixelMask
from ..rendering.model import NerfModel
from ..rendering.photos import PhotoCorrections, exposed_color
from .evaluate import Evaluation, Progress, choose_views, score_view, truth_image

ALIGN_RATE, LOOK_RATE = 2e-3, 5e-2
CHECKS, CHECK_RAYS = 4, 256  # how often while fitting, and on how many rays a view, poses are compared


def camera_changes(given: Scene, learned: Scene) -> dict[str, float]:
    """Means over the views: by how much cameras were turned, moved (in the unit of the scene's own file), zoomed."""
    before, after = (scene.cameras.camera_to_world.double().cpu() for scene in (given, learned))
    scale = 1.0 if given.to_original is None else similarity_scale(given.to_original)
    degrees = turn_degrees(before[:, :, :3].transpose(1, 2) @ after[:, :, :3])
    moved = (after[:, :, 3] - before[:, :, 3]).norm(dim=-1) * scale
    factor = (learned.cameras.focal / given.cameras.focal).mean()
    return {"turned_degrees": float(degrees.mean()), "moved": float(moved.mean()), "focal_factor": float(factor)}


def turn_degrees(rotations: Tensor) -> Tensor:
    """(n,) degrees that rotations (n, 3, 3) turn by; exact for small ones too."""
    sines = (rotations - rotations.transpose(1, 2)).square().sum((1, 2)).sqrt() / (2.0 * math.sqrt(2.0))
    return torch.rad2deg(torch.atan2(sines, (rotations.diagonal(dim1=1, dim2=2).sum(-1) - 1.0) / 2.0))


@contextlib.contextmanager
def _frozen(model: NerfModel) -> Iterator[None]:
    """The model learns nothing meanwhile."""
    learning = [parameter for parameter in model.parameters() if parameter.requires_grad]
    for parameter in learning:
        parameter.requires_grad_(False)
    try:
        yield
    finally:
        for parameter in learning:
            parameter.requires_grad_(True)


def _adam(values: list[Tensor], rate: float, steps: int) -> Callable[[Tensor, int], None]:
    """Takes a loss and which of the steps it is of, and changes the values; `rate` falls to a twentieth as a cosine
    does. Not torch's Adam: its first use imports a compiler, for seconds."""
    moments = [(value, torch.zeros_like(value), torch.zeros_like(value)) for value in values]

    def descend(loss: Tensor, step: int) -> None:
        now = rate * (0.525 + 0.475 * math.cos(math.pi * step / steps))
        gradients = torch.autograd.grad(loss, values, allow_unused=True, materialize_grads=True)
        with torch.no_grad():
            for (value, first, second), gradient in zip(moments, gradients, strict=True):
                root = second.lerp_(gradient.square(), 0.001).div(1.0 - 0.999 ** (step + 1)).sqrt_()
                value.addcdiv_(first.lerp_(gradient, 0.1), root.add_(1e-8), value=-now / (1.0 - 0.9 ** (step + 1)))

    return descend


def aligned_to(
    model: NerfModel, scene: Scene, *, steps: int = 200, n_rays: int = 2048, report: Progress = lambda share: None
) -> Scene:
    """The scene with the poses of all its views fitted to the model, which does not change. Call it after training. A
    view keeps the best pose of those compared while fitting, the one it came with among them: it never ends worse."""
    config = replace(model.config, cameras=CameraConfig(refine=True, coarse=True), photo=PhotoConfig())
    if model.photos is not None:
        scene = replace(scene, cameras=model.photos.new_views(scene.cameras))
    photos = PhotoCorrections(config, len(scene), 1)
    photos.observe(scene.cameras, scene.aabb)
    photos.gauge.zero_()  # the model stands still: there is nothing to drift
    photos.to(model.device)
    sampler = PixelSampler(scene, model.device, seed=config.train.seed)
    pose, white = photos.get_parameter("pose"), torch.ones(3, device=model.device)
    descend = _adam([pose], ALIGN_RATE, steps)

    def errors(batch: PixelBatch) -> Tensor:
        rays = replace(photos.rays(batch.rays), camera_indices=None)  # which are not those of training
        wanted = composite_over(batch.rgba, white)
        return huber_loss(model.render_rays(rays, white).rgb, wanted, delta=0.1, reduction="none").mean(-1)

    held = sampler.draw(steps, CHECK_RAYS * len(scene))  # of a step that is not fitted
    views = held.rays.camera_indices
    assert views is not None
    least, best = torch.full((len(scene),), torch.inf, device=model.device), torch.zeros_like(pose)
    with _frozen(model):
        for step in range(steps + 1):
            if step in (0, steps) or step % max(1, steps // CHECKS) == 0:
                with torch.no_grad():
                    found = torch.zeros_like(least).index_add_(0, views, errors(held))
                    best = torch.where((found < least)[:, None], pose, best)
                    least = torch.minimum(found, least)
            if step < steps:
                descend(errors(sampler.draw(step, n_rays)).mean(), step)
                report((step + 1) / steps)
    with torch.no_grad():
        pose.copy_(best)
    return replace(scene, cameras=photos.refined(scene.cameras))


def right_halves(
    model: NerfModel,
    scene: Scene,
    *,
    steps: int = 100,
    n_rays: int = 1024,
    views: list[int] | None = None,
    report: Progress = lambda share: None,
) -> Evaluation:
    """The scores of the views' right halves, in the exposure and the look that were fitted to their left halves: how
    photos that differ are scored (NeRF in the Wild), since nothing else says how a new one was taken."""
    photos = model.photos
    if photos is None or not (photos.config.photo.exposure or photos.config.photo.appearance):
        raise InputError("model", "one that learned photo.exposure or photo.appearance", "one that learned neither")
    scene, scores = replace(scene, cameras=photos.new_views(scene.cameras)), []
    chosen = choose_views(len(scene)) if views is None else views
    for done, index in enumerate(chosen):
        truth, counts = truth_image(scene, index, device=model.device), scene.used_pixels(index, model.device)
        counts = torch.ones_like(truth[:, :, 0], dtype=torch.bool) if counts is None else counts
        right, used, sampler = truth.shape[1] // 2, counts.clone(), None
        used[:, right:] = False
        if bool(used.any()):
            view, mask = scene.select([index]), PixelMask.of_words(pack_flags([used.cpu().numpy()]))
            view = replace(view, images=replace(view.images, mask=mask))
            sampler = PixelSampler(view, model.device, seed=model.config.train.seed)
        try:
            gains = _fit_look(model, photos, sampler, steps, n_rays)
            rgb = exposed_color(model.render_image(scene.cameras, index).rgb, gains)
        finally:
            photos.guest = None
        if bool(counts[:, right:].any()):
            scores.append(score_view(index, rgb[:, right:], truth[:, right:], counts[:, right:]))
        report((done + 1) / len(chosen))
    return Evaluation.of(scores)


def _fit_look(
    model: NerfModel, photos: PhotoCorrections, sampler: PixelSampler | None, steps: int, n_rays: int
) -> Tensor:
    """(3,) logarithms of the gains of one view, from pixels of it; its look becomes the guest's."""
    white, size = torch.ones(3, device=model.device), photos.config.photo.appearance
    gains, look = torch.zeros(3, device=model.device), torch.zeros(size, device=model.device)
    photos.guest = look if size else None
    fitted = [gains] * photos.config.photo.exposure + [look] * (size > 0)
    descend = _adam([value.requires_grad_() for value in fitted], LOOK_RATE, steps)
    with _frozen(model):
        for step, batch in [] if sampler is None else ((step, sampler.draw(step, n_rays)) for step in range(steps)):
            found = model.render_rays(replace(batch.rays, camera_indices=None), white).rgb
            descend((exposed_color(found, gains) - composite_over(batch.rgba, white)).square().mean(), step)
    photos.guest = look.detach() if size else None
    return gains.detach()
