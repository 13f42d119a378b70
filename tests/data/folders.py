"""One tiny scene, written as a folder in each format."""

from __future__ import annotations

import json
import struct
from pathlib import Path

import numpy as np
import torch
from PIL import Image
from PIL.PngImagePlugin import PngInfo

from nerfturbo.data.cameras import look_at, opengl_to_opencv, world_to_camera

N_VIEWS, WIDTH, HEIGHT, FOCAL = 16, 24, 16, 30.0


def poses() -> torch.Tensor:
    """(n, 3, 4) float64: a ring of cameras that look inwards, +z up."""
    angle = torch.arange(N_VIEWS, dtype=torch.float64) * 0.6
    eyes = torch.stack([3.0 * angle.cos(), 3.0 * angle.sin(), 0.8 + 0.1 * angle.sin()], -1)
    return look_at(eyes, torch.tensor([0.2, -0.1, 0.3], dtype=torch.float64))


def points() -> torch.Tensor:
    """(300, 3) float64: within 2 of the middle."""
    draw = torch.Generator().manual_seed(0)
    return torch.rand(300, 3, generator=draw, dtype=torch.float64) * 2.0 - 1.0


def write_pictures(folder: Path, mode: str = "RGB") -> list[str]:
    folder.mkdir(parents=True, exist_ok=True)
    names = [f"view_{index:02d}.png" for index in range(N_VIEWS)]
    for index, name in enumerate(names):
        color = (index, 100, 200, 255)[: len(mode)]
        image = Image.new(mode, (WIDTH, HEIGHT), color)
        if mode == "RGBA":
            image.paste((0, 0, 0, 0), (0, HEIGHT // 2, WIDTH, HEIGHT))  # something that is seen through
        image.save(folder / name)
    return names


def write_transforms(folder: Path, mode: str = "RGB", **values: object) -> Path:
    names = write_pictures(folder / "images", mode)
    matrices = torch.cat([poses(), torch.tensor([[[0.0, 0.0, 0.0, 1.0]]]).expand(N_VIEWS, 1, 4)], 1).tolist()
    frames = [
        {"file_path": f"images/{name}", "transform_matrix": matrix}
        for name, matrix in zip(names, matrices, strict=True)
    ]
    document = {"fl_x": FOCAL, "fl_y": FOCAL, "cx": WIDTH / 2, "cy": HEIGHT / 2, "w": WIDTH, "h": HEIGHT}
    document |= {"frames": frames} | values
    (folder / "transforms.json").write_text(json.dumps(document))
    return folder


def quaternions() -> list[tuple[list[float], list[float]]]:
    """World to camera with OpenCV axes, as COLMAP writes it: (w x y z, translation)."""
    result = []
    for matrix in world_to_camera(opengl_to_opencv(poses())):
        r = matrix[:, :3].numpy()
        w = 0.5 * np.sqrt(max(1e-12, 1.0 + np.trace(r)))
        if w > 0.1:
            q = [w, (r[2, 1] - r[1, 2]) / (4 * w), (r[0, 2] - r[2, 0]) / (4 * w), (r[1, 0] - r[0, 1]) / (4 * w)]
        else:
            values, vectors = np.linalg.eigh(_quaternion_matrix(r))
            x, y, z, w = vectors[:, values.argmax()]
            q = [w, x, y, z]
        result.append(([float(v) for v in q], matrix[:, 3].tolist()))
    return result


def _quaternion_matrix(r: np.ndarray) -> np.ndarray:
    return np.array(
        [
            [r[0, 0] - r[1, 1] - r[2, 2], r[0, 1] + r[1, 0], r[0, 2] + r[2, 0], r[2, 1] - r[1, 2]],
            [r[0, 1] + r[1, 0], r[1, 1] - r[0, 0] - r[2, 2], r[1, 2] + r[2, 1], r[0, 2] - r[2, 0]],
            [r[0, 2] + r[2, 0], r[1, 2] + r[2, 1], r[2, 2] - r[0, 0] - r[1, 1], r[1, 0] - r[0, 1]],
            [r[2, 1] - r[1, 2], r[0, 2] - r[2, 0], r[1, 0] - r[0, 1], r[0, 0] + r[1, 1] + r[2, 2]],
        ]
    )


def write_colmap(folder: Path, *, model: int = 1, parameters: list[float] | None = None, text: bool = False) -> Path:
    names = write_pictures(folder / "images")
    parameters = [FOCAL, FOCAL, WIDTH / 2, HEIGHT / 2] if parameters is None else parameters
    sparse = folder / "sparse" / "0"
    sparse.mkdir(parents=True)
    (_write_text if text else _write_binary)(sparse, names, model, parameters)
    return folder


def _write_binary(sparse: Path, names: list[str], model: int, parameters: list[float]) -> None:
    camera = struct.pack("<QiiQQ", 1, 7, model, WIDTH, HEIGHT) + struct.pack(f"<{len(parameters)}d", *parameters)
    (sparse / "cameras.bin").write_bytes(camera)
    images = struct.pack("<Q", len(names))
    for index, (name, (q, t)) in enumerate(zip(names, quaternions(), strict=True)):
        images += struct.pack("<i7di", index + 1, *q, *t, 7) + name.encode() + b"\0"
        images += struct.pack("<Q", 1) + struct.pack("<ddq", 1.0, 2.0, -1)
    (sparse / "images.bin").write_bytes(images)
    cloud = points().tolist()
    data = struct.pack("<Q", len(cloud))
    for index, point in enumerate(cloud):
        data += struct.pack("<Q3d3Bd", index, *point, 1, 2, 3, 0.5) + struct.pack("<Qii", 1, 1, 0)
    (sparse / "points3D.bin").write_bytes(data)


def _write_text(sparse: Path, names: list[str], model: int, parameters: list[float]) -> None:
    from nerfturbo.data.formats.colmap import MODELS

    numbers = " ".join(map(repr, parameters))
    (sparse / "cameras.txt").write_text(f"# cameras\n7 {list(MODELS)[model]} {WIDTH} {HEIGHT} {numbers}\n")
    lines = [f"# Number of images: {len(names)}, mean observations per image: 0.5"]
    for index, (name, (q, t)) in enumerate(zip(names, quaternions(), strict=True)):
        lines += [" ".join(map(repr, [index + 1, *q, *t, 7])) + f" {name}", "" if index % 2 else "1.0 2.0 -1"]
    (sparse / "images.txt").write_text("\n".join(lines) + "\n")
    cloud = [f"{i} {x!r} {y!r} {z!r} 1 2 3 0.5 1 0" for i, (x, y, z) in enumerate(points().tolist())]
    (sparse / "points3D.txt").write_text("\n".join(cloud) + "\n")


def write_llff(folder: Path, images: str = "images") -> Path:
    write_pictures(folder / images)
    right, up, backward, position = poses().unbind(-1)
    size = torch.tensor([HEIGHT, WIDTH, FOCAL], dtype=torch.float64).expand(N_VIEWS, 3)
    rows = torch.stack([-up, right, backward, position, size], -1).reshape(N_VIEWS, 15)
    depths = torch.tensor([[1.0, 6.0]], dtype=torch.float64).expand(N_VIEWS, 2)
    np.save(folder / "poses_bounds.npy", torch.cat([rows, depths], 1).numpy())
    return folder


def write_blender_json(folder: Path) -> Path:
    """Blender's format, training split alone; pictures in images/."""
    names = write_pictures(folder / "images", "RGBA")
    bottom = torch.tensor([[[0.0, 0.0, 0.0, 1.0]]]).expand(N_VIEWS, 1, 4)
    frames = [
        {"file_path": f"./images/{Path(name).stem}", "transform_matrix": matrix, "time": index / N_VIEWS}
        for index, (name, matrix) in enumerate(zip(names, torch.cat([poses(), bottom], 1).tolist(), strict=True))
    ]
    (folder / "transforms_train.json").write_text(json.dumps({"camera_angle_x": 0.7, "frames": frames}))
    return folder


def write_rich_pictures(folder: Path, ending: str, mode: str = "RGB") -> Path:
    """As `write_transforms`, with pictures of noise in another format and mode, that carry EXIF and, as PNG, text."""
    write_transforms(folder)
    exif, text, draw = Image.Exif(), PngInfo(), np.random.default_rng(0)
    if ending == ".heic":
        import pillow_heif

        pillow_heif.register_heif_opener()
    exif[0x0112], exif[0x010F] = 1, "a camera"
    text.add_itxt("Comment", "noise " * 20, zip=True)
    for path in sorted((folder / "images").iterdir()):
        path.unlink()
        image = Image.fromarray(draw.integers(0, 255, (HEIGHT, WIDTH, 3), dtype=np.uint8))
        if mode == "I;16":
            image = Image.fromarray(draw.integers(0, 65535, (HEIGHT, WIDTH), dtype=np.uint16))
        options = {"pnginfo": text} | ({"transparency": 3} if mode == "P" else {}) if ending == ".png" else {}
        image = image if mode == "I;16" else image.convert(mode)
        image.save(path.with_suffix(ending), exif=exif, **options)
    file = folder / "transforms.json"
    file.write_text(file.read_text().replace(".png", ending))
    return folder
