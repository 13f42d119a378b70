"""What is learned of each training photo beside the field: its pose, its lens, its exposure, its look.

A ray drawn from photo i, origin o and direction d, becomes

    d' = R_i (d + sum_k (b exp(-phi_k) - 1) (a_k . d) a_k),  made unit length;    o' = c + R_i (o - c) + tau_i

with R_i = exp([omega_i]), c the scene's centre, a_1 and a_2 the photo's axes across and up, and phi the logarithms of
its lens's focal corrections: the ray of a camera turned about the centre, moved by tau_i, with its focal lengths times
exp(phi). b = 1 + rho_1 q + rho_2 q^2 undoes distortion that the lens's own coefficients leave, with q = r^2 on the
plane at depth 1, over that of the picture's corners. About the centre, turns and shifts hardly mix; about the camera
both would move the picture alike. Everything starts at zero, and learns at a rate counted in pixels: those of a good
capture are right to a fraction of one.

Gauge: moving, turning or scaling all cameras together changes no picture, only where the scene ends up, away from the
views it is scored on. That part of the corrections, seven directions of the space of all of them, is projected out.

Exposure multiplies the odds c / (1 - c) of a colour by exp(g), channel by channel: a gain for dark colours that never
leaves [0, 1]. What learns is e, with g = e (0.1 + |e|) less its mean over the photos: new views have the mean exposure,
and small gains, all that noise is, learn slowly. Appearance is a vector per photo that the colour network reads beside
the direction. New views have the mean vector, which is no photo's: one ray in `MEAN_EVERY` trains with it, or the
network would not know it. All of it is fixed-shape and never waits for the device.
"""

import math
from dataclasses import replace
from typing import Any

import torch
from torch import Tensor, nn

from ..config import Config
from ..data.cameras import Cameras
from ..data.placement import require_plain
from ..errors import InputError
from ..fields.field import offers
from ..ops._checks import refuse
from ..ops._sink import linear
from ..ops.packed import packed_sum
from ..types import Aabb, PackedSamples, Rays
from .render import RgbSigmaFn

# Peak learning rates: in pixels of poses, of those that are off by degrees, and of lenses; of exposures and looks.
POSE_PIXELS, COARSE_PIXELS, LENS_PIXELS, PHOTO_LR = 0.01, 0.1, 0.02, 5e-3
CAMERAS_FROM = 0.3  # share of the run from which cameras learn: before, the field is too blurred to tell them apart
# With `cameras.coarse` poses learn from the start, while the hash grid's levels fade in over this share of the run.
FADE_IN, FIRST_LEVELS = 0.4, 4
MEAN_EVERY = 4  # rays, of which one trains with the mean appearance
GAUGE = 7  # shifts, turns and one scale of all cameras together
LENS_MODELS = ("pinhole", "opencv")
# Powers of the focal factor by which OpenCV's coefficients k1 k2 p1 p2 k3 k4 k5 k6 change with it: see `refined`.
_POWERS = (2.0, 4.0, 1.0, 1.0, 6.0, 2.0, 4.0, 6.0)


def lenses_of(cameras: Cameras) -> tuple[Tensor, Tensor]:
    """(lenses, 12) their intrinsics, up to the size of pictures, and (n,) int64 which of them each camera has."""
    size, distortion = cameras.size.double().cpu(), cameras.distortion
    parts = [cameras.focal.double().cpu() / size, cameras.center.double().cpu() / size]
    parts.append(torch.zeros(len(cameras), 8) if distortion is None else distortion.double().cpu())
    return torch.unique((torch.cat(parts, dim=-1) * 1e4).round().float(), dim=0, return_inverse=True)


def rotation_matrices(vectors: Tensor) -> Tensor:
    """(n, 3, 3): turns by |v| radians about v (n, 3); smooth at zero.

    >>> rotation_matrices(torch.tensor([[0.0, 0.0, math.pi / 2]])).round(decimals=3)[0, :, 0].abs().tolist()
    [0.0, 1.0, 0.0]
    """
    angle = (vectors.square().sum(-1) + 1e-20).sqrt()[:, None, None]
    x, y, z = vectors.unbind(-1)
    zero = torch.zeros_like(x)
    cross = torch.stack([zero, -z, y, z, zero, -x, -y, x, zero], dim=-1).view(-1, 3, 3)
    half = (0.5 * angle).sin() / (0.5 * angle)
    eye = torch.eye(3, dtype=vectors.dtype, device=vectors.device)
    twice = vectors[:, :, None] * vectors[:, None, :] - vectors.square().sum(-1)[:, None, None] * eye  # cross @ cross
    return eye + angle.sin() / angle * cross + 0.5 * half.square() * twice


def bent_coefficients(distortion: Tensor, radial: Tensor, corners: Tensor) -> Tensor:
    """(n, 8): OpenCV's coefficients of lenses that show at r (1 + rho_1 q + rho_2 q^2), with q = r^2 / corners (n, 1),
    what those of `distortion` (n, 8) show at r, as close as k1 k2 k3 can be up to what the corners show."""
    k, rho = distortion.double(), radial.double()[:, :, None]
    r = corners.double().sqrt() * torch.linspace(0.02, 2.0, 100, device=corners.device).double()
    q = r.square() / corners
    bend = 1.0 + rho[:, 0] * q + rho[:, 1] * q * q
    above, below = (_powers_of(r) * k[:, None, [0, 1, 4]]).sum(-1) + 1.0, (_powers_of(r) * k[:, None, 5:]).sum(-1) + 1.0
    new = _powers_of(r * bend)
    wanted = above / below / bend * ((new * k[:, None, 5:]).sum(-1) + 1.0) - 1.0
    shown = r * above / below
    counts = (shown.square() <= corners) & (shown.diff(dim=-1, prepend=0.0 * shown[:, :1]) > 0.0).cumprod(-1).bool()
    weight = r * counts  # of what lies in the picture, before the lens folds
    found = torch.linalg.lstsq(new * weight[..., None], (wanted * weight)[..., None]).solution[..., 0]
    return distortion.index_copy(1, torch.tensor([0, 1, 4], device=k.device), found.to(distortion.dtype))


def _powers_of(r: Tensor) -> Tensor:
    return torch.stack([r**2, r**4, r**6], dim=-1)


def gauge_directions(positions: Tensor, unit: float) -> Tensor:
    """(6 n, 7) orthonormal: corrections (omega, tau / unit) of n cameras that move all of them as one body. Columns
    that such cameras do not have (the scale of cameras in one place) are zero."""
    n, about = positions.shape[0], (positions - positions.mean(0)).double() / unit
    axes = torch.eye(6, dtype=torch.float64) / math.sqrt(n)
    columns = [axis.expand(n, 6) for axis in axes]
    scale = torch.cat([torch.zeros(n, 3, dtype=torch.float64), about], dim=-1)
    columns.append(scale / about.norm() if float(about.norm()) > 1e-6 else torch.zeros_like(scale))
    return torch.stack([column.reshape(-1) for column in columns], dim=-1).float()


def exposed_color(rgb: Tensor, log_gains: Tensor) -> Tensor:
    """Colours in [0, 1] whose odds are multiplied by exp(log_gains)."""
    gain = log_gains.exp()
    return rgb * gain / (1.0 - rgb + rgb * gain)


class PhotoCorrections(nn.Module):
    """Parameters per training photo; rows are in the order of the training pictures. `observe` tells it the cameras
    before training; a checkpoint keeps what it needs of them."""

    pose: Tensor  # (n, 6): omega and tau, as in the head of this file; tau in half sides of the box
    focal: Tensor  # (lenses, 2): phi
    radial: Tensor  # (lenses, 2): rho
    exposure: Tensor  # (n, 3): e
    appearance: Tensor  # (n, size)
    gauge: Tensor
    arms: Tensor
    axes: Tensor
    lenses: Tensor
    intrinsics: Tensor
    unit: Tensor
    progress: Tensor

    def __init__(self, config: Config, n_photos: int, n_lenses: int) -> None:
        super().__init__()
        cameras, photo = config.cameras, config.photo
        self.config, self.n_photos = config, n_photos
        self.learning_rates: dict[str, float] = {}
        for name, asked, shape, rate in (
            ("pose", cameras.refine, (n_photos, 6), 0.0),  # `observe` knows what a pixel is
            ("focal", cameras.focal, (n_lenses, 2), 0.0),
            ("radial", cameras.distortion, (n_lenses, 2), 0.0),
            ("exposure", photo.exposure, (n_photos, 3), PHOTO_LR),
            ("appearance", photo.appearance, (n_photos, photo.appearance), PHOTO_LR),
        ):
            if asked:
                setattr(self, name, nn.Parameter(torch.zeros(shape)))
                self.learning_rates[name] = rate
        self.register_buffer("gauge", torch.zeros(6 * n_photos if cameras.refine else 0, GAUGE))
        lenses, photos_of_lenses = (n_lenses, n_photos) if cameras.learns_lenses else (0, 0)
        self.register_buffer("axes", torch.zeros(photos_of_lenses, 2, 3))  # across and up
        self.register_buffer("arms", torch.zeros(n_photos if cameras.refine else 0, 3))  # from centre to camera
        self.register_buffer("lenses", torch.zeros(photos_of_lenses, dtype=torch.int64))
        self.register_buffer("intrinsics", torch.zeros(lenses, 12))  # as `lenses_of` has them
        self.register_buffer("unit", torch.ones(()))
        self.register_buffer("progress", torch.zeros(()))
        self.n_levels = 0  # of a field that fades them in
        self.rests = False  # whether cameras learn nothing in this step
        self.shown: int | None = None  # the photo whose look new views have; None: the mean
        self.guest: Tensor | None = None  # (appearance,) a look that is no photo's, in place of both

    def observe(self, cameras: Cameras, aabb: Aabb) -> None:
        """Take what the corrections refer to from the training cameras."""
        unit = aabb.diagonal / (2.0 * math.sqrt(3.0))
        if self.config.cameras.learns:
            require_plain(cameras.ndc, "cameras.refine")
        if self.config.cameras.learns_lenses and cameras.model not in LENS_MODELS:
            name = "cameras.focal" if self.config.cameras.focal else "cameras.distortion"
            hint = "refine the poses alone: --cameras.refine"
            raise InputError(name, "lenses of the kinds " + ", ".join(LENS_MODELS), cameras.model, hint)
        with torch.no_grad():
            self.unit.fill_(unit)
            pixel = 1.0 / float(cameras.focal.median())
            of_pose = COARSE_PIXELS if self.config.cameras.coarse else POSE_PIXELS
            rates = {"pose": of_pose * pixel, "focal": LENS_PIXELS * pixel, "radial": LENS_PIXELS * pixel}
            self.learning_rates |= {name: rate for name, rate in rates.items() if hasattr(self, name)}
            if self.gauge.numel():
                self.gauge.copy_(gauge_directions(cameras.positions.cpu(), unit))
                self.arms.copy_(cameras.positions - torch.tensor(aabb.center, device=cameras.device))
            if self.axes.numel():
                self.axes.copy_(cameras.camera_to_world[:, :, :2].transpose(1, 2))
            if self.lenses.numel():
                intrinsics, lenses = lenses_of(cameras)
                self.intrinsics.copy_(intrinsics)
                self.lenses.copy_(lenses)

    def attach(self, field: Any) -> None:
        """Let the field fade its levels in and read each photo's vector."""
        if self.config.photo.appearance:
            if not offers(field, "read_rays"):
                expected, got = "a field with `read_rays` (Instant-NGP)", type(field).__name__
                raise InputError("photo.appearance", expected, got, "leave it at 0")
            field.read_rays(self.config.photo.appearance, self.look, seed=self.config.train.seed)
        if self.config.cameras.coarse and hasattr(field, "level_weights"):
            self.n_levels = field.encoding.layout.n_levels
            field.level_weights = self.level_weights

    def corrections(self) -> tuple[Tensor, Tensor]:
        """(n, 3, 3) turns and (n, 3) shifts of each camera, without what moves all of them together."""
        # Sums of products, not cuBLAS, which has no deterministic mode without an environment variable.
        pose = self.pose if self.config.cameras.coarse else self._late(self.pose)
        common = self.gauge * (self.gauge * pose.reshape(-1, 1)).sum(0)  # (6 n, 7)
        free = pose - common.sum(-1).view(self.n_photos, 6)
        turns = rotation_matrices(free[:, :3])
        return turns, (turns * self.arms[:, None, :]).sum(-1) - self.arms + free[:, 3:] * self.unit

    def rays(self, rays: Rays) -> Rays:
        """The rays of the corrected cameras; differentiable to the corrections unless those rest."""
        if not self.config.cameras.learns or rays.camera_indices is None:
            return rays
        with torch.set_grad_enabled(torch.is_grad_enabled() and not self.rests):
            return self._corrected(rays, rays.camera_indices)

    def _corrected(self, rays: Rays, index: Tensor) -> Rays:
        origins, directions = rays.origins, rays.directions
        if self.config.cameras.learns_lenses:
            axes, lens = self.axes.index_select(0, index), self.lenses
            given = (axes * directions[:, None, :]).sum(-1)  # (n_rays, 2)
            along = given
            if self.config.cameras.focal:
                along = along * torch.exp(-self._late(self.focal)).index_select(0, lens).index_select(0, index)
            if self.config.cameras.distortion:
                depth = (torch.linalg.cross(axes[:, 0], axes[:, 1]) * directions).sum(-1)
                q = along.square().sum(-1) / (depth.square() * self.corners()[lens].index_select(0, index))
                rho = self._late(self.radial).index_select(0, lens).index_select(0, index)
                along = along * (1.0 + rho[:, 0] * q + rho[:, 1] * q * q)[:, None]
            directions = directions + ((along - given)[:, :, None] * axes).sum(1)
        if self.config.cameras.refine:
            turns, shifts = self.corrections()
            rows = torch.cat([turns.flatten(1), shifts], dim=-1).index_select(0, index)  # (n_rays, 12)
            directions = (rows[:, :9].view(-1, 3, 3) * directions[:, None, :]).sum(-1)
            origins = origins + rows[:, 9:]
        directions = directions / torch.linalg.vector_norm(directions, dim=-1, keepdim=True)
        return replace(rays, origins=origins, directions=directions)

    def _late(self, value: Tensor) -> Tensor:
        """It learns once the field tells what is wrong with it."""
        start = FADE_IN if self.config.cameras.coarse else CAMERAS_FROM
        return value.detach() + (self.progress >= start).float() * (value - value.detach())

    def corners(self) -> Tensor:
        """(lenses,): r^2 of the pictures' corners on the plane at depth 1, without distortion."""
        return 0.25 * (1e-4 * self.intrinsics[:, :2]).pow(-2).sum(-1)

    @torch.no_grad()
    def refined(self, cameras: Cameras) -> Cameras:
        """The training cameras as they were learned, on their own device; any size of picture will do. A focal factor s
        scales what is left of a lens after its distortion is undone. OpenCV's lens does the same with k r^2 in place of
        k (r / s)^2: its coefficients change by powers of s, the mean of both factors."""
        refuse(len(cameras) != self.n_photos, "cameras", f"the {self.n_photos} cameras of training", len(cameras))
        poses, device = cameras.camera_to_world, cameras.device
        if self.config.cameras.refine:
            turns, shifts = (value.to(device) for value in self.corrections())
            cameras = replace(
                cameras,
                camera_to_world=torch.cat([turns @ poses[:, :, :3], (poses[:, :, 3] + shifts)[:, :, None]], dim=-1),
            )
        return self._through(cameras, self.lenses) if self.config.cameras.learns_lenses else cameras

    @torch.no_grad()
    def new_views(self, cameras: Cameras) -> Cameras:
        """Other cameras with what was learned of their lenses, where training had them."""
        if not self.config.cameras.learns_lenses or cameras.model not in LENS_MODELS:
            return cameras
        intrinsics, numbers = lenses_of(cameras)
        same = (intrinsics[:, None] == self.intrinsics.cpu()).all(-1)  # (new lenses, lenses)
        lenses = torch.where(same.any(-1), same.int().argmax(-1), len(self.intrinsics))  # one more: a lens that is new
        return self._through(cameras, lenses[numbers])

    def _through(self, cameras: Cameras, lenses: Tensor) -> Cameras:
        """Cameras with what was learned of these lenses (n,); one more than there are is a lens that is new."""

        def of_camera(value: Tensor, of_new: float = 0.0) -> Tensor:
            padded = torch.nn.functional.pad(value, (0, 0, 0, 1), value=of_new)
            return padded[lenses.to(value.device)].to(cameras.device)

        distortion = cameras.distortion
        if self.config.cameras.focal:
            phi = of_camera(self.focal)
            if distortion is not None:
                powers = torch.tensor(_POWERS, device=cameras.device)
                distortion = distortion * torch.exp(phi.mean(-1, keepdim=True) * powers)
            cameras = replace(cameras, focal=cameras.focal * torch.exp(phi), distortion=distortion)
        if self.config.cameras.distortion:
            given = torch.zeros(len(cameras), 8, device=cameras.device) if distortion is None else distortion
            bent = bent_coefficients(given, of_camera(self.radial), of_camera(self.corners()[:, None], 1.0))
            cameras = replace(cameras, model="opencv", distortion=bent)
        return cameras

    def expose(self, raw: Tensor, rays: Rays, samples: PackedSamples) -> Tensor:
        """Logits (capacity, 4) of samples with the exposure of their photos."""
        if not self.config.photo.exposure or rays.camera_indices is None:
            return raw
        # To each sample its ray's shift; behind it, for each ray the sum over its samples.
        shifts, index = self.log_gains().index_select(0, rays.camera_indices), samples.ray_indices
        spread = lambda rows: torch.nn.functional.pad(rows, (0, 1))[index].to(raw.dtype)  # noqa: E731
        return raw + linear(shifts, spread, lambda grad: packed_sum(grad[:, :3].float().contiguous(), samples.offsets))

    def exposed(self, rgb_sigma_fn: RgbSigmaFn, rays: Rays) -> RgbSigmaFn:
        """The colours of a field over these rays with the exposure of their photos."""
        index = rays.camera_indices
        if not self.config.photo.exposure or index is None:
            return rgb_sigma_fn

        def function(t_starts: Tensor, t_ends: Tensor, ray_indices: Tensor) -> tuple[Tensor, Tensor]:
            rgb, density = rgb_sigma_fn(t_starts, t_ends, ray_indices)
            return exposed_color(rgb, self.log_gains().index_select(0, index).index_select(0, ray_indices)), density

        return function

    def log_gains(self) -> Tensor:
        """(n, 3): the exposure of each photo and channel; zero in the mean."""
        return (gains := self.exposure * (0.1 + self.exposure.abs())) - gains.mean(0)

    def look(self, camera_indices: Tensor | None, n_rays: int) -> Tensor:
        """(n_rays, appearance): of each ray's photo or the mean in training; else of `shown`, or the mean, 0."""
        centred = self.appearance - self.appearance.mean(0)
        if camera_indices is not None and torch.is_grad_enabled():  # neighbours in a batch are any rays
            own = torch.arange(n_rays, device=centred.device) % MEAN_EVERY != 0
            return centred.index_select(0, camera_indices) * own[:, None]
        one = torch.zeros_like(centred[0]) if self.shown is None else centred[self.shown]
        return (one if self.guest is None else self.guest).expand(n_rays, -1)

    def level_weights(self) -> Tensor:
        """(n_levels,): 1 for the levels that are there, 0 for those to come, between them a smooth window."""
        levels, first = self.n_levels, min(FIRST_LEVELS, self.n_levels)
        reached = first + (levels - first) * (self.progress / FADE_IN).clamp(max=1.0)
        share = (reached - torch.arange(levels, device=self.progress.device)).clamp(0.0, 1.0)
        return 0.5 - 0.5 * torch.cos(math.pi * share)


def build_photos(config: Config, n_photos: int, n_lenses: int) -> PhotoCorrections | None:
    """What the config asks to be learned of each photo; None where that is nothing."""
    if not (config.cameras.learns or config.photo.exposure or config.photo.appearance):
        return None
    refuse(n_photos < 1, "bounds", "the number of training photos, of which something is learned", "none")
    return PhotoCorrections(config, n_photos, n_lenses)
