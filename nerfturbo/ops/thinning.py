"""As many samples as a ray needs: neighbours that together add little become one, drawn from them by chance.

    tau_i  = density_i (t_end_i - t_start_i)         of the samples that light reaches, in order along their ray
    w_i    = T_i (1 - exp(-tau_i))                   weight of sample i, as in `composite`
    runs   : from the front, sample i joins the run before it unless that has four, or its weight would pass `weight`
    keep   one sample of every run, sample i with probability w_i / (sum of w over the run)
    length : tau of the whole run over the density of the kept sample, about its own middle

A run as thick as its samples were together passes the light they passed: the transmittance behind every run is what it
was, not only on average, and so is the weight of the run, the sum of w. With the kept sample's colour in proportion to
w, the expected colour of the ray is exactly its colour, and what chance adds is no more than `weight` times the
difference of colours within one run. Gradients are right on average to first order in a run's thickness. A sample of
more than `weight` is a run of its own: surfaces keep all their samples, fog and what lies behind a surface few.

Runs end at four for the optimizer's sake. Adam steps as far for a large gradient as for a small one, so that features
that are visited once in n steps learn n times as slowly, however right their gradient is on average.

A decision is one byte per sample, 0 for a sample that is left out, otherwise 1 + 16 log2(stretch), rounded: lengths are
right within 2.2%, and to the bit for a sample that stands for itself alone. `compact` reads it.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from ..types import PackedSamples
from ._checks import check_device, check_float, check_int, check_positive, check_shape
from ._dispatch import implementation
from .composite import visibility

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
        check_shape("phases", self.phases, ("n_rays",))
        check_int("phases", self.phases, torch.int32)


def thin_codes(optical: Tensor, samples: PackedSamples, thinning: Thinning) -> Tensor:
    """(capacity,) uint8 codes of samples of this optical thickness (capacity,); 0 where that is not above 0.

    Pass 0 for samples that are not to be seen, behind a surface or thinner than a threshold.

    >>> samples = PackedSamples.from_counts(torch.tensor([4]), torch.arange(4.0), torch.arange(1.0, 5.0))
    >>> few = Thinning(0.1, torch.tensor([0], dtype=torch.int32))
    >>> thin_codes(torch.tensor([0.04, 0.04, 0.0, 2.0]), samples, few).tolist()  # two become one, twice as long
    [0, 17, 0, 1]
    """
    check_shape("optical", optical, (samples.capacity,))
    check_float("optical", optical)
    check_shape("thinning.phases", thinning.phases, (samples.n_rays,))
    check_device(optical=optical, offsets=samples.offsets, phases=thinning.phases)
    with torch.no_grad():
        return implementation("thinning", "thin_codes", optical)(optical, samples, thinning)


def visible_codes(
    density: Tensor,
    samples: PackedSamples,
    *,
    early_stop_eps: float,
    alpha_thre: float | Tensor,
    thinning: Thinning | None,
) -> Tensor:
    """What to keep of samples of known density (capacity,): `visibility`'s flags, or codes with `thinning`."""
    keep = visibility(density, samples, early_stop_eps=early_stop_eps, alpha_thre=alpha_thre)
    return keep if thinning is None else thin_codes(visible_thickness(density, samples, keep), samples, thinning)


def visible_thickness(density: Tensor, samples: PackedSamples, keep: Tensor) -> Tensor:
    """(capacity,) optical thickness of the samples where `keep` is True, 0 elsewhere."""
    optical = density.detach() * (samples.t_ends - samples.t_starts)
    return torch.where(keep, optical, torch.zeros_like(optical))


def stretched(t_starts: Tensor, t_ends: Tensor, codes: Tensor) -> tuple[Tensor, Tensor]:
    """The intervals of kept samples (n,) with codes (n,), each about its own middle."""
    half = (t_ends - t_starts) * (torch.exp2((codes.to(t_starts.dtype) - 1.0) / PER_OCTAVE) * 0.5)
    middle = (t_starts + t_ends) * 0.5
    whole = codes == 1
    return torch.where(whole, t_starts, middle - half), torch.where(whole, t_ends, middle + half)
