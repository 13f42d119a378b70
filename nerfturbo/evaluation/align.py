"""How far cameras are from others of the same pictures, and where test views stand in a scene whose cameras moved.
Refined training cameras live in a frame of their own: the whole of them may be shifted, turned and scaled a little.
`camera_errors` compares them up to that. A score after `aligned_to` says how good the scene is, not how good the poses
of the test views are, and must say so."""

import math
from collections.abc import Callable
from dataclasses import dataclass, replace

import torch
from torch import Tensor
from torch.nn.functional import huber_loss

from ..config import CameraConfig, PhotoConfig
from ..data.batches import PixelBatch, PixelSampler
from ..data.cameras import Cameras, similarity_scale, transform_points, transform_poses
from ..data.images import composite_over
from ..data.scene import Scene
from ..rendering.model import NerfModel
from ..rendering.photos import PhotoCorrections

ALIGN_RATE = 2e-3
CHECKS, CHECK_RAYS = 4, 256  # how often while fitting, and on how many rays a view, poses are compared
Progress = Callable[[float], None]  # takes the share that is done


@dataclass(frozen=True)
class CameraErrors:
    """Means over the cameras, after the best similarity between the two sets was applied."""

    degrees: float
    distance: float
    seen: float  # between what the two see at the distance of the scene
    similarity: Tensor  # (4, 4) float64, from the first set to the second


def best_similarity(source: Tensor, target: Tensor) -> Tensor:
    """(4, 4) float64: the rotation, scale and shift that bring points (n, 3) closest to others (Umeyama's)."""
    source, target = source.double().cpu(), target.double().cpu()
    from_mean, to_mean = source.mean(0), target.mean(0)
    a, b = source - from_mean, target - to_mean
    left, sizes, right = torch.linalg.svd(b.T @ a)
    signs = torch.ones(3, dtype=torch.float64)
    signs[2] = torch.sign(torch.linalg.det(left @ right))
    rotation = left @ torch.diag(signs) @ right
    scale = float((sizes * signs).sum() / a.square().sum().clamp(min=1e-12))
    matrix = torch.eye(4, dtype=torch.float64)
    matrix[:3, :3] = scale * rotation
    matrix[:3, 3] = to_mean - matrix[:3, :3] @ from_mean
    return matrix


def frame_points(cameras: Cameras, distance: float) -> Tensor:
    """(6 n, 3) float64: of each camera its position, and the middle and four points about it of what it sees at a
    distance: cameras that agree in these see the same there."""
    poses = cameras.camera_to_world.double().cpu()
    right, up, backward, position = poses.unbind(-1)
    steps = [(0.0, 0.0), (0.2, 0.0), (-0.2, 0.0), (0.0, 0.2), (0.0, -0.2)]
    seen = [position + distance * (x * right + y * up - backward) for x, y in steps]
    return torch.stack([position, *seen], dim=1).reshape(-1, 3)


def camera_errors(found: Cameras, truth: Cameras, distance: float) -> CameraErrors:
    """How far cameras are from the true ones, up to the similarity of the whole that fits best what they see at a
    distance: that of the scene's middle, say."""
    ours, theirs = frame_points(found, distance), frame_points(truth, distance)
    matrix = best_similarity(ours, theirs)
    moved = transform_poses(found.camera_to_world.double().cpu(), matrix)
    true = truth.camera_to_world.double().cpu()
    degrees = _angles(moved[:, :, :3].transpose(1, 2) @ true[:, :, :3])
    distances = (moved[..., 3] - true[..., 3]).norm(dim=-1)
    apart = (transform_points(ours, matrix) - theirs).view(-1, 6, 3)[:, 1:].norm(dim=-1)
    return CameraErrors(float(degrees.mean()), float(distances.mean()), float(apart.mean()), matrix)


def camera_changes(given: Scene, learned: Scene) -> dict[str, float]:
    """Means over the views: by how much cameras were turned, moved (in the unit of the scene's own file), zoomed."""
    before, after = (scene.cameras.camera_to_world.double().cpu() for scene in (given, learned))
    scale = 1.0 if given.to_original is None else similarity_scale(given.to_original)
    degrees = _angles(before[:, :, :3].transpose(1, 2) @ after[:, :, :3])
    moved = (after[:, :, 3] - before[:, :, 3]).norm(dim=-1) * scale
    factor = (learned.cameras.focal / given.cameras.focal).mean()
    return {"turned_degrees": float(degrees.mean()), "moved": float(moved.mean()), "focal_factor": float(factor)}


def _angles(rotations: Tensor) -> Tensor:
    """(n,) degrees that rotations (n, 3, 3) turn by; exact for small ones too."""
    sines = (rotations - rotations.transpose(1, 2)).square().sum((1, 2)).sqrt() / (2.0 * math.sqrt(2.0))
    cosines = (rotations.diagonal(dim1=1, dim2=2).sum(-1) - 1.0) / 2.0
    return torch.rad2deg(torch.atan2(sines, cosines))


def aligned_to(
    model: NerfModel, scene: Scene, *, steps: int = 200, n_rays: int = 2048, report: Progress = lambda share: None
) -> Scene:
    """The scene with the poses of all its views fitted to the model, which does not change. Call it after training.

    A view keeps the best pose of those compared while fitting, the one it came with among them: it never ends worse.
    """
    config = replace(model.config, cameras=CameraConfig(refine=True), photo=PhotoConfig())
    if model.photos is not None:
        scene = replace(scene, cameras=model.photos.new_views(scene.cameras))
    photos = PhotoCorrections(config, len(scene), 1)
    photos.observe(scene.cameras, scene.aabb)
    photos.gauge.zero_()  # the model stands still: there is nothing to drift
    photos.to(model.device)
    sampler = PixelSampler(scene, model.device, seed=config.train.seed)
    pose, white = photos.get_parameter("pose"), torch.ones(3, device=model.device)
    adam = torch.optim.Adam([pose], lr=ALIGN_RATE)
    schedule = torch.optim.lr_scheduler.CosineAnnealingLR(adam, steps, eta_min=0.05 * ALIGN_RATE)

    def errors(batch: PixelBatch) -> Tensor:
        rays = replace(photos.rays(batch.rays), camera_indices=None)  # which are not those of training
        wanted = composite_over(batch.rgba, white)
        return huber_loss(model.render_rays(rays, white).rgb, wanted, delta=0.1, reduction="none").mean(-1)

    held = sampler.draw(steps, CHECK_RAYS * len(scene))  # of a step that is not fitted
    views = held.rays.camera_indices
    assert views is not None
    least, best = torch.full((len(scene),), torch.inf, device=model.device), torch.zeros_like(pose)
    learning = [parameter for parameter in model.parameters() if parameter.requires_grad]
    for parameter in learning:
        parameter.requires_grad_(False)
    try:
        for step in range(steps + 1):
            if step in (0, steps) or step % max(1, steps // CHECKS) == 0:
                with torch.no_grad():
                    found = torch.zeros_like(least).index_add_(0, views, errors(held))
                    best = torch.where((found < least)[:, None], pose, best)
                    least = torch.minimum(found, least)
            if step < steps:
                adam.zero_grad()
                errors(sampler.draw(step, n_rays)).mean().backward()
                adam.step()
                schedule.step()
                report((step + 1) / steps)
    finally:
        for parameter in learning:
            parameter.requires_grad_(True)
    with torch.no_grad():
        pose.copy_(best)
    return replace(scene, cameras=photos.refined(scene.cameras))
