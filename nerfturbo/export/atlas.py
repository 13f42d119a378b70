"""A plan of a surface for its texture: charts that lie flat, none over another, packed into a square."""

import numpy as np
import torch
from torch import Tensor

from ..errors import refuse
from .raster import covered, rasterize

PADDING = 2  # texels around each chart
SMOOTHING = 4  # rounds in which triangles take over the directions of their neighbours
STEEPEST = 0.4  # cosine between a triangle and the plane of its chart, at least
LAYERS = 12  # times that what lies below others is lifted into charts of its own


def unwrap(vertices: Tensor, faces: Tensor, size: int) -> Tensor:
    """(m, 3, 2) where the corners of triangles (m, 3) lie in a texture of `size` x `size` texels; the centre of texel
    (column, row) is (column + 0.5, row + 0.5). Charts are connected triangles that face one of the six axes, seen along
    it. What another part of its chart hides goes to a further chart."""
    from trimesh.graph import face_adjacency

    neighbours = torch.from_numpy(np.array(face_adjacency(faces.numpy()), dtype=np.int64)).view(-1, 2)
    corners = vertices.double()[faces]
    side, layer = _sides(corners, neighbours), torch.zeros(faces.shape[0], dtype=torch.int64)
    axes = torch.stack([(side + 1) % 3, (side + 2) % 3], dim=-1)  # (m, 2) that the chart lies along
    flat = corners.gather(2, axes[:, None].expand(-1, 3, -1))
    height = corners.gather(2, (side % 3)[:, None, None].expand(-1, 3, 1))[..., 0]
    depth = torch.where(side[:, None] < 3, corners.max() - height, height - corners.min()) + 1.0
    own = torch.arange(3 * faces.shape[0]).view(-1, 3)
    for left in reversed(range(LAYERS + 1)):
        places = _pack(flat, _components(neighbours, torch.stack([side, layer], dim=-1)), size)
        points, behind = places.view(-1, 2).float(), depth.reshape(-1).float()
        shown, hidden = rasterize(points, behind, own, (size, size)).face, torch.zeros_like(layer, dtype=torch.bool)
        for face, texel, weights in covered(points, behind, own, (size, size)):
            hidden[face[(weights.amin(-1) > 1e-3) & (shown[texel] != face)]] = True
        if left == 0 or not bool(hidden.any()):
            break
        alone = torch.arange(1, len(layer) + 1) + LAYERS  # at last each for itself
        layer = torch.where(hidden, alone if left == 1 else layer + 1, layer)
    return places


def _sides(corners: Tensor, neighbours: Tensor) -> Tensor:
    """(m,): the axis that each triangle faces, 0 to 2, or 3 to 5 for its other end; neighbours agree where they can."""
    own = torch.linalg.cross(corners[:, 1] - corners[:, 0], corners[:, 2] - corners[:, 0])
    smooth, own = own, torch.nn.functional.normalize(own, dim=-1)
    first, second = neighbours.unbind(1)
    for _ in range(SMOOTHING):
        smooth = smooth.index_add(0, first, smooth[second]).index_add(0, second, smooth[first])
    directions = torch.cat([torch.eye(3), -torch.eye(3)]).to(own.dtype).T
    near, agreed = own @ directions, torch.nn.functional.normalize(smooth, dim=-1) @ directions
    return torch.where(near < STEEPEST, near - 4.0, agreed).argmax(1)


def _components(neighbours: Tensor, labels: Tensor) -> Tensor:
    """(m,) numbers of the connected parts of triangles with equal labels (m, k)."""
    from scipy.sparse import coo_array
    from scipy.sparse.csgraph import connected_components

    first, second = neighbours[(labels[neighbours[:, 0]] == labels[neighbours[:, 1]]).all(-1)].T.numpy()
    graph = coo_array((np.ones(len(first)), (first, second)), shape=(len(labels), len(labels)))
    return torch.from_numpy(connected_components(graph, directed=False)[1]).long()


def _pack(flat: Tensor, charts: Tensor, size: int) -> Tensor:
    """(m, 3, 2) in texels: charts (m,) of corners at `flat` (m, 3, 2), as large as fits, on shelves."""
    index = charts[:, None].expand(-1, 2)
    low, high = (flat.new_zeros(int(charts.max()) + 1, 2) for _ in range(2))
    low.scatter_reduce_(0, index, flat.amin(1), "amin", include_self=False)
    high.scatter_reduce_(0, index, flat.amax(1), "amax", include_self=False)
    extents = high - low
    tall = extents[:, 1] > extents[:, 0]
    extents = torch.where(tall[:, None], extents.flip(1), extents)  # they lie on their longer side
    scale, step, found = size / float(extents[:, 0].max().clamp_min(1e-12)), 0.5, None
    for _ in range(40):  # halve until it fits, then eight times half way back
        corners = _shelves(torch.ceil(extents * scale).long() + 1 + 2 * PADDING, size)
        if corners is not None:
            found = corners, scale
        if found is not None:
            step *= 0.5
            if step < 0.5**10:
                break
        scale *= 1.0 - step if corners is None else 1.0 + step
    hint = "use a larger one, or less --faces"
    refuse(found is None, "--texture-size", f"room for {len(extents)} charts", size, hint)
    assert found is not None
    corners, scale = found
    local = flat - low[charts][:, None]
    local = torch.where(tall[charts][:, None, None], local.flip(2), local)
    return local * scale + (corners[charts] + PADDING + 0.5)[:, None]


def _shelves(sizes: Tensor, side: int) -> Tensor | None:
    """(n, 2) the corners of boxes (n, 2) put row after row into a square, the tallest first; None: no room."""
    corners, x, y, height = np.zeros((len(sizes), 2), dtype=np.int64), 0, 0, 0
    if int(sizes.max()) > side or int(sizes.prod(1).sum()) > side * side:
        return None
    wide = sizes.tolist()
    for chart in sizes[:, 1].argsort(descending=True, stable=True).tolist():
        width, tall = wide[chart]
        if x + width > side:
            x, y, height = 0, y + height, 0
        if y + tall > side:
            return None
        corners[chart], x, height = (x, y), x + width, max(height, tall)
    return torch.from_numpy(corners)
