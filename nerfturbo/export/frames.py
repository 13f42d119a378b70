"""Frames of a camera path: colour, depth, opacity and normals as pictures."""

import functools
import hashlib
import json
import re
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import torch
from torch import Tensor

from ..data.cameras import Cameras
from ..data.images import open_upright, save_image, to_bytes
from ..errors import InputError
from ..evaluation.evaluate import choose_views
from ..evaluation.images import SOLID, Channel, channel_image, depth_range
from ..evaluation.run_folder import write_json
from ..rendering.frame import FrameRenderer
from ..rendering.image import RenderedImage, render_view, supersampled
from ..rendering.model import NerfModel
from ..sampling.grid import cropped
from ..types import Aabb
from .video import WriterPool

PROBE_PIXELS = 64  # of the longer side of the small images that decide the range of depths
VERSION = 1  # of frames.json
WRITERS = 4  # threads: encoding a PNG takes longer than rendering it on a GPU
_NAME = re.compile(r"(frame|depth|opacity|normal)_\d{4,}\.png")


@dataclass(frozen=True)
class Look:
    """What frames show."""

    channels: tuple[Channel, ...] = ("color",)
    background: tuple[float, float, float] = (1.0, 1.0, 1.0)
    crop: Aabb | None = None


def recorded_size(cameras: Cameras) -> tuple[int, int] | None:
    """Width and height of all frames, where one recorded graph can make them: pinholes of one size, in plain space."""
    sizes = {(width, height) for width, height in cameras.size.tolist()}
    return sizes.pop() if cameras.model == "pinhole" and cameras.ndc is None and len(sizes) == 1 else None


class FrameMaker:
    """Renders frames of a path one by one; on a GPU as one recorded graph where the cameras allow it."""

    def __init__(self, model: NerfModel, cameras: Cameras, look: Look) -> None:
        self.model, self.cameras, self.look = model, cameras, look
        self.estimator = cropped(model.estimator, look.crop, what="--crop")
        self._background = torch.tensor(look.background, device=model.device)
        self._fast: FrameRenderer | None = None
        size = recorded_size(cameras)
        if size is not None and hasattr(self.estimator, "grid") and model.device.type == "cuda":
            shape = {"width": size[0], "height": size[1], "background": self._background}
            self._fast = FrameRenderer(model.field, self.estimator, **shape)

    def image(self, index: int) -> RenderedImage:
        """Colours, opacity and depth of one frame, in floats."""
        time = None if self.cameras.times is None else float(self.cameras.times[index])

        def render(cameras: Cameras) -> RenderedImage:
            if self._fast is None:
                return self._render(cameras, index)
            pinhole = (cameras.camera_to_world[index], cameras.focal[index], cameras.center[index])
            return self._fast.render(*pinhole, time=time)

        return supersampled(render, self.cameras, self.model.config.render.eval_rays)

    def frame(self, index: int) -> dict[Channel, Tensor]:
        """One frame as images (height, width, 3) uint8 on the CPU, by channel."""
        image = self.image(index)
        shown: dict[Channel, Tensor] = {}
        for channel in self.look.channels:
            depths = self.depths if channel == "depth" else (0.0, 1.0)
            look = {"camera": self.cameras[index], "background": self._background, "depths": depths}
            shown[channel] = to_bytes(channel_image(channel, image, self.model, **look)).cpu()
        return shown

    def _render(self, cameras: Cameras, index: int) -> RenderedImage:
        return render_view(self.model.field, self.estimator, cameras, index, background=self._background)

    @functools.cached_property
    def depths(self) -> tuple[float, float]:
        """The range of depths of the whole path, so that colours mean the same in every frame."""
        found = []
        for index in choose_views(len(self.cameras), 8):
            camera = self.cameras[index]
            image = self._render(camera.scaled(min(1.0, PROBE_PIXELS / int(camera.size.max()))), 0)
            found.append(image.depth[image.opacity > SOLID].cpu())
        return depth_range(torch.cat(found)) or (0.0, self.model.bounds.far)


def digest(checkpoint: str, cameras: Cameras, look: Look) -> str:
    """What decides the pixels of a sequence, in 32 hexadecimal digits."""
    state = hashlib.sha256()
    crop = None if look.crop is None else [look.crop.low, look.crop.high]
    state.update(json.dumps([VERSION, checkpoint, look.background, crop, cameras.model]).encode())
    parts = (cameras.camera_to_world, cameras.focal, cameras.center, cameras.size, cameras.times, cameras.distortion)
    for part in parts:
        state.update(b"-" if part is None else part.detach().cpu().contiguous().numpy().tobytes())
    return state.hexdigest()[:32]


class FrameSequence:
    """PNG files of one rendering in one folder, which a broken rendering goes on with. `frames.json` in the folder says
    what the frames show, as one `digest`: frames of the same digest are kept, others are refused. Use it as a context:
    leaving it waits for the last file."""

    def __init__(self, folder: Path, key: str, *, overwrite: bool = False) -> None:
        self.folder, self._key, self._note = folder, key, folder / "frames.json"
        if not overwrite and folder.is_dir() and self._old_frames() and self._saved_key() != key:
            hint = "choose another folder, or replace them by --overwrite"
            raise InputError(str(folder), "an empty folder, or one with frames of this rendering", "others", hint)
        self._writers = WriterPool(WRITERS, ahead=4 * WRITERS, drop=False)

    def _old_frames(self) -> list[Path]:
        return [path for path in self.folder.iterdir() if _NAME.fullmatch(path.name)]

    def _saved_key(self) -> str | None:
        try:
            return json.loads(self._note.read_text(encoding="utf-8"))["digest"]
        except (OSError, ValueError, KeyError, TypeError, RecursionError):
            return None

    def __enter__(self) -> "FrameSequence":
        self.folder.mkdir(parents=True, exist_ok=True)
        if self._saved_key() != self._key:
            for path in self._old_frames():
                path.unlink()
            write_json(self._note, {"version": VERSION, "digest": self._key})
        return self

    def __exit__(self, kind: type[BaseException] | None, *_: object) -> None:
        self._writers.__exit__(kind)

    def path(self, channel: Channel, index: int) -> Path:
        """frame_0007.png, depth_0007.png and so on."""
        return self.folder / f"{'frame' if channel == 'color' else channel}_{index:04d}.png"

    def has(self, channels: tuple[Channel, ...], index: int) -> bool:
        """Whether all files of a frame are there."""
        return all(self.path(channel, index).is_file() for channel in channels)

    def load(self, channel: Channel, index: int) -> Tensor:
        return torch.from_numpy(np.array(open_upright(self.path(channel, index)).convert("RGB")))

    def save(self, channel: Channel, index: int, frame: Tensor) -> None:
        """Queue a file; waits where the disk is far behind."""
        path = self.path(channel, index)
        self._writers.submit(lambda: save_image(path, frame))
