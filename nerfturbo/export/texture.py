"""A mesh with a texture baked from the field, its files (.glb and .obj), and how well it shows the photos."""

import io
import struct
import zipfile
from dataclasses import dataclass
from pathlib import Path
from string import Template

import numpy as np
import torch
import torch.nn.functional as F
from PIL import Image
from torch import Tensor

from ..data.cameras import Cameras, transform_points
from ..data.images import to_bytes
from ..data.pool_file import check_memory
from ..data.scene import Scene
from ..errors import refuse
from ..evaluation.evaluate import WHITE, Comparison, choose_views, compare
from ..evaluation.images import pixels_of
from ..files import replacing, write_atomically
from ..rendering.model import NerfModel
from . import Progress, check_ending, quiet
from .fusion import MAX_CAMERAS
from .mesh import Mesh, Up, colors_from_outside, glb_bytes, rotate_normals, upright
from .raster import Fragments, covered, rasterize

FACES = 100_000  # unless a number is given
ENDINGS = ".glb", ".obj", ".mtl", ".png"
SLACK = 0.01  # of its distance that a point may lie behind what a camera sees of the mesh
RAYS = 2  # a side of a pixel, of the pictures of the mesh
PADDING = 2  # texels around each chart
SMOOTHING = 4  # rounds in which triangles take over the directions of their neighbours
STEEPEST = 0.4  # cosine between a triangle and the plane of its chart, at least
LAYERS = 12  # times that what lies below others is lifted into charts of its own


@dataclass(frozen=True)
class TexturedMesh:
    """Triangles whose corners have places in a texture; coordinates are those of training."""

    vertices: Tensor  # (n, 3) float32
    faces: Tensor  # (m, 3) int64, counter-clockwise seen from outside
    normals: Tensor  # (n, 3) unit length
    places: Tensor  # (n, 2) column and row in the texture, from its top left corner, over its size
    texture: Tensor  # (size, size, 3) in [0, 1], sRGB


def check_texture_path(path: Path, size: int) -> list[Path]:
    """All files that are written for OUT; refuses what could not be."""
    check_ending(path, ".glb", ".obj", ".usdz", flag="--texture")
    refuse(not 64 <= size <= 16384, "--texture-size", "64 to 16384 texels a side", size)
    check_memory("--texture-size", 130 * size * size, "use a smaller one")  # bytes a texel, where baking takes most
    return [path] if path.suffix.lower() == ".usdz" else [path.with_suffix(ending) for ending in ENDINGS]


@torch.no_grad()
def bake_texture(
    model: NerfModel, mesh: Mesh, cameras: Cameras, *, size: int, reach: float, progress: Progress = quiet
) -> TexturedMesh:
    """Give the mesh a texture of `size` x `size` texels. Each shows what the field shows from `reach` before it to as
    far behind it, seen from where the cameras stand that see it; from straight above where none does."""
    places = unwrap(mesh.vertices, mesh.faces, size)
    pairs = torch.cat([mesh.faces.reshape(-1, 1), places.reshape(-1, 2).mul(1024.0).round().long()], dim=1)
    kept, index = torch.unique(pairs, dim=0, return_inverse=True)  # a corner in several charts is there several times
    faces, places = index.view(-1, 3), kept[:, 1:].float() / 1024.0
    found = rasterize(places, torch.ones(len(places)), faces, (size, size))
    texels = (found.face >= 0).nonzero()[:, 0]
    at = Fragments(found.face[texels], found.weights[texels])
    points, normals = (_inside(at, faces, values[kept[:, 0]]) for values in (mesh.vertices, mesh.normals))
    outward = _towards_cameras(mesh, points, normals, cameras, lambda share: progress(0.1 * share))
    colors, rest = torch.zeros(size * size, 4), lambda share: progress(0.1 + 0.9 * share)
    colors[texels] = F.pad(colors_from_outside(model, points, outward, reach, progress=rest), (0, 1), value=1.0)
    whole = spread(colors.view(size, size, 4))
    return TexturedMesh(mesh.vertices[kept[:, 0]], faces, mesh.normals[kept[:, 0]], places / size, whole)


def _inside(at: Fragments, faces: Tensor, values: Tensor) -> Tensor:
    """(k, c): what vertices have (n, c), where pixels see their triangles."""
    return (values[faces[at.face]] * at.weights[..., None]).sum(1)


def _towards_cameras(mesh: Mesh, points: Tensor, normals: Tensor, cameras: Cameras, progress: Progress) -> Tensor:
    """(k, 3): from points on the mesh to the cameras that see them, on the mean; those that look straight at it count
    most. The normal where there is none."""
    some, total = cameras[torch.tensor(choose_views(len(cameras), MAX_CAMERAS))].to("cpu"), torch.zeros_like(points)
    for index in range(len(some)):
        camera = some[index]
        found, depths = see(mesh.vertices, mesh.faces, camera)
        surface = torch.full_like(found.weights[:, 0], torch.inf)
        hit = found.face >= 0
        surface[hit] = (depths[mesh.faces[found.face[hit]]] * found.weights[hit]).sum(-1)
        row, column, inside = pixels_of(camera, points)
        nearest = surface[row * int(camera.size[0, 0]) + column]
        ahead = (points - camera.positions[0]) @ camera.forward[0]
        towards = F.normalize(camera.positions[0] - points, dim=-1)
        facing = (towards * normals).sum(-1).clamp_min(0.0)
        total += towards * (facing**2 * (inside & (ahead < nearest * (1.0 + SLACK))))[:, None]
        progress((index + 1) / len(some))
    return torch.where(total.norm(dim=-1, keepdim=True) > 0.0, F.normalize(total, dim=-1), normals)


def see(vertices: Tensor, faces: Tensor, camera: Cameras) -> tuple[Fragments, Tensor]:
    """What the pixels of one camera see of triangles, and how far ahead of it the vertices (n,) lie."""
    pixels, ahead = camera.project(torch.zeros(1, dtype=torch.int64), vertices)
    width, height = camera.size[0].tolist()
    return rasterize(pixels, ahead, faces, (width, height)), ahead


def spread(colors: Tensor) -> Tensor:
    """(size, size, 3): colours with a weight (size, size, 4) continued over texels without one, so that seams do not
    show: from their neighbours, and further away from ever larger means."""
    layers = [colors.permute(2, 0, 1)[None]]
    for _ in range(2 * PADDING):
        layers[0] = torch.where(layers[0][:, 3:] > 0.0, layers[0], _shared(F.avg_pool2d(layers[0], 3, 1, 1)))
    while min(layers[-1].shape[2:]) > 1:
        layers.append(_shared(F.avg_pool2d(layers[-1], 2, ceil_mode=True)))
    whole = layers.pop()
    for finer in reversed(layers):
        whole = torch.where(finer[:, 3:] > 0.0, finer, F.interpolate(whole, finer.shape[2:], mode="nearest"))
    return whole[0, :3].permute(1, 2, 0).contiguous()


def _shared(sums: Tensor) -> Tensor:
    """Sums of colours over those of their weights, which become 1; 0 where there are none."""
    return sums / sums[:, 3:].clamp_min(1e-9) * (sums[:, 3:] > 0.0)


@torch.no_grad()
def picture(mesh: TexturedMesh, camera: Cameras, background: Tensor) -> tuple[Tensor, Tensor]:
    """(height, width, 3): the mesh in a camera over a background (3,); (height, width): its share of each pixel."""
    large = camera.to("cpu").scaled(float(RAYS))
    width, height = large.size[0].tolist()
    found, _ = see(mesh.vertices, mesh.faces, large)
    places = _inside(found, mesh.faces, mesh.places).view(1, height, width, 2) * 2.0 - 1.0
    texture = mesh.texture.permute(2, 0, 1)[None]
    colors = F.grid_sample(texture, places, mode="bilinear", padding_mode="border", align_corners=False)
    shown = (found.face >= 0).view(1, 1, height, width).float()
    colors = colors * shown + background.view(1, 3, 1, 1) * (1.0 - shown)
    return F.avg_pool2d(colors, RAYS)[0].permute(1, 2, 0), F.avg_pool2d(shown, RAYS)[0, 0]


def score_texture(
    model: NerfModel, mesh: TexturedMesh, scene: Scene, *, views: int = 10, progress: Progress = quiet
) -> tuple[Comparison, float]:
    """Pictures of the mesh against the field's and photos of the scene, and the share of their pixels that show it.
    Where photos have a background, pixels count that show the mesh and nothing else: it has none."""
    shares = []

    def draw(cameras: Cameras, index: int) -> tuple[Tensor, Tensor | None]:
        image, shown = picture(mesh, cameras[index], torch.tensor(WHITE))
        shares.append(float(shown.mean()))
        return image, None if scene.has_alpha else shown == 1.0

    return compare(model, scene, draw, views=views, time=0.0, progress=progress), sum(shares) / len(shares)


def write_textured(path: Path, mesh: TexturedMesh, to_original: Tensor | None = None, *, up: Up | None = None) -> None:
    """Write .glb, .obj, .mtl and .png by one name, or the .usdz, each whole or not at all; axes as of `write_mesh`."""
    glb, obj, mtl, png = (path.with_suffix(ending) for ending in ENDINGS)
    image = Image.fromarray(to_bytes(mesh.texture).numpy())
    flipped = mesh.places * torch.tensor([1.0, -1.0]) + torch.tensor([0.0, 1.0])  # both count from the bottom here
    place = upright(to_original, up or "y")
    points, normals = transform_points(mesh.vertices.double(), place), rotate_normals(mesh.normals, place)
    if path.suffix.lower() == ".usdz":
        axis = "Z" if up == "z" else "Y"  # what programs assume of a file that says nothing
        write_atomically(path, usdz_bytes(points, mesh.faces, normals, places=flipped, image=image, up=axis))
        return
    write_atomically(glb, glb_bytes(points, mesh.faces, normals, places=flipped, image=image, mipmaps=True))
    lines = ["# nerfturbo", f"mtllib {mtl.name}", "usemtl texture"]
    for name, rows in (("v", points), ("vt", flipped), ("vn", normals)):
        lines += [f"{name} " + " ".join(f"{value:.6g}" for value in row) for row in rows.tolist()]
    lines += ["f " + " ".join(f"{corner}/{corner}/{corner}" for corner in row) for row in (mesh.faces + 1).tolist()]
    with replacing(png) as temporary:
        image.save(temporary, "PNG")
    write_atomically(mtl, f"newmtl texture\nKd 1 1 1\nKa 0 0 0\nKs 0 0 0\nillum 1\nmap_Kd {png.name}\n")
    write_atomically(obj, "\n".join(lines) + "\n")


def usdz_bytes(points: Tensor, faces: Tensor, normals: Tensor, *, places: Tensor, image: Image.Image, up: str) -> bytes:
    """One archive of a .usda and a .png, neither compressed, each at a multiple of 64 bytes; `places` (n, 2) in the
    texture count from its lower left corner."""

    def listed(rows: Tensor) -> str:
        return ", ".join("(" + ", ".join(f"{value:.6g}" for value in row) + ")" for row in rows.tolist())

    rows = {"points": points, "normals": normals, "places": places, "extent": torch.stack(points.aminmax(dim=0))}
    text = {"up": up, "counts": ", ".join(["3"] * len(faces)), "corners": ", ".join(map(str, faces.flatten().tolist()))}
    text |= {name: listed(values) for name, values in rows.items()}
    scene = Template(Path(__file__).with_name("mesh.usda").read_text()).substitute(text).encode()
    picture, archive = io.BytesIO(), io.BytesIO()
    image.save(picture, "PNG")
    with zipfile.ZipFile(archive, "w", zipfile.ZIP_STORED) as file:
        for name, content in (("scene.usda", scene), ("texture.png", picture.getvalue())):
            entry = zipfile.ZipInfo(name)
            short = -(archive.tell() + 30 + len(name) + 4) % 64  # bytes from its header on
            entry.extra = struct.pack("<HH", 0x1986, short) + bytes(short)
            file.writestr(entry, content)
    return archive.getvalue()


# --- the plan of a surface: charts that lie flat, none over another, packed into a square -----------------------------


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
