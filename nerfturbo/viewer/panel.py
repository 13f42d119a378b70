"""The viewer's controls and what stands in its scene: channels, crop, cameras, occupied cells, curves, camera paths."""

import re
import shlex
import threading
from collections.abc import Callable
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
import torch
from torch import Tensor

from ..data.cameras import Cameras
from ..data.images import to_bytes
from ..data.scene import Scene
from ..evaluation.camera_path import CameraPath, interpolate_poses, quaternions, write_camera_path
from ..evaluation.evaluate import WHITE, choose_views, truth_image
from ..evaluation.images import CHANNELS
from ..rendering.model import NerfModel
from ..sampling.grid import level_box, level_occupancy
from ..types import Aabb
from .painter import View, pinhole, pose_of

if TYPE_CHECKING:
    import viser

MAX_FRUSTA = 60
THUMBNAIL = 96
MAX_CELLS = 20_000
MAX_KEYS = 200
NAME = re.compile(r"[A-Za-z0-9_-]{1,64}")  # of a saved path
COLORS = {"train": (70, 120, 220), "test": (235, 140, 40)}


@dataclass
class Wishes:
    """What the buttons ask of training."""

    paused: bool = False
    save: threading.Event = field(default_factory=threading.Event)


@dataclass(frozen=True)
class SceneFacts:
    """What the page shows besides the model's pictures."""

    name: str
    train: Scene
    test: Scene
    box: Aabb
    paths: Path  # folder for camera paths
    trains: bool  # whether there is training to pause and to save


class Panel:
    """Everything on the page but the picture."""

    def __init__(self, server: "viser.ViserServer", facts: SceneFacts, repaint: Callable[[], None]) -> None:
        self._gui, self._scene = server.gui, server.scene
        self._facts, self.wishes, self._repaint = facts, Wishes(), repaint
        self._gui.configure_theme(control_width="medium", show_logo=False, show_share_button=False)
        self._scene.set_up_direction("+z")
        cameras, start = facts.test.cameras, server.initial_camera
        start.position = cameras.positions[0].double().cpu().numpy()
        start.look_at, start.up = np.array(facts.box.center), (0.0, 0.0, 1.0)
        start.fov = _field_of_view(cameras, 0)
        self._status = self._gui.add_markdown(f"**{facts.name}**")
        if facts.trains:
            self._add_training()
        self._add_view()
        self._add_crop()
        self._add_things()
        self._editor = PathEditor(server, facts, self.crop)
        self._curves = self._add_curves() if facts.trains else {}

    def dress(self, view: View) -> View:
        """A view with the controls' channel, crop and time."""
        moment = None if self._time is None else float(self._time.value)
        return replace(view, channel=self._channel.value, crop=self.crop(), time=moment)

    def crop(self) -> Aabb | None:
        """The box of the crop sliders, where cropping is on."""
        if not self._crop_on.value:
            return None
        (x0, x1), (y0, y1), (z0, z1) = (sorted(map(float, slider.value)) for slider in self._crop_sliders)
        return Aabb((x0, y0, z0), (x1, y1, z1)) if x0 < x1 and y0 < y1 and z0 < z1 else None

    @property
    def largest(self) -> int:
        """Pixels of the longer side of the finest picture."""
        return int(self._quality.value)

    @property
    def share(self) -> float:
        """Of the time, for this page, while a camera moves."""
        return float(self._share.value) / 100.0 if self._facts.trains else 1.0

    def renew(self, model: NerfModel, step: int, records: list[dict[str, Any]]) -> None:
        """Numbers, curves and occupied cells as they are now."""
        steps = [record for record in records if record.get("kind") == "step"]
        if steps:
            last = steps[-1]
            rate, share = last["rays_per_second"] / 1e3, 100.0 * last["occupied_fraction"]
            state = " (paused)" if self.wishes.paused else ""
            self._status.content = (
                f"**{self._facts.name}** step {last['step']}{state}, {last['seconds']:.0f} s  \n"
                f"PSNR {last['psnr']:.2f} dB, {rate:.0f} k rays/s, {share:.1f}% occupied"
            )
            kept = steps[:: max(1, len(steps) // 300)]
            for name, plot in self._curves.items():
                plot.data = tuple(np.array([record[key] for record in kept], dtype=float) for key in ("step", name))
        else:
            self._status.content = f"**{self._facts.name}** step {step}"
        if self._cells_on.value:
            self._show_cells(model)

    def _add_training(self) -> None:
        with self._gui.add_folder("Training"):
            pause = self._gui.add_button("Pause training")
            save = self._gui.add_button("Save a checkpoint")
            hint = "Share of the time that pictures may take while you move; less than half of it while you rest."
            self._share = self._gui.add_slider("Time for this page, %", 2, 60, 1, 20, hint=hint)

        @pause.on_click
        def _(_: Any) -> None:
            self.wishes.paused = not self.wishes.paused
            pause.label = "Go on training" if self.wishes.paused else "Pause training"

        save.on_click(lambda _: self.wishes.save.set())

    def _add_view(self) -> None:
        with self._gui.add_folder("Picture"):
            self._channel = self._gui.add_dropdown("Show", CHANNELS, initial_value="color")
            self._quality = self._gui.add_slider("Finest picture, pixels", 128, 1920, 64, 640)
            moving = self._facts.train.cameras.times is not None
            self._time = self._gui.add_slider("Time", 0.0, 1.0, 0.01, 0.0) if moving else None
        for control in filter(None, (self._channel, self._quality, self._time)):
            control.on_update(lambda _: self._repaint())

    def _add_crop(self) -> None:
        box = self._facts.box
        with self._gui.add_folder("Crop", expand_by_default=False):
            self._crop_on = self._gui.add_checkbox("Crop", False)
            self._crop_sliders = [
                self._gui.add_multi_slider(axis, low, high, (high - low) / 200.0, (low, high))
                for axis, low, high in zip("xyz", box.low, box.high, strict=True)
            ]
        for control in (self._crop_on, *self._crop_sliders):
            control.on_update(lambda _: self._crop_changed())

    def _crop_changed(self) -> None:
        shown = self.crop() or self._facts.box
        box = self._scene.add_box("/crop", (200, 60, 60), shown.size, wireframe=True, position=shown.center)
        box.visible = self.crop() is not None
        self._repaint()

    def _add_things(self) -> None:
        with self._gui.add_folder("In the scene", expand_by_default=False):
            toggles = {split: self._gui.add_checkbox(f"Cameras of {split}", False) for split in COLORS}
            self._cells_on = self._gui.add_checkbox("Occupied cells", False)
        for scene, (split, toggle) in zip((self._facts.train, self._facts.test), toggles.items(), strict=True):
            frusta = self._add_frusta(split, scene)
            toggle.on_update(lambda _, frusta=frusta, toggle=toggle: _show(frusta, bool(toggle.value)))
        self._cells_on.on_update(lambda _: None if self._cells_on.value else self._scene.remove_by_name("/cells"))

    def _add_frusta(self, split: str, scene: Scene) -> list[Any]:
        cameras, made = scene.cameras, []
        distance = float((cameras.positions - torch.tensor(self._facts.box.center)).norm(dim=-1).mean())
        flip = torch.diag(torch.tensor([1.0, -1.0, -1.0]))
        turns = quaternions(cameras.camera_to_world[:, :, :3].cpu() @ flip).numpy()
        for index in choose_views(len(scene), MAX_FRUSTA):
            image = truth_image(scene, index, WHITE)
            stride = max(1, max(image.shape[:2]) // THUMBNAIL)
            frustum = self._scene.add_camera_frustum(
                f"/cameras/{split}/{index}",
                fov=_field_of_view(cameras, index),
                aspect=image.shape[1] / image.shape[0],
                scale=0.06 * distance,
                color=COLORS[split],
                image=to_bytes(image[::stride, ::stride]).cpu().numpy(),
                wxyz=turns[index],
                position=cameras.positions[index].cpu().numpy(),
                visible=False,
            )
            frustum.on_click(lambda event, index=index: _fly(event.client, turns[index], cameras.positions[index]))
            made.append(frustum)
        return made

    def _show_cells(self, model: NerfModel) -> None:
        grid, centers = model.grid, []
        for level, occupied in enumerate(level_occupancy(grid)):
            low, high = level_box(grid, level).tensor("cpu")
            cells = occupied.cpu().nonzero()
            centers.append(low + (cells + 0.5) / grid.config.resolution * (high - low))
        points = torch.cat(centers)
        points = points[:: -(-points.shape[0] // MAX_CELLS) or 1]
        size = 0.15 * max(grid.aabb.size) / grid.config.resolution
        self._scene.add_point_cloud("/cells", points=points.numpy(), colors=(40, 170, 120), point_size=size)

    def _add_curves(self) -> dict[str, Any]:
        from viser import uplot

        curves, empty, scales = {}, np.array([0.0]), {"x": uplot.Scale(time=False)}
        with self._gui.add_folder("Curves", expand_by_default=False):
            for name, label, color in (("psnr", "PSNR, dB", "#3b6fd4"), ("loss", "loss", "#d4703b")):
                series = (uplot.Series(label="step"), uplot.Series(label=label, stroke=color, width=2))
                curves[name] = self._gui.add_uplot((empty, empty), series, title=label, scales=scales, aspect=1.6)
        return curves


def _field_of_view(cameras: Cameras, index: int) -> float:
    """The vertical angle in radians."""
    return float(2.0 * torch.atan(0.5 * cameras.size[index, 1] / cameras.focal[index, 1]))


def _show(handles: list[Any], visible: bool) -> None:
    for handle in handles:
        handle.visible = visible


def _fly(client: Any, turn: np.ndarray, position: Tensor) -> None:
    """Put a client's camera where an image was taken."""
    with client.atomic():
        client.camera.wxyz = turn
        client.camera.position = position.cpu().numpy()


class PathEditor:
    """A camera path: key views added one by one, the curve through them, and the file for `nerfturbo render --path`."""

    def __init__(self, server: "viser.ViserServer", facts: SceneFacts, crop: Callable[[], Aabb | None]) -> None:
        self._server, self._facts, self._crop = server, facts, crop
        self._keys: list[Tensor] = []  # poses
        self._angles: list[float] = []
        gui = server.gui
        with gui.add_folder("Camera path", expand_by_default=False):
            add = gui.add_button("Add this view")
            drop = gui.add_button("Remove the last")
            self._frames = gui.add_number("Frames", 120, min=2, max=10_000, step=1)
            self._name = gui.add_text("Name", "path")
            save = gui.add_button("Save the path")
            self._said = gui.add_markdown("no views yet")
        add.on_click(lambda event: None if event.client is None else self._add(event.client.camera))
        drop.on_click(lambda _: self._drop())
        save.on_click(lambda _: self._save())

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

    def _save(self) -> None:
        """Write the file and say how it went."""
        name = str(self._name.value)
        if not NAME.fullmatch(name):
            self._said.content = "a name has letters, digits, - and _ only"
        elif len(self._keys) < 2:
            self._said.content = "a path needs two views"
        else:
            file = self._facts.paths / f"{name}.json"
            try:
                self._write(file)
                self._said.content = f"saved; render it with `nerfturbo render RUN --path {shlex.quote(str(file))}`"
            except OSError as error:
                self._said.content = f"could not be saved: {error.strerror}"

    def _write(self, file: Path) -> None:
        file.parent.mkdir(parents=True, exist_ok=True)
        poses = self._poses(max(2, min(10_000, int(self._frames.value))))
        path = CameraPath(self._cameras(poses), 24.0, self._crop())
        keys = self._cameras(torch.stack(self._keys))
        write_camera_path(file, path, self._facts.train.to_original, keyframes=keys)

    def _cameras(self, poses: Tensor) -> Cameras:
        """Of the size of the scene's images, with the mean angle of the key views."""
        width, height = (int(side) for side in self._facts.train.cameras.size[0])
        return pinhole(poses, width, height, sum(self._angles) / len(self._angles))
