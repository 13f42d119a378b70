"""The camera path of the viewer: key views added one by one, the curve through them, its file and its video."""

import re
import shlex
from collections.abc import Callable, Generator
from contextlib import suppress
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
import torch
from torch import Tensor

from ..data.cameras import Cameras
from ..errors import InputError
from ..evaluation.camera_path import CameraPath, interpolate_poses, write_camera_path
from ..rendering.model import NerfModel
from .painter import Painter, View, pinhole, pose_of
from .panel import ORDER, SceneFacts

if TYPE_CHECKING:
    import viser

FPS = 24.0
MAX_KEYS = 200
HEIGHT = 720  # pixels of frames, where images have no fewer
NAME = re.compile(r"[A-Za-z0-9_-]{1,64}")  # of a saved path
Dress = Callable[[Any, View], View]  # a view as the client sees it: its channel and time, and the crop


class PathEditor:
    """Notes of the page's threads; `advance` renders."""

    def __init__(self, server: "viser.ViserServer", facts: SceneFacts, dress: Dress) -> None:
        self._server, self._facts, self._dress = server, facts, dress
        self._keys: list[Tensor] = []  # poses
        self._angles: list[float] = []
        self._film: Generator[None, tuple[NerfModel, int]] | None = None
        self._stop = False
        gui, height = server.gui, int(facts.train.cameras.size[0, 1])
        with gui.add_folder("Camera path", order=ORDER["Path"], expand_by_default=False):
            add = gui.add_button("Add this view")
            drop = gui.add_button("Remove the last")
            self._frames = gui.add_number("Frames", 120, min=2, max=10_000, step=1)
            self._height = gui.add_number("Height, pixels", min(height, HEIGHT), min=16, max=4096, step=1)
            self._name = gui.add_text("Name", "path")
            save = gui.add_button("Save the path")
            self._render = gui.add_button("Render the video", visible=facts.video is not None)
            self._progress = gui.add_progress_bar(0.0, visible=False)
            self._said = gui.add_markdown("no views yet")
        add.on_click(lambda event: None if event.client is None else self._add(event.client.camera))
        drop.on_click(lambda _: self._drop())
        save.on_click(lambda event: self._save(event.client))
        self._render.on_click(lambda event: self._begin(event.client))

    def _add(self, camera: Any) -> None:
        pose = pose_of(camera.wxyz, camera.position)
        if pose is not None and len(self._keys) < MAX_KEYS:
            self._keys, self._angles = [*self._keys, pose], [*self._angles, float(camera.fov)]
            self._draw()

    def _drop(self) -> None:
        self._keys, self._angles = self._keys[:-1], self._angles[:-1]
        self._draw()

    def _poses(self, n_frames: int) -> Tensor:
        keys = torch.stack(self._keys)
        scale = float((keys[:, :, 3] - keys[:, :, 3].mean(0)).norm(dim=-1).mean()) or 1.0
        return interpolate_poses(keys, n_frames, scale)

    def _draw(self) -> None:
        count = len(self._keys)
        self._said.content = f"{count} views" if count > 1 else f"{count} of the two views a path needs"
        line = self._poses(8 * count)[:, :, 3].numpy() if count > 1 else np.zeros((2, 3))
        segments = np.stack([line[:-1], line[1:]], axis=1)
        self._server.scene.add_line_segments("/path", segments, (210, 60, 120), thickness=0.01, visible=count > 1)

    def _save(self, client: Any) -> None:
        """Write the path's file, with the crop, and say how it went."""
        if (file := self._file()) is None:
            return
        crop, keys = self._view(client).crop, self._cameras(torch.stack(self._keys))
        path, to_original = CameraPath(self._cameras(), FPS, crop), self._facts.train.to_original
        try:
            file.parent.mkdir(parents=True, exist_ok=True)
            write_camera_path(file, path, to_original, keyframes=keys)
            run, given = (shlex.quote(str(one)) for one in (self._facts.run.path, file))
            self._said.content = f"saved; render it with `nerfturbo render {run} --path {given}`"
        except OSError as error:
            self._said.content = f"could not be saved: {error.strerror}"

    def _file(self) -> Path | None:
        """Where the path goes; None, and says why, where there is none to write or no name for it."""
        name = str(self._name.value)
        if not NAME.fullmatch(name):
            self._said.content = "a name has letters, digits, - and _ only"
        elif len(self._keys) < 2:
            self._said.content = "a path needs two views"
        else:
            return self._facts.run.path / "camera_paths" / f"{name}.json"
        return None

    def _cameras(self, poses: Tensor | None = None) -> Cameras:
        """Of the frames unless poses are given, with the shape of the scene's images and the mean angle of the keys."""
        poses = self._poses(max(2, min(10_000, int(self._frames.value)))) if poses is None else poses
        width, height = (int(side) for side in self._facts.train.cameras.size[0])
        shown = max(16, min(4096, int(self._height.value)))
        return pinhole(poses, max(16, round(width * shown / height)), shown, sum(self._angles) / len(self._angles))

    def _view(self, client: Any) -> View:
        """The last key as the client sees it."""
        width, height = (int(side) for side in self._cameras().size[0])
        return self._dress(client, View(self._keys[-1], sum(self._angles) / len(self._angles), width / height))

    def _begin(self, client: Any) -> None:
        """Begin the video, or end the one that is being rendered."""
        if self._film is not None:
            self._stop = True
        elif (file := self._file()) is not None:
            film, self._stop = self._shoot(file.with_suffix(self._facts.suffix), client), False
            try:
                file.parent.mkdir(parents=True, exist_ok=True)
                next(film)
            except (InputError, OSError) as error:
                self._said.content = f"no video: {error}"
                return
            self._film, self._render.label, self._progress.visible = film, "Stop the video", True

    def _shoot(self, file: Path, client: Any) -> Generator[None, tuple[NerfModel, int]]:
        """A frame for each model and step that is sent; the video, whole, at the end."""
        cameras, view, facts = self._cameras(), self._view(client), self._facts
        assert facts.video is not None  # else the button is hidden
        width, height = (int(side) for side in cameras.size[0])
        painter, count = Painter(photos=(facts.train, facts.test)), len(cameras)
        with facts.video(file, FPS) as add:
            for place, pose in enumerate(cameras.camera_to_world):
                model, step = yield
                add(painter.render(model, replace(view, camera_to_world=pose), (width, height), step))
                self._progress.value = 100.0 * (place + 1) / count
                self._said.content = f"frame {place + 1} of {count}"
        self._said.content = f"wrote `{file}`"
        if client is not None:
            with suppress(Exception):  # who asked may have gone
                client.send_file_download(file.name, file.read_bytes())

    def advance(self, model: NerfModel, step: int) -> bool:
        """Render the next frame of the video, where one is asked for; returns whether there was one."""
        film = self._film
        if film is None:
            return False
        try:
            if not self._stop:
                film.send((model, step))
                return True
            self._said.content = "stopped; no video was written"
        except StopIteration:
            pass
        except (InputError, OSError) as error:
            self._said.content = f"the video could not be written: {error}"
        self.close()
        return True

    def close(self) -> None:
        """Drop a video that is not whole."""
        if self._film is not None:
            self._film.close()
            self._film, self._render.label, self._progress.visible = None, "Render the video", False
