"""The viewer's controls and what stands in its scene. The `Panel` is everyone's: training, curves, crop, camera path. A
`ClientPanel` is one person's: what the picture shows, cameras, occupied cells."""

import threading
import time
from collections.abc import Callable
from contextlib import AbstractContextManager
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
import torch
from torch import Tensor

from ..data.cameras import Cameras
from ..data.images import to_bytes
from ..data.scene import Scene
from ..evaluation.camera_path import interpolate_poses, quaternions
from ..evaluation.evaluate import WHITE, choose_views, truth_image
from ..evaluation.run_folder import RunFolder
from ..rendering.model import NerfModel
from ..sampling.grid import level_box, level_occupancy
from ..types import Aabb
from .painter import SHOWN, View, pose_of

if TYPE_CHECKING:
    import viser

MAX_FRUSTA = 60
THUMBNAIL = 96
MAX_CELLS = 20_000
MAX_POINTS = 300  # of a curve
FLIGHT = 12  # steps of the way to a camera that was clicked
FLIGHT_SECONDS = 0.5
COLORS = {"train": (70, 120, 220), "test": (235, 140, 40)}
ORDER = {name: place for place, name in enumerate(("Training", "Picture", "Curves", "Scene", "Crop", "Path"), 1)}
VideoWriter = Callable[[Path, float], AbstractContextManager[Callable[[Tensor], None]]]  # of a file and frames a second


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
    run: RunFolder  # takes camera paths, videos and the crop
    trains: bool  # whether there is training to pause and to save
    video: VideoWriter | None = None
    suffix: str = ".gif"  # of videos


@dataclass(frozen=True)
class _Photo:
    """A camera with a small image of what it took."""

    name: str
    pose: Tensor
    angle: float
    image: np.ndarray


class Panel:
    """Everyone's controls."""

    def __init__(self, server: "viser.ViserServer", facts: SceneFacts, repaint: Callable[[], None]) -> None:
        self._gui, self._scene = server.gui, server.scene
        self.facts, self.wishes, self._repaint = facts, Wishes(), repaint
        self._photos: dict[str, list[_Photo]] = {}
        self._gui.configure_theme(control_width="medium", show_logo=False, show_share_button=False)
        self._scene.set_up_direction("+z")
        cameras, start = facts.test.cameras, server.initial_camera
        start.position = cameras.positions[0].double().cpu().numpy()
        start.look_at, start.up = np.array(facts.box.center), (0.0, 0.0, 1.0)
        start.fov = _field_of_view(cameras, 0)
        self._status = self._gui.add_markdown(f"**{facts.name}**", order=0)
        if facts.trains:
            self._add_training()
        self._curves = self._add_curves()
        self._add_crop()

    def crop(self) -> Aabb | None:
        """The box of the crop sliders, where cropping is on."""
        if not self._crop_on.value:
            return None
        (x0, x1), (y0, y1), (z0, z1) = (sorted(map(float, slider.value)) for slider in self._crop_sliders)
        return Aabb((x0, y0, z0), (x1, y1, z1)) if x0 < x1 and y0 < y1 and z0 < z1 else None

    @property
    def share(self) -> float:
        """Of the time, for this page, while a camera moves."""
        return float(self._share.value) / 100.0 if self.facts.trains else 1.0

    def say(self, text: str) -> None:
        """About training, below its buttons."""
        self._said.content = text

    def renew(self, step: int, records: list[dict[str, Any]]) -> None:
        """Numbers and curves as they are now."""
        steps = [record for record in records if record.get("kind") == "step"]
        if not steps:
            self._status.content = f"**{self.facts.name}** step {step}"
            return
        last = steps[-1]
        rate, share = last["rays_per_second"] / 1e3, 100.0 * last["occupied_fraction"]
        state = " (paused)" if self.wishes.paused else ""
        self._status.content = (
            f"**{self.facts.name}** step {last['step']}{state}, {last['seconds']:.0f} s  \n"
            f"PSNR {last['psnr']:.2f} dB, {rate:.0f} k rays/s, {share:.1f}% occupied"
        )
        kept = steps[:: max(1, len(steps) // MAX_POINTS)]
        for name, plot in self._curves.items():
            plot.data = tuple(np.array([record[key] for record in kept], dtype=float) for key in ("step", name))

    def photos(self, split: str) -> list[_Photo]:
        """Some cameras of a split with their images, made small once."""
        scene = self.facts.train if split == "train" else self.facts.test
        if split not in self._photos:
            made = []
            for index in choose_views(len(scene), MAX_FRUSTA):
                image = truth_image(scene, index, WHITE)
                stride = max(1, max(image.shape[:2]) // THUMBNAIL)
                small = to_bytes(image[::stride, ::stride]).cpu().numpy()
                pose, angle = scene.cameras.camera_to_world[index].cpu(), _field_of_view(scene.cameras, index)
                made.append(_Photo(f"/cameras/{split}/{index}", pose, angle, small))
            self._photos[split] = made
        return self._photos[split]

    def _add_training(self) -> None:
        with self._gui.add_folder("Training", order=ORDER["Training"]):
            pause = self._gui.add_button("Pause training")
            save = self._gui.add_button("Save a checkpoint")
            hint = "Share of the time that pictures may take while you move; less than half of it while you rest."
            self._share = self._gui.add_slider("Time for this page, %", 2, 60, 1, 20, hint=hint)
            self._said = self._gui.add_markdown("")

        @pause.on_click
        def _(_: Any) -> None:
            self.wishes.paused = not self.wishes.paused
            pause.label = "Resume training" if self.wishes.paused else "Pause training"

        save.on_click(lambda _: self.wishes.save.set())

    def _add_curves(self) -> dict[str, Any]:
        from viser import uplot

        curves, empty, scales = {}, np.array([0.0]), {"x": uplot.Scale(time=False)}
        with self._gui.add_folder("Curves", order=ORDER["Curves"], expand_by_default=False):
            for name, label, color in (("psnr", "PSNR, dB", "#3b6fd4"), ("loss", "loss", "#d4703b")):
                series = (uplot.Series(label="step"), uplot.Series(label=label, stroke=color, width=2))
                curves[name] = self._gui.add_uplot((empty, empty), series, title=label, scales=scales, aspect=1.6)
        return curves

    def _add_crop(self) -> None:
        box, saved = self.facts.box, self.facts.run.read_crop()
        shown = box if saved is None else box.intersection(saved) or box
        with self._gui.add_folder("Crop", order=ORDER["Crop"], expand_by_default=False):
            self._crop_on = self._gui.add_checkbox("Crop", saved is not None)
            self._crop_sliders = [
                self._gui.add_multi_slider(axis, low, high, (high - low) / 200.0, (first, last))
                for axis, low, high, first, last in zip("xyz", box.low, box.high, shown.low, shown.high, strict=True)
            ]
            keep = self._gui.add_button("Use for exports")
            self._crop_said = self._gui.add_markdown("" if saved is None else "Exports take the saved box.")
        keep.on_click(lambda _: self._keep_crop())
        for control in (self._crop_on, *self._crop_sliders):
            control.on_update(lambda _: self._crop_changed())
        self._crop_changed()

    def _crop_changed(self) -> None:
        shown = self.crop() or self.facts.box
        box = self._scene.add_box("/crop", (200, 60, 60), shown.size, wireframe=True, position=shown.center)
        box.visible = self.crop() is not None
        self._repaint()

    def _keep_crop(self) -> None:
        crop = self.crop()
        try:
            self.facts.run.write_crop(crop)
            taken = "the whole scene" if crop is None else "this box"
            self._crop_said.content = f"`nerfturbo export mesh`, `points` and `web` take {taken}."
        except OSError as error:
            self._crop_said.content = f"could not be saved: {error.strerror}"


class ClientPanel:
    """One person's controls."""

    def __init__(self, client: "viser.ClientHandle", panel: Panel, repaint: Callable[[], None]) -> None:
        self._client, self._panel = client, panel
        self._frusta: dict[str, list[Any]] = {}
        self._inside: tuple[Any, Tensor] | None = None  # the frustum of the photo flown to, and where it was taken
        self._size = 0.06 * _mean_distance(panel.facts)
        gui, moves = client.gui, panel.facts.train.cameras.times is not None
        with gui.add_folder("Picture", order=ORDER["Picture"]):
            self.channel = gui.add_dropdown("Show", SHOWN, initial_value="color")
            self.quality = gui.add_slider("Finest picture, pixels", 128, 1920, 64, 640)
            self.time = gui.add_slider("Time", 0.0, 1.0, 0.01, 0.0) if moves else None
            self._note = gui.add_markdown("", visible=False)
        with gui.add_folder("In the scene", order=ORDER["Scene"], expand_by_default=False):
            toggles = {split: gui.add_checkbox(f"Cameras of {split}", False) for split in COLORS}
            self.cells_on = gui.add_checkbox("Occupied cells", False)
        for split, toggle in toggles.items():
            toggle.on_update(lambda _, split=split, toggle=toggle: self.show_cameras(split, bool(toggle.value)))
        self.cells_on.on_update(lambda _: None if self.cells_on.value else client.scene.remove_by_name("/cells"))
        for control in filter(None, (self.channel, self.quality, self.time)):
            control.on_update(lambda _: repaint())

    def dress(self, view: View) -> View:
        """A view with this person's channel and time, and everyone's crop."""
        moment = None if self.time is None else float(self.time.value)
        return replace(view, channel=self.channel.value, crop=self._panel.crop(), time=moment)

    def say(self, note: str) -> None:
        """About the picture, below its controls."""
        if self._note.content != note:
            self._note.content, self._note.visible = note, bool(note)

    def show_cameras(self, split: str, shown: bool) -> None:
        """Frusta with their photos; a click flies there."""
        for frustum in self._frusta.pop(split, []):
            frustum.remove()
        for photo in self._panel.photos(split) if shown else ():
            frustum = self._client.scene.add_camera_frustum(
                photo.name,
                fov=photo.angle,
                aspect=photo.image.shape[1] / photo.image.shape[0],
                scale=self._size,
                thickness=0.03 * self._size,
                color=COLORS[split],
                image=photo.image,
                wxyz=_turn(photo.pose),
                position=photo.pose[:, 3].numpy(),
            )
            frustum.on_click(lambda _, photo=photo, frustum=frustum: self._fly(photo, frustum))
            self._frusta.setdefault(split, []).append(frustum)

    def _fly(self, photo: _Photo, frustum: Any) -> None:
        """Move the camera, in some steps, to where a photo was taken."""
        camera = self._client.camera
        here, distance = pose_of(camera.wxyz, camera.position), float(np.linalg.norm(camera.look_at - camera.position))
        for pose in () if here is None else interpolate_poses(torch.stack([here, photo.pose]), FLIGHT, distance or 1.0):
            with self._client.atomic():
                camera.position = pose[:, 3].numpy()
                camera.look_at = (pose[:, 3] - distance * pose[:, 2]).numpy()
            time.sleep(FLIGHT_SECONDS / FLIGHT)
        level = abs(float(photo.pose[2, 0])) < 0.02
        camera.up_direction = (0.0, 0.0, 1.0) if level else photo.pose[:, 1].numpy()  # a camera held upright or not
        camera.fov = photo.angle
        self._inside, frustum.visible = (frustum, photo.pose[:, 3]), False  # its image would cover the picture

    def moved(self, place: Tensor) -> None:
        """Show again the frustum of the photo flown to, once the camera has left it."""
        if self._inside is not None and float((self._inside[1] - place).norm()) > self._size:
            frustum, self._inside = self._inside[0], None
            if any(frustum is other for shown in self._frusta.values() for other in shown):
                frustum.visible = True

    def show_cells(self, points: np.ndarray, size: float) -> None:
        """The middles of occupied cells."""
        self._client.scene.add_point_cloud("/cells", points=points, colors=(40, 170, 120), point_size=size)


def occupied_cells(model: NerfModel) -> tuple[np.ndarray, float]:
    """The middles of occupied cells, or of some of them where they are many, and how large to draw them."""
    grid, centers = model.grid, []
    for level, occupied in enumerate(level_occupancy(grid)):
        low, high = level_box(grid, level).tensor("cpu")
        cells = occupied.cpu().nonzero()
        centers.append(low + (cells + 0.5) / grid.config.resolution * (high - low))
    points = torch.cat(centers)
    points = points[:: -(-points.shape[0] // MAX_CELLS) or 1]
    return points.numpy(), 0.15 * max(grid.aabb.size) / grid.config.resolution


def _mean_distance(facts: SceneFacts) -> float:
    """Of the training cameras from the middle of the scene."""
    return float((facts.train.cameras.positions.cpu() - torch.tensor(facts.box.center)).norm(dim=-1).mean())


def _turn(pose: Tensor) -> np.ndarray:
    """A pose's rotation as viser has it: a quaternion, with OpenCV's axes."""
    return quaternions(pose[None, :, :3] @ torch.diag(torch.tensor([1.0, -1.0, -1.0])))[0].numpy()


def _field_of_view(cameras: Cameras, index: int) -> float:
    """The vertical angle in radians."""
    return float(2.0 * torch.atan(0.5 * cameras.size[index, 1] / cameras.focal[index, 1]))
