"""A camera path made on the page: views are added one by one, and saved for `nerfturbo render --path`."""

from __future__ import annotations

import re
import shlex
from collections.abc import Callable
from typing import TYPE_CHECKING, Any

import numpy as np
import torch
from torch import Tensor

from ..data.cameras import Cameras
from ..evaluation.camera_path import CameraPath, interpolate_poses, write_camera_path
from ..types import Aabb

if TYPE_CHECKING:
    import viser

    from .panel import SceneFacts

MAX_KEYS = 200
NAME = re.compile(r"[A-Za-z0-9_-]{1,64}")


class PathEditor:
    """Key views, the curve through them, and the file."""

    def __init__(self, server: viser.ViserServer, facts: SceneFacts, crop: Callable[[], Aabb | None]) -> None:
        self._server, self._facts, self._crop = server, facts, crop
        self._keys: list[tuple[Tensor, float]] = []  # pose, vertical angle
        gui = server.gui
        with gui.add_folder("Camera path", expand_by_default=False):
            add = gui.add_button("Add this view")
            drop = gui.add_button("Remove the last")
            self._frames = gui.add_number("Frames", 120, min=2, max=10_000, step=1)
            self._name = gui.add_text("Name", "path")
            save = gui.add_button("Save the path")
            self._said = gui.add_markdown("no views yet")
        add.on_click(lambda event: self._add(event.client))
        drop.on_click(lambda _: self._drop())
        save.on_click(lambda _: self._save())

    def _add(self, client: Any) -> None:
        from .page import pose_of

        if client is None or len(self._keys) >= MAX_KEYS:
            return
        pose = pose_of(np.asarray(client.camera.wxyz, dtype=float), np.asarray(client.camera.position, dtype=float))
        if pose is not None:
            self._keys.append((pose, float(client.camera.fov)))
            self._draw()

    def _drop(self) -> None:
        self._keys = self._keys[:-1]
        self._draw()

    def _poses(self, n_frames: int) -> Tensor:
        keys = torch.stack([pose for pose, _ in self._keys])
        scale = float((keys[:, :, 3] - keys[:, :, 3].mean(0)).norm(dim=-1).mean()) or 1.0
        return interpolate_poses(keys, n_frames, scale)

    def _draw(self) -> None:
        count = len(self._keys)
        self._said.content = f"{count} views" if count > 1 else f"{count} of the two views a path needs"
        line = self._poses(8 * count)[:, :, 3].numpy() if count > 1 else np.zeros((2, 3))
        segments = np.stack([line[:-1], line[1:]], axis=1)
        self._server.scene.add_line_segments("/path", segments, (210, 60, 120), thickness=0.01, visible=count > 1)

    def _save(self) -> None:
        """Write the file; a name with anything but letters, digits, - and _ in it is refused."""
        name = str(self._name.value)
        if not NAME.fullmatch(name):
            self._said.content = "a name has letters, digits, - and _ only"
            return
        if len(self._keys) < 2:
            self._said.content = "a path needs two views"
            return
        poses = self._poses(max(2, min(10_000, int(self._frames.value))))
        file = self._facts.paths / f"{name}.json"
        try:
            file.parent.mkdir(parents=True, exist_ok=True)
            path = CameraPath(self._cameras(poses), 24.0, self._crop())
            keys = torch.stack([pose for pose, _ in self._keys])
            write_camera_path(file, path, self._facts.train.to_original, keyframes=self._cameras(keys))
        except OSError as error:
            self._said.content = f"could not be saved: {error.strerror}"
            return
        self._said.content = f"saved; render it with `nerfturbo render RUN --path {shlex.quote(str(file))}`"

    def _cameras(self, poses: Tensor) -> Cameras:
        """Cameras of the size of the scene's pictures, with the mean angle of the key views."""
        width, height = (int(side) for side in self._facts.train.cameras.size[0])
        angle = sum(angle for _, angle in self._keys) / len(self._keys)
        wide = 2.0 * float(torch.atan(torch.tan(torch.tensor(0.5 * angle)) * width / height))
        return Cameras.pinhole(poses, width=width, height=height, field_of_view_x=wide)
