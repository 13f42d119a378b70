"""Compositing along rays: density and colour of samples to colour, opacity and depth of rays.

    alpha_i = 1 - exp(-density_i * (t_end_i - t_start_i))
    T_i     = prod_{j < i} (1 - alpha_j)            transmittance before sample i
    w_i     = T_i * alpha_i
    rgb     = sum_i w_i rgb_i,   opacity = sum_i w_i,   depth = sum_i w_i * t_mid_i

Samples with alpha_i < alpha_thre are skipped: no weight and no attenuation. From the first sample with T_i <
early_stop_eps on, a ray has no weight. Both are masks: no gradient passes through them.

`merge_weak_samples`: neighbours that together add little become one, drawn from them by chance.

    tau_i  = density_i (t_end_i - t_start_i)         of the samples that light reaches, in order along their ray
    runs   : from the front, sample i joins the run before it unless that has four, or its weight would pass `weight`
    keep   one sample of every run, sample i with probability w_i / (sum of w over the run)
    length : tau of the whole run over the density of the kept sample, about its own middle

The transmittance behind every run, and the run's weight, are what they were; the expected colour of the ray is exactly
its colour; gradients are right on average to first order in a run's thickness. Surfaces keep all their samples, fog and
what lies behind a surface few. Runs end at four: features visited once in n steps learn n times as slowly under Adam.

A decision is one byte per sample, 0 for a sample that is left out, otherwise 1 + 16 log2(stretch), rounded: lengths are
right within 2.2%, and to the bit for a sample that stands for itself alone. `compact` reads it.
"""

from dataclasses import dataclass
from typing import NamedTuple

import torch
from torch import Tensor

from ...types import PackedSamples
from .._checks import check_device, check_positive, check_shape, check_tensor
from .._dispatch import implementation

Scalar = float | Tensor  # a number, or () on the device


class Composited(NamedTuple):
    """Result of `composite`; fp32 (float64 for float64 input)."""

    rgb: Tensor  # (n_rays, channels), without background
    opacity: Tensor  # (n_rays,)
    depth: Tensor  # (n_rays,), sum of w * t_mid, not divided by opacity
    weights: Tensor  # (capacity,), zero in the tail


def composite(
    density: Tensor, rgb: Tensor, samples: PackedSamples, *, early_stop_eps: float = 0.0, alpha_thre: Scalar = 0.0
) -> Composited:
    """Composite `density` (capacity,) >= 0 and `rgb` (capacity, channels) of any number of channels. Differentiable to
    density and rgb through all four results, not to t. Runs in fp32 whatever comes in. `alpha_thre` may be a () tensor
    on the device.

    >>> import torch
    >>> samples = PackedSamples.from_counts(torch.tensor([1]), torch.tensor([1.0]), torch.tensor([2.0]))
    >>> out = composite(torch.tensor([2.0]), torch.ones(1, 3), samples)
    >>> round(out.opacity.item(), 4)  # 1 - exp(-2)
    0.8647
    """
    _check(density, rgb, samples)
    run = implementation("composite", "composite", density)
    return Composited(*run(density, rgb, samples, early_stop_eps=early_stop_eps, alpha_thre=alpha_thre))


def composite_pixels(
    density: Tensor, rgb: Tensor, samples: PackedSamples, background: Tensor | None = None
) -> Composited:
    """`composite` as a picture shows it: rgb + (1 - opacity) * background, and the mean depth, divided by opacity.
    `background` is (channels,) or (n_rays, channels). Differentiable to density, rgb and background. Opacities below
    fp32's epsilon divide as that.

    >>> import torch
    >>> samples = PackedSamples.from_counts(torch.tensor([1]), torch.tensor([1.0]), torch.tensor([2.0]))
    >>> out = composite_pixels(torch.tensor([2.0]), torch.zeros(1, 3), samples, torch.ones(3))
    >>> round(out.rgb[0, 0].item(), 4), round(out.depth.item(), 4)  # exp(-2), the sample's middle
    (0.1353, 1.5)
    """
    if background is not None:
        shape = (rgb.shape[-1],) if background.dim() == 1 else (samples.n_rays, rgb.shape[-1])
        check_shape("background", background, shape)
        check_device(rgb=rgb, background=background)
    _check(density, rgb, samples)
    return Composited(*implementation("composite", "composite_pixels", density)(density, rgb, samples, background))


def visibility(
    density: Tensor, samples: PackedSamples, *, early_stop_eps: float = 0.0, alpha_thre: Scalar = 0.0
) -> Tensor:
    """(capacity,) bool: the samples that `composite` would give weight under the same thresholds; compositing what
    `compact` keeps of them gives the same. False in the tail. Not differentiable."""
    check_tensor("density", density, (samples.capacity,))
    check_device(density=density, t_starts=samples.t_starts)
    test = implementation("composite", "visibility", density)
    return test(density, samples, early_stop_eps=early_stop_eps, alpha_thre=alpha_thre)


def _check(density: Tensor, rgb: Tensor, samples: PackedSamples) -> None:
    check_tensor("density", density, (samples.capacity,))
    check_tensor("rgb", rgb, (samples.capacity, "channels"))
    check_device(density=density, rgb=rgb, t_starts=samples.t_starts)


GOLDEN = 0x9E3779B9  # 2^32 over the golden ratio: places along a ray become words that share no pattern
MIX = (0x7FEB352D, 0x846CA68B)  # odd factors of a 32-bit mixing function whose every output bit depends on all inputs
PER_OCTAVE = 16  # codes per doubling of a length
LAST_CODE = 255
LONGEST = 4  # samples of a run
OPAQUE = 128.0  # thickness that lets nothing through in fp32: more counts as this


@dataclass(frozen=True)
class Thinning:
    """The weight up to which neighbours become one sample, and a random word per ray."""

    weight: float
    phases: Tensor  # (n_rays,) int32

    def __post_init__(self) -> None:
        check_positive("weight", self.weight)
        check_tensor("phases", self.phases, ("n_rays",), torch.int32)


def merge_weak_samples(optical: Tensor, samples: PackedSamples, thinning: Thinning) -> Tensor:
    """(capacity,) uint8 codes of samples of this optical thickness (capacity,); 0 where that is not above 0. Pass 0 for
    samples that are not to be seen, behind a surface or thinner than a threshold.

    >>> samples = PackedSamples.from_counts(torch.tensor([4]), torch.arange(4.0), torch.arange(1.0, 5.0))
    >>> few = Thinning(0.1, torch.tensor([0], dtype=torch.int32))
    >>> merge_weak_samples(torch.tensor([0.04, 0.04, 0.0, 2.0]), samples, few).tolist()  # two become one, twice as long
    [0, 17, 0, 1]
    """
    check_tensor("optical", optical, (samples.capacity,))
    check_shape("thinning.phases", thinning.phases, (samples.n_rays,))
    check_device(optical=optical, offsets=samples.offsets, phases=thinning.phases)
    with torch.no_grad():
        return implementation("composite", "merge_weak_samples", optical)(optical, samples, thinning)


def visible_codes(
    density: Tensor, samples: PackedSamples, *, early_stop_eps: float, alpha_thre: Scalar, thinning: Thinning | None
) -> Tensor:
    """What to keep of samples of known density (capacity,): `visibility`'s flags, or codes with `thinning`."""
    keep = visibility(density, samples, early_stop_eps=early_stop_eps, alpha_thre=alpha_thre)
    if thinning is None:
        return keep
    optical = density.detach() * (samples.t_ends - samples.t_starts)
    return merge_weak_samples(torch.where(keep, optical, torch.zeros_like(optical)), samples, thinning)


def stretched(t_starts: Tensor, t_ends: Tensor, codes: Tensor) -> tuple[Tensor, Tensor]:
    """The intervals of kept samples (n,) with codes (n,), each about its own middle."""
    half = (t_ends - t_starts) * (torch.exp2((codes.to(t_starts.dtype) - 1.0) / PER_OCTAVE) * 0.5)
    middle = (t_starts + t_ends) * 0.5
    whole = codes == 1
    return torch.where(whole, t_starts, middle - half), torch.where(whole, t_ends, middle + half)
