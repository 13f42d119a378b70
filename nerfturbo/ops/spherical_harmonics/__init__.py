"""Real spherical harmonics of unit directions, the view-direction encoding of Instant-NGP."""

import math

from torch import Tensor

from .._checks import check_tensor, refuse
from .._dispatch import implementation

# (a, k, i, s): the derivative of function k along axis a has the part sign(s) sqrt(|s|) times function i.
_SQUARES = (
    *((1, 1, 0, -3.0), (2, 2, 0, 3.0), (0, 3, 0, -3.0)),
    *((0, 4, 1, -5.0), (1, 4, 3, -5.0), (1, 5, 2, -5.0), (2, 5, 1, 5.0), (2, 6, 2, 15.0), (0, 7, 2, -5.0)),
    *((2, 7, 3, 5.0), (0, 8, 3, -5.0), (1, 8, 1, 5.0)),
    *((0, 9, 4, -10.5), (1, 9, 8, -10.5), (0, 10, 5, -7.0), (1, 10, 7, -7.0), (2, 10, 4, 7.0), (1, 11, 0, -7 / 6)),
    *((1, 11, 6, -35 / 6), (2, 11, 5, 17.5), (2, 12, 0, 7.0), (2, 12, 6, 35.0), (0, 13, 0, -7 / 6), (2, 13, 7, 17.5)),
    *((0, 13, 6, -35 / 6), (0, 14, 7, -7.0), (1, 14, 5, 7.0), (2, 14, 8, 7.0), (0, 15, 8, -10.5), (1, 15, 4, 10.5)),
)
SLOPES = tuple((a, k, i, math.copysign(abs(s) ** 0.5, s)) for a, k, i, s in _SQUARES)


def spherical_harmonics(directions: Tensor, degree: int = 4) -> Tensor:
    """(n, degree^2) orthonormal basis values for unit `directions` (n, 3); degree 1 to 4. Differentiable to
    `directions` as polynomials in x, y, z. fp32 at least.

    >>> import torch
    >>> [round(value, 4) for value in spherical_harmonics(torch.tensor([[0.0, 0.6, 0.8]]), degree=2)[0].tolist()]
    [0.2821, -0.2932, 0.3909, -0.0]
    """
    check_tensor("directions", directions, ("n", 3))
    refuse(not 1 <= degree <= 4, "degree", "1 to 4", degree)
    return implementation("spherical_harmonics", "spherical_harmonics", directions)(directions, degree)
