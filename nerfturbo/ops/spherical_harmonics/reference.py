"""Spherical harmonics of any degree as polynomials, by recurrence."""

import math

import torch
from torch import Tensor

from ..packed.reference import widen


def spherical_harmonics(directions: Tensor, degree: int) -> Tensor:
    x, y, z = widen(directions).unbind(-1)
    cosine, sine = [torch.ones_like(x)], [torch.zeros_like(x)]  # r^m cos(m phi), r^m sin(m phi)
    for _ in range(degree - 1):
        cosine, sine = [*cosine, x * cosine[-1] - y * sine[-1]], [*sine, x * sine[-1] + y * cosine[-1]]
    legendre: dict[tuple[int, int], Tensor] = {}
    for m in range(degree):
        legendre[m, m] = torch.full_like(x, (-1.0) ** m * math.prod(range(1, 2 * m, 2)))
        if m + 1 < degree:
            legendre[m + 1, m] = z * (2 * m + 1) * legendre[m, m]
        for level in range(m + 2, degree):
            first, second = (2 * level - 1) * z * legendre[level - 1, m], (level + m - 1) * legendre[level - 2, m]
            legendre[level, m] = (first - second) / (level - m)
    columns = []
    for level in range(degree):
        for order in range(-level, level + 1):
            m = abs(order)
            ratio = math.factorial(level - m) / math.factorial(level + m)
            norm = math.sqrt((2 * level + 1) / (4.0 * math.pi) * ratio) * (math.sqrt(2.0) if m else 1.0)
            columns.append(norm * legendre[level, m] * (sine[m] if order < 0 else cosine[m]))
    return torch.stack(columns, dim=-1)
