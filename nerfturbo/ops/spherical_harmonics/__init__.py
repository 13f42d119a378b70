"""Real spherical harmonics of unit directions, the view-direction encoding of Instant-NGP."""

from torch import Tensor

from .._checks import check_tensor, refuse
from .._dispatch import implementation


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
