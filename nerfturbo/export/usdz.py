"""A textured mesh as .usdz: one archive of a .usda and a .png, neither compressed, each at a multiple of 64 bytes."""

import io
import struct
import zipfile
from pathlib import Path
from string import Template

import torch
from PIL import Image
from torch import Tensor


def usdz_bytes(points: Tensor, faces: Tensor, normals: Tensor, *, places: Tensor, image: Image.Image, up: str) -> bytes:
    """Triangles with a texture; `places` (n, 2) in it count from its lower left corner."""

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
