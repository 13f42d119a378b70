"""What the field says: colours of the training cameras' rays, cells that light reaches, first values of vertices."""

import math
from dataclasses import dataclass, replace
from typing import NamedTuple

import torch
from torch import Tensor

from ...data.cameras import Cameras
from ...errors import refuse
from ...evaluation.evaluate import choose_views
from ...fields.field import Field
from ...rendering.model import NerfModel
from ...types import Rays
from .. import Progress, quiet
from .baked import FEATURE_SCALE, N_BASE, N_FEATURES, encode_density
from .lattice import Lattice, SparseBlocks

VISIBLE = 0.01  # weight from which a sample counts as seen
CHUNK = {"cpu": 1 << 14, "cuda": 1 << 16}  # rays
NEIGHBOURS = 12  # cells of the 26 around one that make it a hole rather than a neighbour
CLOSING = 3  # cells a hole may reach in
TILE, TILES = 8, 1 << 12  # cells a side that are looked at together, and how many such in one go
LEAST_RAYS = 1 << 15
MERGED = 1 << 24  # samples after which cells are summed up
COVERED = 0.97  # of the light: below, cells are coarser by a power of this factor, at most by that one
COARSER, COARSEST = 1.45, 4
N_DIRECTIONS = 6  # from which the field is asked at a vertex
VERTEX_CHUNK = 1 << 17


@dataclass(frozen=True)
class RayPool:
    """Pixels of cameras, drawn once, with the colour and opacity that the field gives them."""

    cameras: Cameras
    time: float | None  # of a scene that moves
    views: Tensor  # (n,) int32
    pixels: Tensor  # (n,) int32, row * width + column
    colors: Tensor  # (n, 4) float16: red, green and blue without background, opacity

    def __len__(self) -> int:
        return self.views.shape[0]

    def rays(self, chosen: slice | Tensor) -> Rays:
        return pixel_rays(self.cameras, self.views[chosen].long(), self.pixels[chosen].long(), self.time)


class VisibleCells(NamedTuple):
    """Cells of a lattice to which light comes, and how much of it over all rays."""

    keys: Tensor  # (n,) int64, each once
    light: Tensor  # (n,) float32
    even: Tensor  # (n,) float32: that of every other ray alone


def draw_pixels(cameras: Cameras, n: int, generator: torch.Generator) -> tuple[Tensor, Tensor]:
    """(n,) views and (n,) pixels in them, drawn evenly on the generator's device."""
    views = torch.randint(len(cameras), (n,), generator=generator, device=generator.device)
    counts = cameras.size.to(generator.device).prod(-1)[views]
    share = torch.rand(n, generator=generator, device=generator.device, dtype=torch.float64)
    return views, torch.minimum((share * counts).long(), counts - 1)


def pixel_rays(cameras: Cameras, views: Tensor, pixels: Tensor, time: float | None) -> Rays:
    """Rays through pixel centres. No picture's own appearance or time: a page shows the scene, not one photo."""
    rays = cameras.pixel_rays(views, pixels)
    return Rays(rays.origins, rays.directions, None if time is None else torch.full_like(rays.origins[:, 0], time))


@torch.no_grad()
def ask_field(
    model: NerfModel,
    cameras: Cameras,
    lattice: Lattice,
    n_rays: int,
    *,
    time: float | None = None,
    seed: int = 0,
    max_samples: float = math.inf,
    progress: Progress = quiet,
) -> tuple[RayPool, VisibleCells]:
    """Render `n_rays` pixels of the cameras, drawn evenly, and note the cells of the lattice that they see; fewer where
    those have `max_samples`: a count and not a clock, for how fine the cells can be follows from the number of rays."""
    device = model.device
    cameras = cameras.to(device)
    views, pixels = draw_pixels(cameras, n_rays, torch.Generator(device).manual_seed(seed))
    pool = RayPool(cameras, time, views.int(), pixels.int(), torch.empty(n_rays, 4, dtype=torch.float16, device=device))
    parts: list[VisibleCells] = []
    chunk = CHUNK.get(device.type, CHUNK["cuda"])
    if not model.marches:  # which places samples all along a ray, most of them for nothing
        chunk //= 4
    n_samples = 0
    for first in range(0, n_rays, chunk):
        part = slice(first, first + chunk)
        rays = pool.rays(part)
        out = model.render_rays(rays)
        pool.colors[part] = torch.cat([out.rgb[:, :3], out.opacity[:, None]], dim=1).half()
        samples = out.samples
        assert samples is not None  # held by render_rays
        n_samples += int(samples.n_samples)
        seen = (out.weights > VISIBLE).nonzero()[:, 0]
        index, weight = samples.ray_indices[seen].long(), out.weights[seen]
        for share_of_step in (0.0, 0.5, 1.0):  # a sample may be longer than a cell
            t = torch.lerp(samples.t_starts[seen], samples.t_ends[seen], share_of_step)
            positions = rays.origins[index] + rays.directions[index] * t[:, None]
            parts.append(_visible(lattice, positions, weight, weight * (index % 2 == 0)))
        if sum(part.keys.shape[0] for part in parts[1:]) > MERGED:
            parts = [_merged(parts)]
        done = first + chunk
        progress(min(1.0, max(done / n_rays, n_samples / max_samples)))
        if n_samples > max_samples and done >= LEAST_RAYS:
            pool = replace(pool, views=pool.views[:done], pixels=pool.pixels[:done], colors=pool.colors[:done])
            break
    cells = _merged(parts)
    empty, expected = cells.keys.shape[0] == 0, "a scene that its training cameras see"
    refuse(empty, "the run", expected, "nothing opaque at all", "train it longer")
    return pool, cells


def _visible(lattice: Lattice, positions: Tensor, light: Tensor, even: Tensor) -> VisibleCells:
    """Of samples at positions (n, 3), those inside of the lattice; a cell may come several times."""
    keys = lattice.cell_keys(positions)
    inside = (keys >= 0).nonzero()[:, 0]
    return VisibleCells(keys[inside], light[inside], even[inside])


def _merged(parts: list[VisibleCells]) -> VisibleCells:
    """Each cell once, in order, with all of its light."""
    keys, light, even = (torch.cat(column) for column in zip(*parts, strict=True))
    keys, where = torch.unique(keys, return_inverse=True)
    return VisibleCells(keys, *(part.new_zeros(keys.shape[0]).index_add_(0, where, part) for part in (light, even)))


def on_coarser(cells: VisibleCells, lattice: Lattice, coarser: Lattice) -> VisibleCells:
    """The same cells on a coarser lattice: those in which their centres lie."""
    return _merged([_visible(coarser, lattice.cell_centers(cells.keys), cells.light, cells.even)])


def coverage(cells: VisibleCells, lattice: Lattice) -> float:
    """How much of the light of every other ray ends in cells that the rest saw, holes closed: with too few rays for the
    cells there are more holes than that."""
    saw = cells.even > 0.0
    closed = close_holes(VisibleCells(cells.keys[saw], cells.even[saw], cells.even[saw]), lattice).keys
    others = (cells.light - cells.even).clamp_min(0.0)
    return float(others[torch.isin(cells.keys, closed)].sum() / others.sum().clamp_min(1e-9))


def as_covered(cells: VisibleCells, lattice: Lattice, progress: Progress = quiet) -> tuple[Lattice, VisibleCells]:
    """The lattice as fine as the rays that looked allow: from a coarse one, which is quickly looked at, on until light
    falls between the cells they saw; and without the outer levels to which none comes."""
    found, seen = lattice, cells
    for step in range(COARSEST, -1, -1):
        finer = Lattice.around(lattice.box, lattice.voxel * COARSER**step, lattice.levels) if step else lattice
        now = on_coarser(cells, lattice, finer) if step else cells
        if step < COARSEST and coverage(now, finer) < COVERED:
            break
        found, seen = finer, now
        progress((COARSEST - step + 1) / (COARSEST + 2))
    nx, ny, nz = found.cells
    levels = 1 + int(seen.keys[-1]) // (nx * ny * nz)  # keys rise level by level
    return replace(found, levels=levels), seen


def close_holes(cells: VisibleCells, lattice: Lattice) -> VisibleCells:
    """With the cells that no ray happened to meet although most of their neighbours were met. A cell on top of a flat
    sheet touches 9 cells of it, one that is missing inside a sheet of two layers 17 others."""
    keys, light, even = cells
    for _ in range(CLOSING):
        if (new := _holes(keys, lattice)).shape[0] == 0:
            break
        keys, order = torch.cat([keys, new]).sort()
        nothing = light.new_zeros(new.shape[0])
        light, even = (torch.cat([part, nothing])[order] for part in (light, even))
    return VisibleCells(keys, light, even)


def _holes(keys: Tensor, lattice: Lattice) -> Tensor:
    """Cells that are not among `keys` (n,) but have NEIGHBOURS of them around. They are looked for only in tiles that
    hold some: a lattice of a scene without an end has milliards of cells, few of them seen."""
    nx, ny, nz = lattice.cells
    place = torch.stack([keys // (nx * ny), keys // nx % ny, keys % nx], dim=-1)  # levels one above the other
    counts = [-(-n // TILE) + 2 for n in (lattice.levels * nz, ny, nx)]  # with an empty tile at each end
    strides = keys.new_tensor([counts[1] * counts[2], counts[2], 1])
    full, member, sizes = torch.unique(((place // TILE + 1) * strides).sum(-1), return_inverse=True, return_counts=True)
    n, tiles = full.shape[0], keys.new_zeros(full.shape[0] + 1, TILE, TILE, TILE, dtype=torch.uint8)  # the last: empty
    tiles[(member, *(place % TILE).unbind(-1))] = 1
    around = torch.cartesian_prod(*[torch.arange(-1, 2, device=keys.device)] * 3)
    near = full[:, None] + (around * strides).sum(-1)  # (n, 27)
    rows = torch.searchsorted(full, near).clamp(max=n - 1)
    rows = torch.where(full[rows] == near, rows, n)
    enough = torch.cat([sizes, sizes.new_zeros(1)])[rows].sum(-1) >= NEIGHBOURS
    source = {-1: slice(TILE - 1, TILE), 0: slice(0, TILE), 1: slice(0, 1)}
    target = {-1: slice(0, 1), 0: slice(1, TILE + 1), 1: slice(TILE + 1, TILE + 2)}
    found = [keys[:0]]
    for part in enough.nonzero()[:, 0].split(TILES):
        wide = tiles.new_zeros(part.shape[0], TILE + 2, TILE + 2, TILE + 2)
        for column, offset in enumerate(around.tolist()):
            at, to = ((slice(None), *(side[step] for step in offset)) for side in (source, target))
            wide[to] = tiles[at][rows[part, column]]
        count = wide
        for axis in (1, 2, 3):
            count = count.narrow(axis, 0, TILE) + count.narrow(axis, 1, TILE) + count.narrow(axis, 2, TILE)
        tile, *inner = ((count >= NEIGHBOURS) & (wide[:, 1:-1, 1:-1, 1:-1] == 0)).nonzero().unbind(-1)
        corner = (full[part[tile], None] // strides % strides.new_tensor(counts) - 1) * TILE
        found.append(((corner + torch.stack(inner, dim=-1)) * keys.new_tensor([ny * nx, nx, 1])).sum(-1))
    return torch.cat(found)


@torch.no_grad()
def first_values(
    field: Field,
    cameras: Cameras,
    blocks: SparseBlocks,
    *,
    time: float | None = None,
    features: bool = True,
    n_directions: int = N_DIRECTIONS,
    progress: Progress = quiet,
) -> Tensor:
    """(n_vertices + 1, 4 or 8) in [0, 1]: red, green, blue, density code, features; the last row is empty. The base
    colour is the mean over the directions; features are the main components of how it differs from that."""
    eyes = cameras.positions.to(blocks.vertices.device)[torch.tensor(choose_views(len(cameras), n_directions))]
    lattice = blocks.lattice
    n_channels, residuals = N_BASE + (N_FEATURES if features else 0), []
    values = torch.zeros(blocks.n_vertices + 1, n_channels, device=blocks.vertices.device)
    for first in range(0, blocks.n_vertices, VERTEX_CHUNK):
        keys = blocks.vertices[first : first + VERTEX_CHUNK]
        positions = lattice.vertex_positions(keys)
        times = None if time is None else torch.full_like(positions[:, 0], time)
        directions = [torch.nn.functional.normalize(positions - eye, dim=-1) for eye in eyes]
        answers = [field(positions, direction, times, None) for direction in directions]
        seen = torch.stack([rgb[:, :3].float() for rgb, _ in answers], dim=1)  # (n, directions, 3)
        part = values[first : first + keys.shape[0]]
        part[:, :3] = seen.mean(1).clamp(0.0, 1.0)
        part[:, 3] = encode_density(answers[0][1].float(), lattice.cell_size(positions))
        if features:
            residuals.append((seen - seen.mean(1, keepdim=True)).flatten(1).half())
        progress(min(1.0, (first + VERTEX_CHUNK) / blocks.n_vertices))
    if features:
        values[:-1, N_BASE:] = _components(residuals)
    return values


def _components(residuals: list[Tensor]) -> Tensor:
    """(n, 4) in [0, 1]: the main components, scaled so that two deviations fill the range."""
    some = torch.cat([part[:: max(1, part.shape[0] // 4096)] for part in residuals]).float()
    if float(some.abs().max()) < 1e-6:
        return torch.full((sum(part.shape[0] for part in residuals), N_FEATURES), 0.5, device=some.device)
    covariance = (some.T @ some / some.shape[0]).double().cpu()
    axes = torch.linalg.eigh(covariance).eigenvectors[:, -N_FEATURES:].flip(-1).float().to(some.device)
    scale = (some @ axes).std(0).clamp_min(1e-6) * 2.0
    return torch.cat([(part.float() @ axes / scale / FEATURE_SCALE + 0.5).clamp(0.0, 1.0) for part in residuals])
