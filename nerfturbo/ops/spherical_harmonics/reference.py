"""Spherical harmonics up to degree 4 as polynomials."""

import torch
from torch import Tensor

from ..packed.reference import widen

# sqrt((2l + 1) / 4pi * ...) of each basis function, in the order of the list below.
C0 = 0.28209479177387814
C1 = 0.4886025119029199
C2 = (1.0925484305920792, 0.31539156525252005, 0.5462742152960396)
C3 = (0.5900435899266435, 2.890611442640554, 0.4570457994644658, 0.3731763325901154, 1.445305721320277)


def spherical_harmonics(directions: Tensor, degree: int) -> Tensor:
    x, y, z = widen(directions).unbind(-1)
    values = [torch.full_like(x, C0)]
    if degree > 1:
        values += [-C1 * y, C1 * z, -C1 * x]
    if degree > 2:
        values += [C2[0] * x * y, -C2[0] * y * z, C2[1] * (3.0 * z * z - 1.0), -C2[0] * x * z, C2[2] * (x * x - y * y)]
    if degree > 3:
        values += [
            -C3[0] * y * (3.0 * x * x - y * y),
            C3[1] * x * y * z,
            -C3[2] * y * (5.0 * z * z - 1.0),
            C3[3] * z * (5.0 * z * z - 3.0),
            -C3[2] * x * (5.0 * z * z - 1.0),
            C3[4] * z * (x * x - y * y),
            -C3[0] * x * (x * x - 3.0 * y * y),
        ]
    return torch.stack(values, dim=-1)
