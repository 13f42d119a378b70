"""The page itself: the modules in `page/`, a scene's header and its chunks, in one file or in a folder.

In one file the modules become one script, because browsers load no modules beside a page that was opened from a disk;
the script stands behind the first picture's chunks and draws while others arrive. The policy forbids fetches.
"""

import base64
import contextlib
import html
import io
import json
import math
import re
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from importlib.resources import files
from pathlib import Path
from typing import Any

import torch
from PIL import Image

from ...data.cameras import Cameras, look_at
from ...data.images import to_bytes
from ...errors import InputError, refuse
from ...evaluation.report import data_uri
from ...evaluation.run_folder import finite
from ...files import replacing, write_atomically
from ...types import Aabb
from . import reference
from .bake import BakeResult, Score
from .baked import Baked, Chunk, header

# Each after those it imports:
MODULES = ("camera.js", "controls.js", "loader.js", "shader.glsl.js", "renderer.js", "pace.js", "ui.js", "main.js")
FIRST_CHUNKS = 2  # where the blocks lie, and those that are seen most: enough for a picture
DATA_FOLDER = "data"
STILL, REACH = 192, 1.8  # pixels a side: about as sharp as the first picture that the page itself draws
_POLICY = "default-src 'none'; style-src 'unsafe-inline'; img-src blob: data:; script-src {}; connect-src {}"
_MODULE_WORDS = re.compile(r'^import \{[^}]*\} from "[^"]*";\n|^export ', re.MULTILINE)


@dataclass(frozen=True)
class PageFacts:
    """What the page says of its scene."""

    name: str
    score: Score | None
    seconds: float  # of baking


def write_page(path: Path, result: BakeResult, cameras: Cameras, facts: PageFacts, *, split: bool = False) -> int:
    """Write the page, whole or not at all, and return the bytes of all its files. With `split`, `path` is a folder."""
    scene = header(result.baked) | {
        "chunks": [chunk.describe() for chunk in result.chunks],
        "camera": _first_view(result.baked.blocks.lattice.box, cameras),
        "folder": DATA_FOLDER if split else None,
    }
    told = {"name": facts.name, "seconds": facts.seconds} | ({} if facts.score is None else asdict(facts.score))
    others = result.data_bytes + sum(len(_source(name).encode("utf-8")) for name in MODULES) if split else 0
    size, page, still = 0, b"", _still(result.baked, scene["camera"])
    for _ in range(3):  # the page says how large it is, which makes it a few digits larger
        page = render_page(scene | {"facts": told | {"bytes": size}}, result.chunks, still, split=split)
        size = len(page) + others
    if not split:
        write_atomically(path, page)
        return size
    with replacing(path) as temporary:
        (temporary / DATA_FOLDER).mkdir(parents=True)
        (temporary / "index.html").write_bytes(page)
        for name in MODULES:
            (temporary / name).write_text(_source(name), encoding="utf-8")
        for index, chunk in enumerate(result.chunks):
            (temporary / DATA_FOLDER / f"chunk-{index:03d}.bin").write_bytes(chunk.content)
    return size


def render_page(scene: dict[str, Any], chunks: Sequence[Chunk], still: str = "", *, split: bool = False) -> bytes:
    """index.html with everything that belongs into it."""
    # "<" is escaped so that no text of the scene can end the script element it stands in.
    blob = json.dumps(finite(scene), allow_nan=False).replace("<", "\\u003c")
    script, connect = ("'self' 'unsafe-inline'", "'self'") if split else ("'unsafe-inline'", "'none'")
    scripts = '<script type="module" src="main.js"></script>' if split else f"<script>\n{bundle()}</script>"
    encoded = [] if split else [base64.b64encode(chunk.content).decode("ascii") for chunk in chunks]
    inline = [
        f'<script type="application/octet-stream" id="chunk-{k}">{text}</script><i id="chunk-{k}-end" hidden></i>'
        for k, text in enumerate(encoded)
    ]
    parts = {
        "/*POLICY*/": _POLICY.format(script, connect),
        "/*TITLE*/": html.escape(scene["facts"]["name"]),
        "/*STYLE*/": _source("style.css"),
        "/*STILL*/": still,
        "/*SCENE*/": blob,
        "/*FIRST*/": "\n".join(inline[:FIRST_CHUNKS]),
        "/*SCRIPTS*/": scripts,
        "/*CHUNKS*/": "\n".join(inline[FIRST_CHUNKS:]),
    }
    return _filled("index.html", parts)


def bundle(modules: Sequence[str] = MODULES) -> str:
    """All modules as one script: a function inside of which each knows the names of all, and nobody else does."""
    sources = [_MODULE_WORDS.sub("", _source(name)) for name in modules]
    return "\n".join(["(() => {", '"use strict";', *sources, "})();", ""])


def room_for_data(budget_bytes: float) -> float:
    """What is left of a budget when the page's own text is in it, a header with a network, and a still."""
    return budget_bytes - len(bundle()) - len(_source("index.html")) - len(_source("style.css")) - 40_000


def check_page_path(path: Path, *, split: bool) -> None:
    """Refuse what could not be written, before any work is done."""
    if split and path.suffix:
        raise InputError(str(path), "the name of a folder, because of --split", f"one ending in {path.suffix}")
    other = not split and path.suffix.lower() not in (".html", ".htm")
    refuse(other, str(path), "a file ending in .html", repr(path.suffix), "--split writes a folder")


def splat_page(content: bytes, box: Aabb, cameras: Cameras, name: str) -> bytes:
    """A page that shows splats (a .splat file's bytes), from the first camera on."""
    parts = {"/*TITLE*/": html.escape(name), "/*CAMERA*/": json.dumps(_first_view(box, cameras))}
    parts |= {"/*SPLATS*/": base64.b64encode(content).decode("ascii")}
    return _filled("splats.html", parts | {"/*SCRIPT*/": bundle(("camera.js", "controls.js", "splats.js"))})


def _filled(name: str, parts: dict[str, str]) -> bytes:
    rest, pieces = _source(name), []
    for mark, text in parts.items():  # in the order in which they stand in the page, so that no text is searched
        before, _, rest = rest.partition(mark)
        pieces += [before, text]
    return "".join([*pieces, rest]).encode("utf-8")


def _first_view(box: Aabb, cameras: Cameras) -> dict[str, Any]:
    """The first training camera, turned upright, looking at the middle of the scene or at least past it."""
    eye, forward = cameras.positions[0].double().cpu(), cameras.forward[0].double().cpu()
    radius = box.diagonal * 0.5
    ahead = max(float((eye.new_tensor(box.center) - eye) @ forward), 0.1 * radius)
    focal, size = float(cameras.focal[0].mean()), int(cameras.size[0].min())
    look = {"eye": eye.tolist(), "target": (eye + forward * ahead).tolist(), "radius": radius}
    return look | {"fieldOfView": 2.0 * math.atan(0.5 * size / focal)}


def _still(baked: Baked, view: dict[str, Any]) -> str:
    """The first view as the page will draw it, as the source of an <img> that stands there until it has: a square
    around the shorter side of a window, REACH times as wide. Empty where a camera looks straight up or down."""
    size, buffer = torch.tensor([[STILL, STILL]]), io.BytesIO()
    focal = torch.full((1, 2), 0.5 * STILL / REACH / math.tan(0.5 * view["fieldOfView"]))
    with contextlib.suppress(InputError):
        pose = look_at(torch.tensor([view["eye"]]), torch.tensor(view["target"]))
        picture = reference.render_page(baked, Cameras(pose, focal, 0.5 * size, size), 0).rgb
        Image.fromarray(to_bytes(picture).cpu().numpy()).save(buffer, "JPEG", quality=80)
        return data_uri("image/jpeg", buffer.getvalue())
    return ""


def _source(name: str) -> str:
    return (files("nerfturbo.export.web") / "page" / name).read_text(encoding="utf-8")
