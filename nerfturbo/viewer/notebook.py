"""For notebooks: a scene as stills with sliders, in HTML that needs no server, and a progress bar below a cell."""

import base64
import html
import importlib
import io
import json
import math
import sys
from collections.abc import Callable
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import torch
from PIL import Image

from ..data.cameras import Cameras, look_at
from ..data.images import to_bytes
from ..data.options import LoadOptions
from ..data.scene import open_scenes
from ..errors import InputError, refuse
from ..evaluation.camera_path import capture_path, with_times
from ..evaluation.run_folder import open_run
from ..training.checkpoint import latest_checkpoint
from ..training.trainer import load_model

Bar = Callable[[float, str], None]  # takes the share that is done, and a text
RISES = (-15.0, 0.0, 15.0)  # degrees
PAGE = """<style>body{margin:0;font:14px sans-serif}input{width:160px;vertical-align:middle}</style><img id=i><br>
around <input type=range id=a max=%d value=0> height <input type=range id=h max=%d value=%d><script>const s=%s,
f=e=>document.getElementById(e),d=()=>{f("i").src="data:image/jpeg;base64,"+s[f("h").value][f("a").value]};
f("a").oninput=f("h").oninput=d;d()</script>"""


@dataclass(frozen=True, repr=False)
class Stills:
    """What `show` returns: a notebook displays it."""

    page: str  # self-contained HTML
    size: tuple[int, int]  # width and height of the stills

    def _repr_html_(self) -> str:
        frame = f'width="{max(460, self.size[0])}" height="{self.size[1] + 40}" style="border:0"'
        return f'<iframe srcdoc="{html.escape(self.page)}" {frame}></iframe>'


def show(source: Any, *, cameras: Cameras | None = None, frames: int = 12, width: int | None = None) -> Stills:
    """Stills on a path around a scene, with sliders, for a notebook. `source` is a run folder, a `Trainer`, or a model;
    one without the `cameras` of its images is looked at from around its box. `width`: 200 on a CPU, 480 on a GPU.

    >>> show("runs/lego", frames=1)
    Traceback (most recent call last):
    nerfturbo.errors.InputError: frames: expected 2 to 240, got 1
    """
    refuse(not 2 <= frames <= 240, "frames", "2 to 240", frames)
    refuse(width is not None and not 16 <= width <= 4096, "width", "16 to 4096 pixels", width)
    if isinstance(source, str | Path):
        data = (run := open_run(source)).read_config().data
        cameras = open_scenes(data.source, LoadOptions.of(data))[0].cameras if cameras is None else cameras
        source = load_model(latest_checkpoint(run.path), "cuda" if torch.cuda.is_available() else "cpu")
    cameras = getattr(getattr(source, "scene", None), "cameras", None) if cameras is None else cameras
    model = getattr(source, "model", source)
    if not hasattr(model, "render_image"):
        raise InputError("source", "a run folder, a Trainer or a model", type(source).__name__)
    cameras = _ring(model) if cameras is None else cameras
    path, kind = capture_path(cameras, model.bounds.aabb.center, frames)
    path = path if cameras.times is None else with_times(path, None)
    wide = width or (200 if model.device.type == "cpu" else 480)
    path, rises = path.scaled(wide / int(path.size[0, 0])), (0.0,) if kind == "walk" else RISES
    bar, stills = open_bar() or (lambda share, text: None), []
    for row, rise in enumerate(rises):
        raised, stills = _raised(path, rise, model.bounds.aabb.center), [*stills, []]
        for index in range(frames):
            buffer, pixels = io.BytesIO(), to_bytes(model.render_image(raised, index).rgb).cpu().numpy()
            Image.fromarray(pixels).save(buffer, "JPEG", quality=88)
            stills[-1].append(base64.b64encode(buffer.getvalue()).decode())
            share = (row * frames + index + 1) / (frames * len(rises))
            bar(share, "" if share == 1.0 else "rendering stills")
    page = PAGE % (frames - 1, len(rises) - 1, len(rises) // 2, json.dumps(stills))
    return Stills(page, (int(path.size[0, 0]), int(path.size[0, 1])))


def _ring(model: Any) -> Cameras:
    """Eight around the whole box, or, where the scene goes on beyond it, inside of it."""
    target, around = torch.tensor(model.bounds.aabb.center), torch.arange(8) * (0.25 * math.pi)
    reach = model.bounds.aabb.diagonal * (0.25 if model.grid.config.levels > 1 else 0.75)
    eyes = target + reach * torch.stack([around.cos(), around.sin(), torch.full_like(around, 0.4)], dim=-1)
    return Cameras.pinhole(look_at(eyes, target), width=256, height=256, field_of_view_x=0.8)


def _raised(path: Cameras, degrees: float, center: tuple[float, float, float]) -> Cameras:
    """The cameras higher by an angle, as seen from what they look at."""
    reach, up = (path.positions - torch.tensor(center)).norm(dim=-1, keepdim=True), torch.tensor([0.0, 0.0, 1.0])
    target, back = path.positions + path.forward * reach, -path.forward
    angle = (back[:, 2:].clamp(-1.0, 1.0).asin() + math.radians(degrees)).clamp(-1.3, 1.3)
    flat = torch.nn.functional.normalize(back * (1.0 - up), dim=-1)
    eyes = target + reach * (flat * angle.cos() + up * angle.sin())
    return path if degrees == 0.0 else replace(path, camera_to_world=look_at(eyes, target))


def open_bar() -> Bar | None:
    """A progress bar below the cell that runs; None outside notebooks. An empty text removes it."""
    shell = sys.modules["IPython"].get_ipython() if "IPython" in sys.modules else None
    if getattr(shell, "kernel", None) is None:
        return None
    handle = importlib.import_module("IPython.display").DisplayHandle()
    handle.display({"text/html": ""}, raw=True)

    def update(share: float, text: str) -> None:
        shown = f"<progress value={share:.3f}></progress> {html.escape(text)}" if text else ""
        handle.update({"text/html": shown}, raw=True)

    return update
