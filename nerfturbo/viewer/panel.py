"""The viewer's controls and what stands in its scene. The `Panel` is everyone's: training, curves, crop; so is the
`PathEditor`. A `Client` is one person: a camera, a picture and what it shows, frusta, occupied cells."""

import math
import re
import shlex
import threading
import time
from collections.abc import Callable, Generator
from contextlib import AbstractContextManager, suppress
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
import torch
from torch import Tensor

from ..data.cameras import Cameras
from ..data.images import to_bytes
from ..data.scene import Scene
from ..errors import CheckpointError, InputError
from ..evaluation.camera_path import CameraPath, interpolate_poses, quaternions, spread_of, write_camera_path
from ..evaluation.evaluate import WHITE, choose_views, truth_image
from ..evaluation.run_folder import RunFolder
from ..rendering.model import NerfModel
from ..sampling.grid import level_occupancy
from ..types import Aabb
from .painter import SHOWN, Painter, View, pinhole, pose_of

if TYPE_CHECKING:
    import viser

MAX_FRUSTA = 60
THUMBNAIL = 96
MAX_CELLS = 20_000
MAX_POINTS = 300  # of a curve
LOGGED = {"step", "seconds", "psnr", "loss", "rays_per_second", "occupied_fraction"}  # of a line that is whole
FLIGHT, FLIGHT_SECONDS = 12, 0.5  # steps and time of the way to a camera that was clicked
FPS = 24.0
MAX_KEYS = 200
HEIGHT = (480, 720)  # pixels of frames, at least and at most: those of the images in between
NAME = re.compile(r"[A-Za-z0-9_-]{1,64}")  # of a saved path
COLORS = {"train": (70, 120, 220), "test": (235, 140, 40)}
ORDER = {name: place for place, name in enumerate(("Training", "Picture", "Curves", "Scene", "Crop", "Path"), 1)}


@dataclass(frozen=True)
class SceneFacts:
    """What the page shows besides the model's pictures."""

    name: str
    train: Scene
    test: Scene
    box: Aabb
    run: RunFolder  # takes camera paths, videos and the crop
    trains: bool  # whether there is training to pause and to save
    video: Callable[[Path, float], AbstractContextManager[Callable[[Tensor], None]]] | None = None  # of a file and fps
    suffix: str = ".gif"  # of videos


class Panel:
    """Everyone's controls."""

    def __init__(self, server: "viser.ViserServer", facts: SceneFacts) -> None:
        self._gui, self._scene, self.facts = server.gui, server.scene, facts
        self.clients: dict[int, Client] = {}
        self.paused, self.save = False, threading.Event()  # what the buttons ask of training
        self._gui.configure_theme(control_width="medium", show_logo=False, show_share_button=False)
        self._scene.set_up_direction("+z")
        cameras, start = facts.test.cameras, server.initial_camera
        start.position = cameras.positions[0].double().cpu().numpy()
        start.look_at, start.up = np.array(facts.box.center), (0.0, 0.0, 1.0)
        start.fov = field_of_view(cameras, 0)
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

    def renew(self, step: int, records: list[dict[str, Any]]) -> None:
        """Numbers and curves as they are now."""
        steps = [record for record in records if record.get("kind") == "step" and record.keys() >= LOGGED]
        if not steps:
            self._status.content = f"**{self.facts.name}** step {step}"
            return
        last = steps[-1]
        rate, share = last["rays_per_second"] / 1e3, 100.0 * last["occupied_fraction"]
        state = " (paused)" if self.paused else ""
        self._status.content = (
            f"**{self.facts.name}** step {step}{state}, {last['seconds']:.0f} s  \n"
            f"PSNR {last['psnr']:.2f} dB, {rate:.3g} k rays/s, {share:.1f}% occupied"
        )
        kept = steps[:: max(1, len(steps) // MAX_POINTS)]
        for name, plot in self._curves.items():
            plot.data = tuple(np.array([record[key] for record in kept], dtype=float) for key in ("step", name))

    def _add_training(self) -> None:
        with self._gui.add_folder("Training", order=ORDER["Training"]):
            pause = self._gui.add_button("Pause training")
            save = self._gui.add_button("Save a checkpoint")
            hint = "Share of the time that images may take while you move; less than half of it while you rest."
            self._share = self._gui.add_slider("Time for this page, %", 2, 60, 1, 20, hint=hint)
            self.said = self._gui.add_markdown("")

        @pause.on_click
        def _(_: Any) -> None:
            self.paused = not self.paused
            pause.label = "Resume training" if self.paused else "Pause training"

        save.on_click(lambda _: self.save.set())

    def _add_curves(self) -> dict[str, Any]:
        from viser import uplot

        curves, empty, scales = {}, np.array([0.0]), {"x": uplot.Scale(time=False)}
        with self._gui.add_folder("Curves", order=ORDER["Curves"], expand_by_default=False):
            for name, label, color in (("psnr", "PSNR, dB", "#3b6fd4"), ("loss", "loss", "#d4703b")):
                series = (uplot.Series(label="step"), uplot.Series(label=label, stroke=color, width=2))
                shape = {"title": label, "scales": scales, "aspect": 1.6, "padding": (12, 12, 0, 0)}  # ticks stay whole
                curves[name] = self._gui.add_uplot((empty, empty), series, **shape)
        return curves

    def _add_crop(self) -> None:
        box, saved = self.facts.box, None
        with suppress(CheckpointError):  # damaged: exports refuse it by name
            saved = self.facts.run.read_crop()
        shown = box if saved is None else box.intersection(saved) or box
        with self._gui.add_folder("Crop", order=ORDER["Crop"], expand_by_default=False):
            self._crop_on = self._gui.add_checkbox("Only this box", saved is not None)
            self._crop_sliders = [
                self._gui.add_multi_slider(axis, low, high, (high - low) / 200.0, (first, last))
                for axis, low, high, first, last in zip("xyz", box.low, box.high, shown.low, shown.high, strict=True)
            ]
            keep = self._gui.add_button("Use for exports")
            self._crop_said = self._gui.add_markdown("" if saved is None else "Exports take the saved box.")
        keep.on_click(lambda _: self._keep_crop())
        self._crop_on.on_update(lambda _: self._crop_changed())
        for slider in self._crop_sliders:
            slider.on_update(lambda _: self._crop_changed(moved=True))
        self._crop_changed()

    def _crop_changed(self, *, moved: bool = False) -> None:
        self._crop_on.value |= moved  # who moves a range wants to see it cut
        cut, shown = self.crop() is not None, self.crop() or self.facts.box
        self._scene.add_box("/crop", (200, 60, 60), shown.size, wireframe=True, position=shown.center, visible=cut)
        for client in list(self.clients.values()):
            client.look()

    def _keep_crop(self) -> None:
        crop = self.crop()
        try:
            self.facts.run.write_crop(crop)
            taken = "the whole scene" if crop is None else "this box"
            self._crop_said.content = f"`nerfturbo export mesh`, `points` and `web` take {taken}."
        except OSError as error:
            self._crop_said.content = f"could not be saved: {error.strerror}"


class Client:
    """One person: a camera, a picture and controls."""

    def __init__(self, handle: "viser.ClientHandle", panel: Panel) -> None:
        self.handle, self._panel = handle, panel
        self.painter = Painter(photos=(panel.facts.train, panel.facts.test), trains=panel.facts.trains)
        self.view: View | None = None
        self.moved, self.moving, self.lock = 0.0, False, threading.Lock()
        self.fresh = False  # a new view that the painter has not been told of
        self._frusta: dict[str, list[Any]] = {}
        self._frusta_lock = threading.Lock()
        self._inside: tuple[Any, Tensor] | None = None  # the frustum of the photo flown to, and where it was taken
        self._flights = 0
        gui, cameras = handle.gui, panel.facts.train.cameras
        distances = (cameras.positions.cpu() - torch.tensor(panel.facts.box.center)).norm(dim=-1)
        self._size = 0.06 * float(distances.mean())  # of a frustum
        with gui.add_folder("Picture", order=ORDER["Picture"]):
            self.channel = gui.add_dropdown("Show", SHOWN, initial_value="color")
            self.quality = gui.add_slider("Finest picture, pixels", 128, 1920, 64, 640)
            self.time = gui.add_slider("Time", 0.0, 1.0, 0.01, 0.0) if cameras.times is not None else None
            self.note = gui.add_markdown("")
        with gui.add_folder("In the scene", order=ORDER["Scene"], expand_by_default=False):
            self.toggles = {split: gui.add_checkbox(f"Cameras of {split}", False) for split in COLORS}
            self.cells_on = gui.add_checkbox("Occupied cells", False)
        for split, toggle in self.toggles.items():
            toggle.on_update(lambda _, split=split: self.show_cameras(split))
        self.cells_on.on_update(lambda _: None if self.cells_on.value else handle.scene.remove_by_name("/cells"))
        for control in filter(None, (self.channel, self.quality, self.time)):
            control.on_update(lambda _: self.look())

    def look(self, view: View | None = None) -> None:
        """At another view, or at the same one with other controls."""
        with self.lock:
            if view is not None:
                self.view, self.moved, self.moving = view, time.monotonic(), True
            if self.view is not None:
                self.view, self.fresh = self.dress(self.view), True

    def dress(self, view: View) -> View:
        """A view with this person's channel and time, and everyone's crop."""
        moment = None if self.time is None else float(self.time.value)
        return replace(view, channel=self.channel.value, crop=self._panel.crop(), time=moment)

    def show_cameras(self, split: str) -> None:
        """Frusta with their photos, where they are ticked; a click flies there. Of many ticks the last holds."""
        with self._frusta_lock:
            self._inside = None
            for frustum in self._frusta.pop(split, []):
                frustum.remove()
            scene = self._panel.facts.train if split == "train" else self._panel.facts.test
            for index in choose_views(len(scene), MAX_FRUSTA) if self.toggles[split].value else ():
                image = truth_image(scene, index, WHITE)
                stride = max(1, max(image.shape[:2]) // THUMBNAIL)
                pose, angle = scene.cameras.camera_to_world[index].cpu(), field_of_view(scene.cameras, index)
                turn = quaternions(pose[None, :, :3] @ torch.diag(torch.tensor([1.0, -1.0, -1.0])))[0]
                shape = {"fov": angle, "aspect": image.shape[1] / image.shape[0], "scale": self._size}
                look = {"image": to_bytes(image[::stride, ::stride]).cpu().numpy(), "color": COLORS[split]}
                stands = {"wxyz": turn.numpy(), "position": pose[:, 3].numpy(), "thickness": 0.03 * self._size}
                frustum = self.handle.scene.add_camera_frustum(f"/cameras/{split}/{index}", **shape, **look, **stands)
                frustum.on_click(lambda _, photo=(pose, angle, frustum): self._fly(*photo))
                self._frusta.setdefault(split, []).append(frustum)

    def _fly(self, there: Tensor, angle: float, frustum: Any) -> None:
        """Move the camera, in some steps, to where a photo was taken."""
        camera, self._flights = self.handle.camera, self._flights + 1
        flight, here = self._flights, pose_of(camera.wxyz, camera.position)
        distance = float(np.linalg.norm(camera.look_at - camera.position))
        for pose in () if here is None else interpolate_poses(torch.stack([here, there]), FLIGHT, distance or 1.0):
            if flight != self._flights:  # another was clicked
                return
            with self.handle.atomic():
                camera.position = pose[:, 3].numpy()
                camera.look_at = (pose[:, 3] - distance * pose[:, 2]).numpy()
            time.sleep(FLIGHT_SECONDS / FLIGHT)
        level = abs(float(there[2, 0])) < 0.02
        camera.up_direction = (0.0, 0.0, 1.0) if level else there[:, 1].numpy()  # a camera held upright or not
        self.widen(angle, frustum.aspect)
        self._inside, frustum.visible = (frustum, there[:, 3]), False  # its image would cover the picture

    def widen(self, angle: float, aspect: float) -> None:
        """Have a photo of this vertical angle and shape fit the screen, which may be narrower."""
        fits = math.tan(0.5 * angle) * max(1.0, aspect / float(self.handle.camera.aspect))
        self.handle.camera.fov = 2.0 * math.atan(fits)

    def left(self, place: Tensor) -> None:
        """Show again the frustum of the photo flown to, once the camera has left it."""
        if self._inside is not None and float((self._inside[1] - place).norm()) > self._size:
            self._inside[0].visible, self._inside = True, None


class PathEditor:
    """A camera path: key views added one by one, the curve through them, its file and, by `advance`, its video."""

    def __init__(self, server: "viser.ViserServer", panel: Panel) -> None:
        self._server, self._panel, self._facts, facts = server, panel, panel.facts, panel.facts
        self._keys: list[Tensor] = []  # poses
        self._angles: list[float] = []
        self._film: Generator[None, tuple[NerfModel, int]] | None = None
        self._stop = False
        gui, height = server.gui, int(facts.train.cameras.size[0, 1])
        with gui.add_folder("Camera path", order=ORDER["Path"], expand_by_default=False):
            add = gui.add_button("Add this view")
            drop = gui.add_button("Remove the last")
            self._frames = gui.add_number("Frames", 120, min=2, max=10_000, step=1)
            self._height = gui.add_number("Height, pixels", sorted((height, *HEIGHT))[1], min=16, max=4096, step=1)
            self._name = gui.add_text("Name", "path")
            save = gui.add_button("Save the path")
            self._render = gui.add_button("Render the video", visible=facts.video is not None)
            self._progress = gui.add_progress_bar(0.0, visible=False)
            self._said = gui.add_markdown("no views yet")
        add.on_click(lambda event: None if event.client is None else self._add(event.client.camera))
        drop.on_click(lambda _: self._drop())
        save.on_click(lambda _: self._save())
        self._render.on_click(lambda event: self._begin(event.client_id))

    def _add(self, camera: Any) -> None:
        if (pose := pose_of(camera.wxyz, camera.position)) is not None and len(self._keys) < MAX_KEYS:
            self._keys, self._angles = [*self._keys, pose], [*self._angles, float(camera.fov)]
            self._draw()

    def _drop(self) -> None:
        self._keys, self._angles = self._keys[:-1], self._angles[:-1]
        self._draw()

    def _poses(self, n_frames: int) -> Tensor:
        keys = torch.stack(self._keys)
        return interpolate_poses(keys, n_frames, spread_of(keys[:, :, 3]))

    def _draw(self) -> None:
        count = len(self._keys)
        self._said.content = f"{count} views" if count > 1 else f"{count} of the two views a path needs"
        line = self._poses(8 * count)[:, :, 3].numpy() if count > 1 else np.zeros((2, 3))
        segments = np.stack([line[:-1], line[1:]], axis=1)
        self._server.scene.add_line_segments("/path", segments, (210, 60, 120), thickness=0.01, visible=count > 1)

    def _save(self) -> None:
        """Write the path's file, with the crop, and say how it went."""
        if (file := self._file()) is None:
            return
        keys, path = self._cameras(torch.stack(self._keys)), CameraPath(self._cameras(), FPS, self._panel.crop())
        try:
            file.parent.mkdir(parents=True, exist_ok=True)
            write_camera_path(file, path, self._facts.train.to_original, keyframes=keys)
            run, given = (shlex.quote(str(one)) for one in (self._facts.run.path, file))
            self._said.content = f"saved; render it with `nerfturbo render {run} --path {given}`"
        except OSError as error:
            self._said.content = f"could not be saved: {error.strerror}"

    def _file(self) -> Path | None:
        """Where the path goes; None, and says why, where there is none to write or no name for it."""
        if len(self._keys) > 1 and NAME.fullmatch(name := str(self._name.value)):
            return self._facts.run.path / "camera_paths" / f"{name}.json"
        wrong = "a path needs two views", "a name has letters, digits, - and _ only"
        self._said.content = wrong[len(self._keys) > 1]
        return None

    def _cameras(self, poses: Tensor | None = None) -> Cameras:
        """Of the frames unless poses are given, with the shape of the scene's images and the mean angle of the keys."""
        poses = self._poses(max(2, min(10_000, int(self._frames.value)))) if poses is None else poses
        width, height = (int(side) for side in self._facts.train.cameras.size[0])
        shown = max(16, min(4096, int(self._height.value)))
        return pinhole(poses, max(16, round(width * shown / height)), shown, float(np.mean(self._angles)))

    def _begin(self, number: int | None) -> None:
        """Begin the video that client `number` asks for, or end the one that is being rendered."""
        client = None if number is None else self._panel.clients.get(number)
        if self._film is not None:
            self._stop = True
        elif client is not None and (file := self._file()) is not None:
            film, self._stop = self._shoot(file.with_suffix(self._facts.suffix), client), False
            try:
                file.parent.mkdir(parents=True, exist_ok=True)
                next(film)
            except (InputError, OSError) as error:
                self._said.content = f"no video: {error}"
                return
            self._film, self._render.label, self._progress.visible = film, "Stop the video", True

    def _shoot(self, file: Path, client: Client) -> Generator[None, tuple[NerfModel, int]]:
        """A frame, as the client sees it, for each model and step that is sent; the video, whole, at the end."""
        cameras, facts = self._cameras(), self._facts
        painter = Painter(photos=client.painter.photos, trains=facts.trains)
        assert facts.video is not None  # else the button is hidden
        (width, height), count = cameras.size[0].tolist(), len(cameras)
        view = client.dress(View(self._keys[-1], float(np.mean(self._angles)), width / height))
        with facts.video(file, FPS) as add:
            for place, pose in enumerate(cameras.camera_to_world, 1):
                model, step = yield
                add(painter.render(model, replace(view, camera_to_world=pose), (width, height), step))
                self._progress.value, self._said.content = 100.0 * place / count, f"frame {place} of {count}"
        self._said.content = f"wrote `{file}`"
        with suppress(Exception):  # who asked may have gone
            client.handle.send_file_download(file.name, file.read_bytes())

    def advance(self, model: NerfModel, step: int) -> bool:
        """Render the next frame of the video, where one is asked for; returns whether there was one."""
        if self._film is None:
            return False
        try:
            if not self._stop:
                self._film.send((model, step))
                return True
            self._said.content = "stopped; no video was written"
        except StopIteration:
            pass
        except Exception as error:  # out of memory, say: the page and training go on
            self._said.content = f"the video could not be written: {error}"
        self.close()
        return True

    def close(self) -> None:
        """Drop a video that is not whole; one whose frame another thread renders ends with it."""
        if self._film is not None and not self._film.gi_running:  # pyright: ignore[reportAttributeAccessIssue]
            self._film.close()
            self._film, self._render.label, self._progress.visible = None, "Render the video", False


def occupied_cells(model: NerfModel) -> tuple[np.ndarray, float]:
    """The middles of occupied cells, or of some of them where they are many, and how large to draw them."""
    grid, centers = model.grid, []
    for level, occupied in enumerate(level_occupancy(grid)):
        low, high = grid.aabb.scaled(2.0**level).tensor("cpu")
        centers.append(low + (occupied.cpu().nonzero() + 0.5) / grid.config.resolution * (high - low))
    points = torch.cat(centers)
    points = points[:: -(-points.shape[0] // MAX_CELLS) or 1]
    return points.numpy(), 0.15 * max(grid.aabb.size) / grid.config.resolution


def field_of_view(cameras: Cameras, index: int) -> float:
    """The vertical angle in radians."""
    return float(2.0 * torch.atan(0.5 * cameras.size[index, 1] / cameras.focal[index, 1]))
