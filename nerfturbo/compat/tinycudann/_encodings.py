"""The encodings by name. Each maps (n, inputs) to (n, outputs); all but the grids have no parameters."""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Protocol

import torch
from torch import Tensor

from ...errors import InputError
from ...ops import spherical_harmonics
from ._config import Config
from ._grid import Grid, grid_spec


class EncodingPart(Protocol):
    """One encoding; `pad_value` fills the columns that a network adds to reach its width."""

    n_inputs: int
    n_outputs: int
    n_params: int
    n_original_params: int
    pad_value: float
    alignment: int

    def initial(self, generator: torch.Generator) -> Tensor: ...

    def __call__(self, x: Tensor, params: Tensor, half: Tensor | None) -> Tensor: ...

    def from_original(self, params: Tensor) -> Tensor: ...


class Fixed:
    """An encoding without parameters."""

    pad_value = 1.0
    alignment = 1
    n_params = n_original_params = 0

    def __init__(self, n_inputs: int, n_outputs: int, function: Callable[[Tensor], Tensor]) -> None:
        self.n_inputs, self.n_outputs, self.function = n_inputs, n_outputs, function

    def initial(self, generator: torch.Generator) -> Tensor:
        return torch.zeros(0)

    def __call__(self, x: Tensor, params: Tensor, half: Tensor | None) -> Tensor:
        result = self.function(x)
        return result if half is None else result.to(half.dtype)

    def from_original(self, params: Tensor) -> Tensor:
        return params


class Composite:
    """Several encodings, each of some of the inputs, side by side or reduced to one."""

    def __init__(self, config: Config, n_inputs: int) -> None:
        nested = config.values.get("nested")
        if not isinstance(nested, (list, tuple)) or not nested:
            raise InputError(f"{config.where}.nested", "a list of encodings", repr(nested))
        self.reduction = config.choice(
            "reduction", "Concatenation", {"concatenation": "cat", "sum": "sum", "product": "product"}
        )
        self.parts, self.begins = self._parts(config, nested, n_inputs)
        self.pads = [0] * len(self.parts)
        if self.reduction == "cat":
            total = 0
            for index, part in enumerate(self.parts[:-1]):
                total += part.n_outputs
                self.pads[index] = -total % self.parts[index + 1].alignment
                total += self.pads[index]
            self.n_outputs = sum(part.n_outputs for part in self.parts) + sum(self.pads)
        else:
            self.n_outputs = self.parts[0].n_outputs
            if any(part.n_outputs != self.n_outputs for part in self.parts):
                widths = ", ".join(str(part.n_outputs) for part in self.parts)
                raise InputError(config.where, "encodings of one width to reduce", widths)
        self.n_inputs, self.pad_value = n_inputs, self.parts[-1].pad_value
        self.alignment = math.lcm(*(part.alignment for part in self.parts))
        self.n_params = sum(part.n_params for part in self.parts)
        self.n_original_params = sum(part.n_original_params for part in self.parts)

    @staticmethod
    def _parts(config: Config, nested: object, n_inputs: int) -> tuple[list[EncodingPart], list[int]]:
        parts, begins, offset = [], [], 0
        settings = [Config(one, f"{config.where}.nested[{i}]") for i, one in enumerate(nested)]  # type: ignore[arg-type]
        given = sum(one.integer("n_dims_to_encode", 0, 0) for one in settings)
        anywhere = any("dims_to_encode_begin" in one for one in settings)
        open_ones = [one for one in settings if "n_dims_to_encode" not in one]
        if len(open_ones) > 1 or (anywhere and open_ones) or (not anywhere and given > n_inputs):
            got = f"{given} of {n_inputs}, and {len(open_ones)} encodings without n_dims_to_encode"
            raise InputError(config.where, "n_dims_to_encode that add up, left out at most once", got)
        for one in settings:
            offset = one.integer("dims_to_encode_begin", offset, 0)
            width = one.integer("n_dims_to_encode", n_inputs - given, 0)
            if width:
                parts.append(encoding_part(one, width))
                begins.append(offset)
            offset += width
        return parts, begins

    def initial(self, generator: torch.Generator) -> Tensor:
        return torch.cat([part.initial(generator) for part in self.parts])

    def __call__(self, x: Tensor, params: Tensor, half: Tensor | None) -> Tensor:
        sizes = [part.n_params for part in self.parts]
        own = params.split(sizes)
        halves = [half] * len(sizes) if half is None else half.split(sizes)
        results = []
        for part, begin, pad, mine, copy in zip(self.parts, self.begins, self.pads, own, halves, strict=True):
            result = part(x[:, begin : begin + part.n_inputs], mine, copy)
            results.append(torch.nn.functional.pad(result, (0, pad), value=part.pad_value) if pad else result)
        if self.reduction == "cat":
            return results[0] if len(results) == 1 else torch.cat(results, dim=-1)
        stacked = torch.stack(results)
        return stacked.sum(0) if self.reduction == "sum" else stacked.prod(0)

    def from_original(self, params: Tensor) -> Tensor:
        own = params.split([part.n_original_params for part in self.parts])
        return torch.cat([part.from_original(mine) for part, mine in zip(self.parts, own, strict=True)])


def encoding_part(config: Config, n_inputs: int) -> EncodingPart:
    """The encoding that a configuration names."""
    kind = config.kind("OneBlob")
    grids = {"grid": "hash", "hashgrid": "hash", "densegrid": "dense", "tiledgrid": "tiled"}
    if kind in grids:
        return Grid(grid_spec(config, n_inputs, grids[kind]))
    if kind == "composite":
        return Composite(config, n_inputs)
    if kind == "identity":
        scale, offset = config.number("scale", 1.0), config.number("offset", 0.0)
        return Fixed(n_inputs, n_inputs, lambda x: x * scale + offset)
    if kind == "frequency":
        n = config.integer("n_frequencies", 12)
        return Fixed(n_inputs, n_inputs * n * 2, lambda x: _frequencies(x, n))
    if kind == "trianglewave":
        n = config.integer("n_frequencies", 12)
        return Fixed(n_inputs, n_inputs * n, lambda x: _triangles(x, n))
    if kind == "oneblob":
        bins = config.integer("n_bins", 16)
        if bins & (bins - 1):
            raise InputError(f"{config.where}.n_bins", "a power of two", str(bins))
        return Fixed(n_inputs, n_inputs * bins, lambda x: _blobs(x, bins))
    if kind == "sphericalharmonics":
        degree = config.integer("degree", 4)
        if n_inputs != 3 or degree > 8:
            raise InputError(config.where, "three inputs and a degree of at most 8", f"{n_inputs} and {degree}")
        return Fixed(3, degree * degree, lambda x: _harmonics(x, degree))
    known = "HashGrid, DenseGrid, TiledGrid, Composite, Identity, Frequency, TriangleWave, OneBlob, SphericalHarmonics"
    raise InputError(f"{config.where}.otype", f"one of {known}", repr(config.values.get("otype")))


def _frequencies(x: Tensor, n: int) -> Tensor:
    """sin and cos of 2^k pi x, side by side, input after input."""
    angles = x[:, :, None] * (torch.pow(2.0, torch.arange(n, device=x.device, dtype=x.dtype)) * math.pi)
    return torch.stack([angles.sin(), angles.cos()], dim=-1).flatten(1)


def _triangles(x: Tensor, n: int) -> Tensor:
    """Triangle waves of 2^k x, each a quarter of a period further."""
    order = torch.arange(n, device=x.device, dtype=x.dtype)
    value = x[:, :, None] * torch.pow(2.0, order - 1.0) + order * 0.25
    return ((value - value.detach().floor() - 0.5).abs() * 4.0 - 1.0).flatten(1)


def _blobs(x: Tensor, bins: int) -> Tensor:
    """The share of a quartic bump of one bin's radius around x, wrapped around at 0 and 1, that falls into each bin."""
    edges = torch.arange(bins + 1, device=x.device, dtype=x.dtype) / bins
    u = (edges - x[:, :, None])[..., None] + torch.tensor([-1.0, 0.0, 1.0], device=x.device, dtype=x.dtype)
    u = u * bins
    bump = 15.0 / 16.0 * u * (1.0 - 2.0 / 3.0 * u.square() + u.square().square() / 5.0) + 0.5
    return bump.clamp(0.0, 1.0).sum(-1).diff(dim=-1).flatten(1)


def _harmonics(x: Tensor, degree: int) -> Tensor:
    """Spherical harmonics of the directions 2 x - 1."""
    directions = x * 2.0 - 1.0
    if degree <= 4:
        return spherical_harmonics(directions.contiguous(), degree)
    return harmonics_by_recurrence(directions, degree)


def harmonics_by_recurrence(directions: Tensor, degree: int) -> Tensor:
    """(n, degree^2) real spherical harmonics of any degree, as polynomials in x, y, z."""
    x, y, z = directions.unbind(-1)
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
