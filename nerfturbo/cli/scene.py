"""`nerfturbo scene info|write`: what a scene holds, also without poses yet, and built-in scenes as files."""

from __future__ import annotations

import shlex
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import tyro

from ..errors import InputError
from .common import BoundsName, parse, print_json, split_is_missing

if TYPE_CHECKING:
    from ..data.scene import Scene, Split
    from ..data.video_frames import VideoFacts

_WARNING = "warning: "


@dataclass(frozen=True)
class InfoArgs:
    """Say what a scene folder holds: format, views, cameras, sizes, bounds, splits, and what was chosen and why.

    With the preset that `train` takes; of photos or a video without poses, what they are and how to go on.
    """

    scene: Annotated[tyro.conf.Positional[str], tyro.conf.arg(metavar="DATA")]
    """A scene folder, a folder of photos, a video, or a built-in scene by name."""
    downscale: Annotated[int, tyro.conf.arg(metavar="N")] = 1
    """Divide the width and height of every picture by this."""
    plot: Annotated[Path | None, tyro.conf.arg(metavar="FILE.png")] = None
    """Draw cameras, points and bounds into this file."""
    allow_outside: bool = False
    """Let the scene's files name pictures outside its folder."""
    bounds: BoundsName = "auto"
    """As `train --bounds` would open it."""
    ndc: bool = False
    """As `train --ndc` would open it."""
    json: bool = False
    """Print one JSON object."""


def info(argv: Sequence[str]) -> int:
    """Open every split and describe it."""
    args = parse(InfoArgs, argv, "scene info")
    if args.plot is not None:
        from ..evaluation.scene_plot import check_plot_path

        check_plot_path(args.plot)
    if (photos := _describe_unposed(args.scene, plot=args.plot is not None)) is not None:
        print_json(photos) if args.json else _print_unposed(photos)
        return 0
    splits = _open_splits(args)
    description = _describe_splits(splits) | _describe_choice(splits)
    if args.plot is not None:
        _plot(args.plot, splits, description)
    if args.json:
        print_json(description)
        return 0
    print(f"{description['name']}: {description['format']}")
    for split, found in description["splits"].items():
        if found is None:
            print(f"  {split:<6}none")
            continue
        alpha = "with alpha" if found["has_alpha"] else "without alpha"
        times = ", with times" if found["has_times"] else ""
        distances = "{:.2f} to {:.2f}".format(*found["camera_distance"])
        sizes = ", ".join("{} x {}".format(*size) for size in found["sizes"][:4])
        print(f"  {split:<6}{found['views']} views, {sizes}, {alpha}{times}; cameras {distances} from the centre")
    _print_cameras(description["cameras"])
    _print_bounds(description["bounds"])
    print(f"  preset  {description['preset']}, which `nerfturbo train` takes here unless told")
    for note in description["fitted"] + description["notes"]:
        print(f"  note  {note}")
    for warning in description["warnings"]:
        print(f"  warning  {warning}")
    return 0


def _print_cameras(cameras: dict[str, Any]) -> None:
    focal = " to ".join(f"{value:.4g}" for value in dict.fromkeys(cameras["focal"]))
    distortion = f", largest coefficient {cameras['distortion']:.3g}" if cameras["distortion"] is not None else ""
    print(f"  lens  {cameras['model']}, {cameras['lenses']} different, focal length {focal} pixels{distortion}")


def _print_bounds(bounds: dict[str, Any]) -> None:
    low, high = ("(" + ", ".join(f"{value:.3g}" for value in bounds[side]) + ")" for side in ("low", "high"))
    levels = bounds["grid_levels"]
    reach = "bounded" if levels == 1 else f"unbounded, {levels} grid levels: {2 ** (levels - 1)} times the box"
    print(f"  box   {low} to {high}, {reach}; near {bounds['near']:.3g}, far {bounds['far']:.3g}")


def _open_splits(args: InfoArgs) -> dict[str, Scene | None]:
    from ..data.scene import SPLITS, load_scene

    splits: dict[str, Scene | None] = {}
    for split in SPLITS:
        try:
            splits[split] = load_scene(
                args.scene,
                split,
                downscale=args.downscale,
                allow_outside=args.allow_outside,
                bounds=args.bounds,
                ndc=args.ndc,
            )
        except InputError as error:
            if not split_is_missing(error):
                raise
            splits[split] = None
    return splits


def _describe_splits(splits: dict[str, Scene | None]) -> dict[str, Any]:
    """Format, splits and bounds of a scene as plain values."""
    first = next(scene for scene in splits.values() if scene is not None)
    return {
        "name": first.name,
        "source": first.source,
        "format": scene_format(first.source),
        "splits": {split: None if scene is None else _describe_split(scene) for split, scene in splits.items()},
        "cameras": _describe_cameras(first),
        "bounds": {
            "low": first.aabb.low,
            "high": first.aabb.high,
            "near": first.near,
            "far": first.far,
            "grid_levels": first.grid_levels,
        },
        "to_original": None if first.to_original is None else first.to_original.tolist(),
        "notes": [note for note in first.notes if not note.startswith(_WARNING)],
        "warnings": [note.removeprefix(_WARNING) for note in first.notes if note.startswith(_WARNING)],
    }


def _describe_choice(splits: dict[str, Scene | None]) -> dict[str, Any]:
    """The preset that `train` would take for this scene on this machine, and what it would change to fit it."""
    from ..data.fitting import fitted_config
    from .settings import starting_config

    start = starting_config(())
    scene = splits["train"] or next(scene for scene in splits.values() if scene is not None)
    config, notes = fitted_config(start, scene, auto=start)
    return {"preset": config.preset, "fitted": list(notes)}


def _plot(path: Path, splits: dict[str, Scene | None], description: dict[str, Any]) -> None:
    """Cameras of all splits, with the points of a reconstruction where there is one."""
    import torch

    from ..data.colmap import load_points
    from ..data.scene import UNPOSED
    from ..data.unposed import poses_folder
    from ..evaluation.scene_plot import PlotPoints, plot_scene

    scenes = [scene for scene in splits.values() if scene is not None]
    first, folder = scenes[0], Path(scenes[0].source)
    cloud = load_points(poses_folder(folder) if description["format"] == UNPOSED else folder)
    points = None
    if cloud is not None and len(cloud.positions) and first.to_original is not None:
        placed = torch.linalg.inv(first.to_original)
        positions = cloud.positions @ placed[:3, :3].T + placed[:3, 3]
        points = PlotPoints(positions.numpy(), cloud.colors.numpy())
    plot_scene(path, scenes, points, f"{first.name}: {description['format']}")


def _describe_cameras(scene: Scene) -> dict[str, Any]:
    """Of the first split there is."""
    import torch

    cameras = scene.cameras
    lenses = [cameras.focal, cameras.center, cameras.size.float()]
    lenses += [] if cameras.distortion is None else [cameras.distortion]
    return {
        "model": cameras.model,
        "lenses": int(torch.unique(torch.cat(lenses, dim=1), dim=0).shape[0]),
        "focal": [float(cameras.focal.min()), float(cameras.focal.max())],
        "distortion": None if cameras.distortion is None else float(cameras.distortion.abs().max()),
    }


def _describe_split(scene: Scene) -> dict[str, Any]:
    import torch

    distances = (scene.cameras.positions - torch.tensor(scene.aabb.center)).norm(dim=-1)
    return {
        "views": len(scene),
        "sizes": sorted({tuple(size) for size in scene.cameras.size.tolist()}),
        "has_alpha": scene.has_alpha,
        "has_times": scene.cameras.times is not None,
        "camera_distance": [float(distances.min()), float(distances.max())],
        "pixels": scene.images.n_pixels,
    }


def scene_format(source: str) -> str:
    """The name of the format a scene was recognised as."""
    from ..data.scene import BUILTIN_PREFIX, FORMATS

    if source.startswith(BUILTIN_PREFIX):
        return "built in"
    return next((entry.name for entry in FORMATS if entry.recognise(Path(source))), "unknown")


def _describe_unposed(given: str, *, plot: bool) -> dict[str, Any] | None:
    """Of photos or a video whose poses are not known yet; None for all other scenes."""
    from ..data.scene import UNPOSED, is_builtin, recognise

    source = Path(given).expanduser()
    found = None if is_builtin(given) else recognise(source)
    if found is None or found.name != UNPOSED:
        return None
    from ..data.images import image_size
    from ..data.photos import find_photos, is_video
    from ..data.unposed import poses_folder

    folder = poses_folder(source)
    if (folder / "sparse" / "0").is_dir():
        return None
    command = shlex.join(["nerfturbo", "process", str(source), str(folder)])
    if plot:
        raise InputError("--plot", "a scene with poses", "pictures without", f"find them first: {command}")
    name = {"name": source.resolve().name, "source": given, "format": found.name, "poses": None}
    presets = {"preset": None, "presets": _presets(), "next": command}
    if not is_video(source):
        photos = find_photos(source)
        return {**name, "pictures": len(photos), "sizes": sorted({image_size(path) for path in photos}), **presets}
    facts, unknown = _video_facts(source)
    sizes = [] if facts is None or facts.size is None else [facts.size]
    video = {"video": None if facts is None else asdict(facts) | {"taken": _taken(facts)}, "unknown_because": unknown}
    return {**name, "pictures": 0, "sizes": sizes, **video, **presets}


def _video_facts(video: Path) -> tuple[VideoFacts | None, str | None]:
    """What the video's file says; None and the reason where nothing here reads videos."""
    from ..data.video_frames import open_decoder

    try:
        decoder = open_decoder()
    except InputError as error:
        return None, str(error)
    return decoder.facts(video), None


def _taken(facts: VideoFacts) -> int | None:
    """How many frames `process` takes unless told."""
    from ..data.video_frames import frame_count

    return None if facts.frames is None else frame_count(facts.frames, facts.seconds or 0.0)


def _presets() -> list[str]:
    """What `train` takes once the poses show whether the scene has an end: where it has one, and where not."""
    from ..data.fitting import UNBOUNDED_PRESETS
    from .settings import starting_config

    bounded = starting_config(()).preset
    return [bounded, UNBOUNDED_PRESETS.get(bounded, bounded)]


def _print_unposed(found: dict[str, Any]) -> None:
    """What it is, the command to go on with, and the presets that may come."""
    print(f"{found['name']}: {found['format']}, without poses; {_what(found)}")
    if found.get("unknown_because"):
        print(f"  warning  {found['unknown_because']}")
    print(f"  next  {found['next']}")
    train = f"`nerfturbo train {shlex.quote(found['source'])}`"
    print(f"        finds the poses, once, by COLMAP; {train} does that first by itself")
    bounded, unbounded = found["presets"]
    print(f"  preset  {bounded}, or {unbounded} where the poses show a scene without an end")


def _what(found: dict[str, Any]) -> str:
    sizes = ", ".join("{} x {}".format(*size) for size in found["sizes"][:4])
    if "video" not in found:
        return f"{found['pictures']} photos, {sizes}" + (", ..." if len(found["sizes"]) > 4 else "")
    facts = found["video"]
    if facts is None:
        return "a video"
    parts = [] if facts["frames"] is None else [f"{facts['frames']} frames"]
    parts += [sizes] if sizes else []
    parts += [] if facts["fps"] is None else [f"{facts['fps']:g} fps"]
    parts += [] if facts["seconds"] is None else [f"{facts['seconds']:.1f} s"]
    taken = "" if facts["taken"] is None else f"; `process` takes the sharpest {facts['taken']} of them"
    return "a video: " + ", ".join(parts) + taken


@dataclass(frozen=True)
class WriteArgs:
    """Write a built-in scene to disk in Blender's format, so that other tools can read it."""

    name: Annotated[tyro.conf.Positional[str], tyro.conf.arg(metavar="NAME")]
    """A built-in scene."""
    folder: Annotated[tyro.conf.Positional[Path], tyro.conf.arg(metavar="FOLDER")]
    """A new or empty folder."""
    resolution: Annotated[int, tyro.conf.arg(metavar="PIXELS")] = 200
    """Width and height of the pictures."""
    train_views: Annotated[int, tyro.conf.arg(metavar="N")] = 60
    """Pictures to train on."""
    test_views: Annotated[int, tyro.conf.arg(metavar="N")] = 20
    """Pictures to score on."""
    all_around: bool = False
    """Cameras look from below too, not from above alone."""


def write(argv: Sequence[str]) -> int:
    """Render the splits and write them."""
    args = parse(WriteArgs, argv, "scene write")
    from ..data.blender import write_blender
    from ..data.builtin import builtin_scene, check_name
    from ..evaluation.run_folder import check_writable

    name = check_name(args.name)
    check_writable(args.folder)
    views: dict[Split, int] = {"train": args.train_views, "test": args.test_views}
    given = {"resolution": args.resolution, "all_around": args.all_around}
    scenes = [builtin_scene(name, split, n_views=n, **given) for split, n in views.items()]
    print(write_blender(scenes, args.folder))
    return 0
