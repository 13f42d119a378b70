"""The encodings by name. Each maps (n, inputs) to (n, outputs); all but the grids have no parameters. Grids of
trainable features are hashed, dense or tiled, in one to seven dimensions. Level l has the scale s_l = base_resolution *
per_level_scale^l - 1. Three dimensions with linear blending, hashed or dense, are computed by kernels; the rest is
plain torch. The kernels' table has one more node per axis of a dense level than tiny-cuda-nn's, whose last nodes wrap
around to the first ones; `from_original` copies its parameters to where they belong."""

import itertools
import math
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass
from functools import cached_property
from numbers import Real
from typing import Any

import torch
from torch import Tensor

from ...errors import InputError, refuse
from ...ops import hash_encode, spherical_harmonics
from ...ops.hash_encode import HashLayout, HashLevel
from ...ops.spherical_harmonics import reference

PRIMES = (1, 2654435761, 805459861, 3674653429, 2097192037, 1434869437, 2165219737)
MOST_ROWS = 1 << 28


class Config:
    """One component's settings, names in any case, and where they stand in the whole configuration."""

    def __init__(self, values: Mapping[str, Any], where: str) -> None:
        refuse(not isinstance(values, Mapping), where, "a dictionary of settings", type(values).__name__)
        self.values, self.where = values, where

    def refuse(self, bad: object, name: str, expected: str, got: object, hint: str = "") -> None:
        """Raise InputError about a setting, or with no name about all of them, where `bad`."""
        refuse(bool(bad), f"{self.where}.{name}" if name else self.where, expected, got, hint)

    def kind(self, default: str) -> str:
        return str(self.values.get("otype", default)).lower()

    def integer(self, name: str, default: int, least: int = 1) -> int:
        value = self.number(name, default)
        self.refuse(value % 1 or value < least, name, f"a whole number, at least {least}", repr(value))
        return int(value)

    def number(self, name: str, default: float) -> Any:
        value = self.values.get(name, default)
        bad = isinstance(value, bool) or not isinstance(value, Real) or not math.isfinite(value)
        self.refuse(bad, name, "a number", repr(value))
        return value

    def choice(self, name: str, default: str, choices: Iterable[str]) -> str:
        value = str(self.values.get(name, default)).lower()
        self.refuse(value not in choices, name, "one of " + ", ".join(choices), repr(self.values.get(name)))
        return value


class EncodingPart:
    """One encoding; `pad_value` fills the columns that a network adds to reach its width. Without parameters here."""

    n_inputs: int
    n_outputs: int
    pad_value: float = 1.0
    alignment: int = 1
    n_params: int = 0
    n_original_params: int = 0

    def initial(self, generator: torch.Generator) -> Tensor:
        return torch.zeros(0)

    def __call__(self, x: Tensor, params: Tensor, half: Tensor | None) -> Tensor:
        raise NotImplementedError

    def from_original(self, params: Tensor) -> Tensor:
        """tiny-cuda-nn's parameters of the same encoding, in this one's order: the same function of position."""
        return params


class Fixed(EncodingPart):
    """A function of the inputs alone."""

    def __init__(self, n_inputs: int, n_outputs: int, function: Callable[[Tensor], Tensor]) -> None:
        self.n_inputs, self.n_outputs, self.function = n_inputs, n_outputs, function

    def __call__(self, x: Tensor, params: Tensor, half: Tensor | None) -> Tensor:
        result = self.function(x)
        return result if half is None else result.to(half.dtype)


class Composite(EncodingPart):
    """Several encodings, each of some of the inputs, side by side or reduced to one."""

    def __init__(self, config: Config, n_inputs: int) -> None:
        nested = config.values.get("nested")
        listed = isinstance(nested, (list, tuple)) and nested
        config.refuse(not listed, "nested", "a list of encodings", repr(nested))
        self.reduction = config.choice("reduction", "Concatenation", ("concatenation", "sum", "product"))
        self.parts, self.begins = zip(*self._parts(config, nested, n_inputs), strict=True)
        self.pads = [0] * len(self.parts)
        widths = [part.n_outputs for part in self.parts]
        self.n_outputs = widths[0]
        if self.reduction == "concatenation":
            for index, part in enumerate(self.parts[1:]):
                self.pads[index] = -self.n_outputs % part.alignment
                self.n_outputs += self.pads[index] + part.n_outputs
        else:
            config.refuse(len(set(widths)) > 1, "", "encodings of one width to reduce", ", ".join(map(str, widths)))
        self.n_inputs, self.pad_value = n_inputs, self.parts[-1].pad_value
        self.alignment = math.lcm(*(part.alignment for part in self.parts))
        self.n_params = sum(part.n_params for part in self.parts)
        self.n_original_params = sum(part.n_original_params for part in self.parts)

    @staticmethod
    def _parts(config: Config, nested: object, n_inputs: int) -> list[tuple[EncodingPart, int]]:
        parts, offset = [], 0
        settings = [Config(one, f"{config.where}.nested[{i}]") for i, one in enumerate(nested)]  # type: ignore[arg-type]
        given = sum(one.integer("n_dims_to_encode", 0, 0) for one in settings)
        anywhere = any("dims_to_encode_begin" in one.values for one in settings)
        open_ones = [one for one in settings if "n_dims_to_encode" not in one.values]
        bad = len(open_ones) > 1 or (anywhere and open_ones) or (not anywhere and given > n_inputs)
        got = f"{given} of {n_inputs}, and {len(open_ones)} encodings without n_dims_to_encode"
        config.refuse(bad, "", "n_dims_to_encode that add up, left out at most once", got)
        for one in settings:
            offset = one.integer("dims_to_encode_begin", offset, 0)
            width = one.integer("n_dims_to_encode", n_inputs - given, 0)
            if width:
                parts.append((encoding_part(one, width), offset))
            offset += width
        return parts

    def initial(self, generator: torch.Generator) -> Tensor:
        return torch.cat([part.initial(generator) for part in self.parts])

    def __call__(self, x: Tensor, params: Tensor, half: Tensor | None) -> Tensor:
        sizes = [part.n_params for part in self.parts]
        own, halves = params.split(sizes), [None] * len(sizes) if half is None else half.split(sizes)
        results = []
        for part, begin, pad, mine, copy in zip(self.parts, self.begins, self.pads, own, halves, strict=True):
            result = part(x[:, begin : begin + part.n_inputs], mine, copy)
            results.append(torch.nn.functional.pad(result, (0, pad), value=part.pad_value) if pad else result)
        if self.reduction == "concatenation":
            return results[0] if len(results) == 1 else torch.cat(results, dim=-1)
        stacked = torch.stack(results)
        return stacked.sum(0) if self.reduction == "sum" else stacked.prod(0)

    def from_original(self, params: Tensor) -> Tensor:
        own = params.split([part.n_original_params for part in self.parts])
        return torch.cat([part.from_original(mine) for part, mine in zip(self.parts, own, strict=True)])


@dataclass(frozen=True)
class GridSpec:
    """What a grid's configuration says."""

    kind: str  # hash, dense or tiled
    dims: int
    n_levels: int
    features: int
    log2_size: int
    base: int
    growth: float
    blend: str  # linear, smoothstep or nearest

    def scale(self, level: int) -> float:
        """Rounded to float32, so that every backend computes the same cell from the same number."""
        return float(torch.tensor(2.0 ** (level * math.log2(self.growth)) * self.base - 1.0, dtype=torch.float32))

    def nodes(self, level: int) -> int:
        """tiny-cuda-nn's nodes per axis."""
        return math.ceil(self.scale(level)) + 1

    def rows(self, level: int) -> int:
        """tiny-cuda-nn's rows of a level."""
        dense = (self.nodes(level) ** self.dims + 7) // 8 * 8
        if self.kind == "hash":
            return min(dense, 1 << self.log2_size)
        return min(dense, self.base**self.dims) if self.kind == "tiled" else dense

    @property
    def original_rows(self) -> int:
        return sum(self.rows(level) for level in range(self.n_levels))


@dataclass(frozen=True)
class NodeLayout(HashLayout):
    """tiny-cuda-nn's levels for the hash-encoding kernels."""

    spec: GridSpec | None = None

    @cached_property
    def levels(self) -> tuple[HashLevel, ...]:
        assert self.spec is not None
        result, offset = [], 0
        for index in range(self.n_levels):
            scale = self.spec.scale(index)
            nodes = math.floor(scale + 0.5) + 2
            hashed = self.spec.kind == "hash" and self.spec.nodes(index) ** 3 > 1 << self.log2_entries
            size = 1 << self.log2_entries if hashed else (nodes**3 + 7) // 8 * 8
            result.append(HashLevel(scale, nodes, offset, size, hashed))
            offset += size
        return tuple(result)


def grid_spec(config: Config, dims: int, kind: str) -> GridSpec:
    """Read a grid's configuration; `kind` is what its name says."""
    refuse(not 1 <= dims <= len(PRIMES), config.where, f"1 to {len(PRIMES)} dimensions", dims)
    features, n_levels = config.integer("n_features_per_level", 2), config.integer("n_levels", 16)
    if "n_features" in config.values:
        n_levels = config.integer("n_features", 32) // features
    bad, got = features not in (1, 2, 4, 8) or n_levels > 32, f"{features} features on {n_levels} levels"
    config.refuse(bad, "", "1, 2, 4 or 8 features per level on at most 32 levels", got)
    stochastic = "stochastic_interpolation"
    config.refuse(config.values.get(stochastic), stochastic, "false", "true", "blending here is exact")
    config.choice("hash", "CoherentPrime", ("coherentprime",))  # others put features elsewhere
    kind = config.choice("type", kind, ("hash", "dense", "tiled", "tile"))
    log2_size, base = config.integer("log2_hashmap_size", 19), config.integer("base_resolution", 16)
    growth = config.number("per_level_scale", 2.0)
    blend = config.choice("interpolation", "Linear", ("linear", "smoothstep", "nearest"))
    spec = GridSpec("tiled" if kind == "tile" else kind, dims, n_levels, features, log2_size, base, growth, blend)
    config.refuse(growth <= 0.0, "per_level_scale", "a number above 0", growth)
    rows = spec.original_rows
    config.refuse(rows > MOST_ROWS, "", f"a table of at most {MOST_ROWS} rows", f"{rows} rows", "make the grid coarser")
    return spec


class Grid(EncodingPart):
    """An encoding of positions in [0, 1]^dims into n_levels * features numbers."""

    pad_value = 0.0

    def __init__(self, spec: GridSpec) -> None:
        self.spec, self.alignment = spec, spec.features
        self.n_inputs, self.n_outputs = spec.dims, spec.n_levels * spec.features
        self.layout: NodeLayout | None = None
        if spec.dims == 3 and spec.kind != "tiled" and spec.blend == "linear" and 3 <= spec.log2_size <= 28:
            finest = max(spec.base, math.ceil(spec.scale(spec.n_levels - 1)) + 1)
            self.layout = NodeLayout(spec.n_levels, spec.features, spec.log2_size, spec.base, finest, spec)
        self.n_params = (spec.original_rows if self.layout is None else self.layout.n_entries) * spec.features
        self.n_original_params = spec.original_rows * spec.features

    def initial(self, generator: torch.Generator) -> Tensor:
        return torch.empty(self.n_params).uniform_(-1e-4, 1e-4, generator=generator)

    def __call__(self, x: Tensor, params: Tensor, half: Tensor | None) -> Tensor:
        table = params.view(-1, self.spec.features)
        if self.layout is not None:
            copy = None if half is None else half.view(-1, self.spec.features)
            return hash_encode(x, table, self.layout, half=copy)
        result = self._encode(x, table)
        return result if half is None else result.to(half.dtype)

    def _encode(self, x: Tensor, table: Tensor) -> Tensor:
        parts, offset, nearest = [], 0, self.spec.blend == "nearest"
        for level in range(self.spec.n_levels):
            p = x.clamp(0.0, 1.0) * self.spec.scale(level) + 0.5
            cell = p.detach().floor()
            fraction = torch.zeros_like(p) if nearest else p - cell
            if self.spec.blend == "smoothstep":
                fraction = fraction * fraction * (3.0 - 2.0 * fraction)
            value = torch.zeros(x.shape[0], self.spec.features, dtype=x.dtype, device=x.device)
            for corner in itertools.product((0,) if nearest else (0, 1), repeat=self.spec.dims):
                shift = torch.tensor(corner, device=x.device)
                weight = torch.where(shift.bool(), fraction, 1.0 - fraction).prod(-1)
                value = value + weight[:, None] * table[offset + self._row(level, cell.long() + shift)].to(x.dtype)
            parts.append(value)
            offset += self.spec.rows(level)
        return torch.cat(parts, dim=-1)

    def _row(self, level: int, node: Tensor) -> Tensor:
        """tiny-cuda-nn's row of a node: strides while they fit the table, else the hash; always modulo its size."""
        size, nodes, stride = self.spec.rows(level), self.spec.nodes(level), 1
        index = torch.zeros_like(node[:, 0])
        for axis in range(self.spec.dims):
            if stride > size:
                break
            index = index + node[:, axis] * stride
            stride *= nodes
        if self.spec.kind == "hash" and size < stride:
            index = torch.zeros_like(index)
            for axis in range(self.spec.dims):
                index = index ^ ((node[:, axis] * PRIMES[axis]) & 0xFFFFFFFF)
        return index % size

    def from_original(self, params: Tensor) -> Tensor:
        if self.layout is None:
            return params
        source, offset, parts = params.view(-1, self.spec.features), 0, []
        for index, level in enumerate(self.layout.levels):
            rows = torch.arange(level.size, device=params.device)
            if not level.hashed:
                node = torch.stack([rows // level.nodes**axis % level.nodes for axis in range(3)], dim=-1)
                rows = self._row(index, node)
            parts.append(source[offset + rows])
            offset += self.spec.rows(index)
        return torch.cat(parts).reshape(-1)


def encoding_part(config: Config, n_inputs: int) -> EncodingPart:
    """The encoding that a configuration names."""
    kind = config.kind("OneBlob")
    grids = {"grid": "hash", "hashgrid": "hash", "densegrid": "dense", "tiledgrid": "tiled"}
    if kind in grids:
        return Grid(grid_spec(config, n_inputs, grids[kind]))
    if kind in ("oneblobfrequency", "nrc"):
        waves = {"otype": "TriangleWave", "n_frequencies": config.integer("n_frequencies", 12), "n_dims_to_encode": 3}
        blobs = {"otype": "OneBlob", "n_bins": config.integer("n_bins", 4), "n_dims_to_encode": 5}
        config, kind = Config({"nested": [waves, blobs, {"otype": "Identity"}]}, config.where), "composite"
    if kind == "composite":
        return Composite(config, n_inputs)
    if kind == "identity":
        scale, offset = config.number("scale", 1.0), config.number("offset", 0.0)
        return Fixed(n_inputs, n_inputs, lambda x: x * scale + offset)
    if kind in ("frequency", "trianglewave"):
        n, (encode, each) = config.integer("n_frequencies", 12), WAVES[kind]
        return Fixed(n_inputs, n_inputs * n * each, lambda x: encode(x, n))
    if kind == "oneblob":
        bins = config.integer("n_bins", 16)
        config.refuse(bins & (bins - 1), "n_bins", "a power of two", bins)
        return Fixed(n_inputs, n_inputs * bins, lambda x: _blobs(x, bins))
    if kind == "sphericalharmonics":
        degree = config.integer("degree", 4)
        config.refuse(n_inputs != 3 or degree > 8, "", "three inputs and a degree of at most 8", (n_inputs, degree))
        basis = spherical_harmonics if degree <= 4 else reference.spherical_harmonics
        return Fixed(3, degree * degree, lambda x: basis((x * 2.0 - 1.0).contiguous(), degree))
    known = "HashGrid, DenseGrid, TiledGrid, Composite, Identity, Frequency, TriangleWave, OneBlob, OneBlobFrequency, "
    known += "SphericalHarmonics"
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


WAVES = {"frequency": (_frequencies, 2), "trianglewave": (_triangles, 1)}  # and columns of each frequency


def _blobs(x: Tensor, bins: int) -> Tensor:
    """The share of a quartic bump of one bin's radius around x, wrapped around at 0 and 1, that falls into each bin."""
    edges = torch.arange(bins + 1, device=x.device, dtype=x.dtype) / bins
    u = (edges - x[:, :, None])[..., None] + torch.tensor([-1.0, 0.0, 1.0], device=x.device, dtype=x.dtype)
    u = u * bins
    bump = 15.0 / 16.0 * u * (1.0 - 2.0 / 3.0 * u.square() + u.square().square() / 5.0) + 0.5
    return bump.clamp(0.0, 1.0).sum(-1).diff(dim=-1).flatten(1)
