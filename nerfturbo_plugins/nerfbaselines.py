"""nerfturbo as a method of NerfBaselines:

    nerfbaselines train --method nerfturbo --data SCENE --output RUN
    nerfbaselines train --method nerfturbo --data SCENE --set train.steps=5000 --set field.log2_entries=21

Scenes are placed and presets chosen as `nerfturbo train` does, from what the training views show. Config values are set
by name, and `preset=NAME` takes another preset. One iteration is one step."""

import functools
import json
import shutil
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager, nullcontext
from dataclasses import replace
from pathlib import Path
from typing import Any

import click
import numpy as np
import torch
from nerfbaselines import Method, camera_model_from_int

from nerfturbo import Cameras, Config, InputError, Scene, Trainer, load_model, preset
from nerfturbo.config import from_dict, to_dict
from nerfturbo.data.cameras import opencv_to_opengl, transform_poses
from nerfturbo.data.formats.posed import Lens, View, cameras_of, posed_scene
from nerfturbo.data.images import image_size, save_image
from nerfturbo.data.options import LoadOptions
from nerfturbo.data.placement import given_place
from nerfturbo.data.scene_defaults import fitted_config
from nerfturbo.training.checkpoint import latest_checkpoint, read_state

CHECKPOINTS, WORLD = "checkpoints", "world.json"  # what `save` writes
OPENCV = "pinhole", "opencv", "full_opencv"
BLENDER_BOX = 1.5  # half a side, about the origin, of the NeRF paper's scenes
MODELS = frozenset((*OPENCV, "opencv_fisheye"))


def lens_of(cameras: Any, index: int) -> Lens:
    """Of one of NerfBaselines' cameras."""
    width, height = (int(side) for side in cameras.image_sizes[index])
    fx, fy, cx, cy = (float(value) for value in cameras.intrinsics[index])
    name = camera_model_from_int(int(cameras.camera_models[index]))
    given = [float(value) for value in cameras.distortion_parameters[index]] + [0.0] * 8
    if name == "opencv_fisheye":  # k1, k2, p1, p2, k3, k4: the lens has no p1 and p2
        kept, model = [given[i] for i in (0, 1, 4, 5)] + [0.0] * 4, "fisheye"
    else:
        kept, model = (
            [value if i < (0, 4, 8)[OPENCV.index(name)] else 0.0 for i, value in enumerate(given[:8])],
            "opencv",
        )
    return Lens(width, height, (fx, fy), (cx, cy), model, tuple(kept)).checked(f"camera {index}")


def views_of(cameras: Any, files: list[Path]) -> list[View]:
    poses = opencv_to_opengl(torch.from_numpy(np.array(cameras.poses, dtype=np.float64))[:, :3])
    return [View(file, poses[index], lens_of(cameras, index)) for index, file in enumerate(files)]


@contextmanager
def image_files(dataset: Any) -> Iterator[list[Path]]:
    """The images as files of the size that the cameras have: their own where they fit, else written for the moment."""
    with tempfile.TemporaryDirectory() as folder:
        files = []
        for index, name in enumerate(dataset["image_paths"]):
            size, file = tuple(int(side) for side in dataset["cameras"].image_sizes[index]), Path(name)
            if not file.is_file() or image_size(file, upright=False) != size:
                file = Path(folder, f"{index:06d}.png")
                save_image(file, torch.from_numpy(np.asarray(dataset["images"][index])[: size[1], : size[0]]))
            files.append(file)
        yield files


def scene_of(dataset: Any) -> Scene:
    """A dataset of NerfBaselines, placed as a folder of the same images is."""
    options, points = LoadOptions(allow_outside=True), dataset.get("points3D_xyz")
    origin = torch.eye(4, dtype=torch.float64)
    placing = {"to_original": origin, "options": options, "half": BLENDER_BOX, "levels": 1, "near": 0.0}
    is_blender = dataset["metadata"].get("id") == "blender"
    with image_files(dataset) as files:
        return posed_scene(
            Path(dataset["image_paths_root"]),
            views_of(dataset["cameras"], files),
            "train",
            options,
            points=None if points is None or not len(points) else torch.from_numpy(np.asarray(points, np.float64)),
            placing=functools.partial(given_place, why="the NeRF paper's box", **placing) if is_blender else None,
        )


def with_values(config: Config, values: dict[str, Any]) -> Config:
    """The config with these values, by names such as train.steps; text is read as JSON where it is."""
    changed = to_dict(config)
    for name, value in values.items():
        *groups, last = name.split(".")
        place = functools.reduce(lambda part, group: part.get(group, {}), groups, changed)
        if last not in place:
            raise InputError(name, "the name of a config value, such as train.steps", "no such value")
        try:
            place[last] = json.loads(value) if isinstance(value, str) else value
        except json.JSONDecodeError:
            place[last] = value
    return from_dict(Config, changed)


class Nerfturbo(Method):
    def __init__(
        self,
        *,
        checkpoint: str | None = None,
        train_dataset: Any = None,
        config_overrides: dict[str, Any] | None = None,
    ) -> None:
        self.device = "cuda" if torch.cuda.is_available() else "cpu"
        self.checkpoint, self.trainer, self._loaded_step = checkpoint, None, None
        values = dict(config_overrides or {})
        if checkpoint is not None:
            saved = latest_checkpoint(Path(checkpoint))
            self.world, state = json.loads(Path(checkpoint, WORLD).read_text()), read_state(saved)
            self.config, self._loaded_step = from_dict(Config, state.config), state.step
        if train_dataset is None:
            if checkpoint is None:
                raise InputError("train_dataset", "a dataset or a checkpoint", "neither")
            self.model = load_model(saved, self.device)
            return
        scene = scene_of(train_dataset)
        if checkpoint is None:
            try:
                start = preset(name := values.pop("preset", "auto"), self.device)
                fitted, _ = fitted_config(start, scene, auto=start if name == "auto" else None)
                self.config = with_values(fitted, values)
            except InputError as error:  # a word and exit code 2, as their own flags have it
                raise click.UsageError(f"--set: {error}") from error
            colour = train_dataset["metadata"].get("background_color")
            to_original = torch.eye(4, dtype=torch.float64) if scene.to_original is None else scene.to_original
            self.world = {
                "to_original": to_original.tolist(),
                "background": None if colour is None else colour.tolist(),
            }
        self.trainer = Trainer(self.config, scene, device=self.device)
        if checkpoint is not None:
            self.trainer.resume(saved)
        self.model, self._running = self.trainer.model, False

    @classmethod
    def get_method_info(cls) -> Any:
        return {
            "method_id": "",  # the registry sets it
            "required_features": frozenset(("color", "points3D_xyz")),
            "supported_camera_models": MODELS,
            "supported_outputs": ("color", "depth", "accumulation"),
            "can_resume_training": True,
        }

    def get_info(self) -> Any:
        flat = {
            f"{group}.{name}": value
            for group, part in to_dict(self.config).items()
            if isinstance(part, dict)
            for name, value in part.items()
        }
        return self.get_method_info() | {
            "num_iterations": self.config.train.steps,
            "loaded_step": self._loaded_step,
            "loaded_checkpoint": self.checkpoint,
            "batch_size": self.config.train.batch_samples,
            "hparams": {"preset": self.config.preset} | flat,
        }

    def train_iteration(self, step: int) -> dict[str, float]:
        if self.trainer is None:
            raise InputError("train_dataset", "a dataset to train on", "none", "make the method with one")
        if not self._running:
            self.trainer.begin()
            self._running = True
        record = self.trainer.advance(1)
        if record.step >= self.config.train.steps:
            self.trainer.end()
            self._running = False
        mse = max(record.mse, 1e-12)
        return {"loss": record.loss, "mse": mse, "psnr": float(-10.0 * np.log10(mse)), "num_rays": float(record.n_rays)}

    def save(self, path: str) -> None:
        if self.trainer is not None:
            with self.trainer.clock_stopped():
                self.trainer.save(Path(path) / CHECKPOINTS, keep=1)
        elif self.checkpoint is not None:  # to render it, NerfBaselines saves it again and compares
            shutil.copytree(Path(self.checkpoint) / CHECKPOINTS, Path(path) / CHECKPOINTS)
        Path(path, WORLD).write_text(json.dumps(self.world))

    def render(self, camera: Any, *, options: Any = None) -> dict[str, np.ndarray]:
        batch = camera.item().apply(lambda value, _: value[None])
        cameras = self._placed(cameras_of(views_of(batch, [Path("camera")]), Path("camera"))).to(self.device)
        colour = self.world["background"]
        background = None if colour is None else torch.tensor(colour, device=self.device) / 255.0
        during = finished = nullcontext()
        if self.trainer is not None:  # whose weights are not their running mean, which a checkpoint is loaded with
            finished = self.trainer.as_finished() if self._running else self.trainer.optimizer.averaged()
            during = self.trainer.clock_stopped() if self._running else during
        with torch.no_grad(), during, finished:
            image = self.model.render_image(cameras, 0, background)
        scale = float(torch.linalg.det(torch.tensor(self.world["to_original"])[:3, :3]).abs() ** (1.0 / 3.0))
        found = {"color": image.rgb.clamp(0.0, 1.0), "depth": image.depth * scale, "accumulation": image.opacity}
        wanted = (options or {}).get("outputs") or found
        return {name: found[name].cpu().numpy() for name in wanted if name in found}

    def _placed(self, cameras: Cameras) -> Cameras:
        """Where the scene stands; the dataset's own coordinates otherwise."""
        to_original = torch.tensor(self.world["to_original"], dtype=torch.float64)
        moved = transform_poses(cameras.camera_to_world.double(), torch.linalg.inv(to_original))
        return replace(cameras, camera_to_world=moved.float())
