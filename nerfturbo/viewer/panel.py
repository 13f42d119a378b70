"""The controls and the things in the scene: modes, crop, cameras with their pictures, curves, camera paths."""

from __future__ import annotations

import threading
from collections.abc import Callable
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any, Protocol

import numpy as np
import torch
from torch import Tensor

from ..data.scene import Scene
from ..evaluation.camera_path import quaternions
from ..evaluation.evaluate import WHITE, choose_views, truth_image
from ..evaluation.images import CHANNELS
from ..rendering.model import NerfModel
from ..sampling.crop import level_box, level_occupancy
from ..types import Aabb
from .painter import View
from .path_editor import PathEditor

if TYPE_CHECKING:
    import viser

MAX_FRUSTA = 60
THUMBNAIL = 96
MAX_CELLS = 20_000
COLORS = {"train": (70, 120, 220), "test": (235, 140, 40)}


class Asked(Protocol):
    """What buttons set and training reads."""

    paused: bool
    save: bool
    lock: threading.Lock


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

    def __init__(
        self, server: viser.ViserServer, facts: SceneFacts, wishes: Asked, look_again: Callable[[], None]
    ) -> None:
        self._server, self._facts, self._wishes, self._look_again = server, facts, wishes, look_again
        server.gui.configure_theme(control_width="medium", show_logo=False, show_share_button=False)
        server.scene.set_up_direction("+z")
        self._place_camera()
        self._status = server.gui.add_markdown(f"**{facts.name}**")
        if facts.trains:
            self._add_training()
        self._add_view()
        self._add_crop()
        self._add_things()
        self._editor = PathEditor(server, facts, self.crop)
        self._curves = self._add_curves() if facts.trains else None

    def dress(self, view: View) -> View:
        """A view with the controls' channel, crop and time."""
        moment = None if self._time is None else float(self._time.value)
        return replace(view, channel=self._channel.value, crop=self.crop(), time=moment)

    def crop(self) -> Aabb | None:
        """The box of the crop sliders, where cropping is on."""
        if not self._crop_on.value:
            return None
        (x0, x1), (y0, y1), (z0, z1) = (sorted(map(float, slider.value)) for slider in self._crop_sliders)
        if min(x1 - x0, y1 - y0, z1 - z0) <= 0.0:
            return None
        return Aabb((x0, y0, z0), (x1, y1, z1))

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
            state = " (paused)" if self._wishes.paused else ""
            self._status.content = (
                f"**{self._facts.name}** step {last['step']}{state}, {last['seconds']:.0f} s  \n"
                f"PSNR {last['psnr']:.2f} dB, {rate:.0f} k rays/s, {share:.1f}% occupied"
            )
            if self._curves is not None:
                self._draw(steps)
        else:
            self._status.content = f"**{self._facts.name}** step {step}"
        if self._cells_on.value:
            self._show_cells(model)

    def _place_camera(self) -> None:
        first = self._facts.test.cameras[0]
        start = self._server.initial_camera
        start.position = first.positions[0].double().cpu().numpy()
        start.look_at = np.array(self._facts.box.center)
        start.up = (0.0, 0.0, 1.0)
        start.fov = float(2.0 * torch.atan(0.5 * first.size[0, 1] / first.focal[0, 1]))

    def _add_training(self) -> None:
        gui = self._server.gui
        with gui.add_folder("Training"):
            pause = gui.add_button("Pause training")
            save = gui.add_button("Save a checkpoint")
            hint = "Share of the time that pictures may take while you move; less than half of it while you rest."
            self._share = gui.add_slider("Time for this page, %", 2, 60, 1, 20, hint=hint)

        @pause.on_click
        def _(_: Any) -> None:
            self._wishes.paused = not self._wishes.paused
            pause.label = "Go on training" if self._wishes.paused else "Pause training"

        @save.on_click
        def _(_: Any) -> None:
            with self._wishes.lock:
                self._wishes.save = True

    def _add_view(self) -> None:
        gui = self._server.gui
        with gui.add_folder("Picture"):
            self._channel = gui.add_dropdown("Show", CHANNELS, initial_value="color")
            self._quality = gui.add_slider("Finest picture, pixels", 128, 1920, 64, 640)
            moving = self._facts.train.cameras.times is not None
            self._time = gui.add_slider("Time", 0.0, 1.0, 0.01, 0.0) if moving else None
        for control in (self._channel, self._quality, self._time):
            if control is not None:
                control.on_update(lambda _: self._look_again())

    def _add_crop(self) -> None:
        gui, box = self._server.gui, self._facts.box
        with gui.add_folder("Crop", expand_by_default=False):
            self._crop_on = gui.add_checkbox("Crop", False)
            self._crop_sliders = [
                gui.add_multi_slider(axis, low, high, (high - low) / 200.0, (low, high))
                for axis, low, high in zip("xyz", box.low, box.high, strict=True)
            ]
        for control in (self._crop_on, *self._crop_sliders):
            control.on_update(lambda _: self._crop_changed())

    def _crop_changed(self) -> None:
        crop = self.crop()
        shown = crop or self._facts.box
        self._server.scene.add_box(
            "/crop",
            color=(200, 60, 60),
            dimensions=shown.size,
            wireframe=True,
            position=shown.center,
            visible=crop is not None,
        )
        self._look_again()

    def _add_things(self) -> None:
        gui = self._server.gui
        with gui.add_folder("In the scene", expand_by_default=False):
            toggles = {split: gui.add_checkbox(f"Cameras of {split}", False) for split in COLORS}
            self._cells_on = gui.add_checkbox("Occupied cells", False)
        frusta = {
            "train": self._add_frusta("train", self._facts.train),
            "test": self._add_frusta("test", self._facts.test),
        }
        for split, toggle in toggles.items():
            toggle.on_update(lambda _, split=split, toggle=toggle: _show(frusta[split], bool(toggle.value)))
        self._cells_on.on_update(lambda _: None if self._cells_on.value else self._hide_cells())

    def _add_frusta(self, split: str, scene: Scene) -> list[Any]:
        cameras, made = scene.cameras, []
        distance = float((cameras.positions - torch.tensor(self._facts.box.center)).norm(dim=-1).mean())
        flip = torch.diag(torch.tensor([1.0, -1.0, -1.0]))
        turns = quaternions(cameras.camera_to_world[:, :, :3].cpu() @ flip).numpy()
        for index in choose_views(len(scene), MAX_FRUSTA):
            width, height = (int(side) for side in cameras.size[index])
            frustum = self._server.scene.add_camera_frustum(
                f"/cameras/{split}/{index}",
                fov=float(2.0 * torch.atan(0.5 * cameras.size[index, 1] / cameras.focal[index, 1])),
                aspect=width / height,
                scale=0.06 * distance,
                color=COLORS[split],
                image=thumbnail(truth_image(scene, index, WHITE)),
                wxyz=turns[index],
                position=cameras.positions[index].cpu().numpy(),
                visible=False,
            )
            frustum.on_click(lambda event, index=index: _fly(event.client, turns[index], cameras.positions[index]))
            made.append(frustum)
        return made

    def _hide_cells(self) -> None:
        self._server.scene.add_point_cloud("/cells", points=np.zeros((1, 3)), colors=(0, 0, 0), visible=False)

    def _show_cells(self, model: NerfModel) -> None:
        grid, centers = model.grid, []
        for level, occupied in enumerate(level_occupancy(grid)):
            low, high = level_box(grid, level).tensor("cpu")
            cells = occupied.cpu().nonzero()
            centers.append(low + (cells + 0.5) / grid.config.resolution * (high - low))
        points = torch.cat(centers)
        if points.shape[0] > MAX_CELLS:
            points = points[:: -(-points.shape[0] // MAX_CELLS)]
        size = max(model.grid.aabb.size) / grid.config.resolution
        self._server.scene.add_point_cloud(
            "/cells", points=points.numpy(), colors=(40, 170, 120), point_size=0.15 * size, visible=True
        )

    def _add_curves(self) -> dict[str, Any]:
        from viser import uplot

        gui, empty = self._server.gui, np.array([0.0])
        with gui.add_folder("Curves", expand_by_default=False):
            return {
                name: gui.add_uplot(
                    (empty, empty),
                    (uplot.Series(label="step"), uplot.Series(label=label, stroke=color, width=2)),
                    title=label,
                    scales={"x": uplot.Scale(time=False)},
                    aspect=1.6,
                )
                for name, label, color in (("psnr", "PSNR, dB", "#3b6fd4"), ("loss", "loss", "#d4703b"))
            }

    def _draw(self, steps: list[dict[str, Any]]) -> None:
        assert self._curves is not None
        kept = steps[:: max(1, len(steps) // 300)]
        x = np.array([record["step"] for record in kept], dtype=float)
        for name, plot in self._curves.items():
            plot.data = (x, np.array([record[name] for record in kept], dtype=float))


def _show(handles: list[Any], visible: bool) -> None:
    for handle in handles:
        handle.visible = visible


def _fly(client: Any, turn: np.ndarray, position: Tensor) -> None:
    """Put a client's camera where a picture was taken."""
    with client.atomic():
        client.camera.wxyz = turn
        client.camera.position = position.cpu().numpy()


def thumbnail(picture: Tensor) -> np.ndarray:
    """(height, width, 3) uint8, small: every k-th pixel."""
    stride = max(1, max(picture.shape[:2]) // THUMBNAIL)
    return (picture[::stride, ::stride].clamp(0.0, 1.0) * 255.0 + 0.5).to(torch.uint8).cpu().numpy()
