"""`nerfturbo scene info|check|write` and `process`: what scenes hold, whether their poses are right, built-in ones as
files, poses of photos or a video."""

from __future__ import annotations

import shlex
import sys
import time
from collections.abc import Sequence
from dataclasses import asdict, dataclass, field, replace
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

from tyro.conf import Positional, arg

from ..config import BUILTIN_PREFIX
from ..errors import InputError, counted, refuse
from ..export import check_ending, require_package
from ..presets import ProcessConfig
from .common import check_new, print_json
from .flags import BoundsName, Number, UpName, check_within, parse
from .progress import Display, showing
from .settings import check_source, starting_config

if TYPE_CHECKING:
    from ..data.capture.sfm import Verdict
    from ..data.scene import Scene, Split

_WARNING = "warning: "


@dataclass(frozen=True)
class InfoArgs:
    """Say what a scene folder holds: format, views, cameras, sizes, bounds, splits, and what was chosen and why. With
    the preset that `train` takes; of photos or a video without poses, what they are and how to go on."""

    scene: Annotated[Positional[str], arg(metavar="DATA")]
    """A scene folder, a folder of photos, a video, or a built-in scene by name."""
    downscale: Number = 1  # Divide the width and height of every image by this.
    plot: Annotated[Path | None, arg(metavar="FILE.png")] = None  # Draw cameras, points and bounds into this file.
    allow_outside: bool = False  # Let the scene's files name images outside its folder.
    bounds: BoundsName = "auto"  # As `train --bounds` would open it.
    ndc: bool = False  # As `train --ndc` would open it.
    up: UpName = "auto"  # Axis of the scene's file that is up, as `train --up` has it.
    json: bool = False  # Print one JSON object.


def info(argv: Sequence[str]) -> int:
    args = parse(InfoArgs, argv, "scene info")
    check_source(args.scene)
    if args.plot is not None:
        from ..evaluation.scene_plot import check_plot_path

        check_plot_path(args.plot)
    from ..data.options import LoadOptions
    from ..data.scene import SPLITS, find_split, load_scene

    if (photos := _describe_unposed(args.scene, plot=args.plot is not None)) is not None:
        print_json(photos) if args.json else _print_unposed(photos)
        return 0
    options = LoadOptions(args.downscale, "ndc" if args.ndc else args.bounds, args.allow_outside, up=args.up)
    said: list[str] = []
    splits = {split: find_split(args.scene, split, options, said) for split in SPLITS}
    if not any(splits.values()):
        load_scene(args.scene, options=options)  # raises, in its words
    description = _describe(splits, said)
    if args.plot is not None:
        _plot(args.plot, splits, description)
    print_json(description) if args.json else _print(description)
    return 0


def _print(found: dict[str, Any]) -> None:
    cameras, bounds = found["cameras"], found["bounds"]
    print(f"{found['name']}: {found['format']}")
    for name, split in found["splits"].items():
        if split is None:
            print(f"  {name:<6}none")
            continue
        kind = ("with alpha" if split["has_alpha"] else "without alpha") + ", with times" * split["has_times"]
        distances = "{:.2f} to {:.2f}".format(*split["camera_distance"])
        sizes = ", ".join("{} x {}".format(*size) for size in split["sizes"][:4])
        views = counted(split["views"], "view")
        print(f"  {name:<6}{views}, {sizes}, {kind}; cameras {distances} from the centre")
    focal = " to ".join(f"{value:.4g}" for value in dict.fromkeys(cameras["focal"]))
    distortion = "" if cameras["distortion"] is None else f", largest coefficient {cameras['distortion']:.3g}"
    print(f"  lens  {cameras['model']}, {cameras['lenses']} different, focal length {focal} pixels{distortion}")
    low, high = ("(" + ", ".join(f"{value:.3g}" for value in bounds[side]) + ")" for side in ("low", "high"))
    levels = bounds["grid_levels"]
    reach = "bounded" if levels == 1 else f"unbounded, {levels} grid levels: {2 ** (levels - 1)} times the box"
    print(f"  box   {low} to {high}, {reach}; near {bounds['near']:.3g}, far {bounds['far']:.3g}")
    print(f"  preset  {found['preset']}, which `nerfturbo train` takes here unless told")
    for kind, notes in (("note", found["fitted"] + found["notes"]), ("warning", found["warnings"])):
        for note in notes:
            print(f"  {kind}  {note}")


def _describe(splits: dict[str, Scene | None], said: Sequence[str]) -> dict[str, Any]:
    """Format, splits, cameras, bounds, decisions, the preset that `train` would take here and what it would change."""
    from ..data.lenses import distinct_lenses
    from ..data.scene import Decision, is_builtin, recognise
    from ..data.scene_defaults import fitted_config

    first = next(scene for scene in splits.values() if scene is not None)
    found = None if is_builtin(first.source) else recognise(Path(first.source))
    start = starting_config(())
    config, fitted = fitted_config(start, splits["train"] or first, auto=start)
    cameras, aabb = first.cameras, first.aabb
    bounds = {"low": aabb.low, "high": aabb.high, "near": first.near, "far": first.far}
    return {
        "name": first.name,
        "source": first.source,
        "format": "built in" if found is None else found.name,
        "splits": {split: None if scene is None else _describe_split(scene) for split, scene in splits.items()},
        "cameras": {
            "model": cameras.model,
            "lenses": len(distinct_lenses(cameras)[0]),
            "focal": [float(cameras.focal.min()), float(cameras.focal.max())],
            "distortion": None if cameras.distortion is None else float(cameras.distortion.abs().max()),
        },
        "bounds": {**bounds, "grid_levels": first.grid_levels},
        "to_original": None if first.to_original is None else first.to_original.tolist(),
        "notes": [note for note in first.notes if not note.startswith(_WARNING)],
        "warnings": [note.removeprefix(_WARNING) for note in dict.fromkeys(said)],
        "decisions": [vars(note) for note in first.notes if isinstance(note, Decision)],
        "in_doubt": first.other is not None,
        "preset": config.preset,
        "fitted": list(fitted),
    }


def _plot(path: Path, splits: dict[str, Scene | None], description: dict[str, Any]) -> None:
    """Cameras of all splits, with the points of a reconstruction where there is one."""
    import torch

    from ..data.cameras import transform_points
    from ..data.capture.process import poses_folder
    from ..data.formats.colmap import load_points
    from ..data.scene import UNPOSED
    from ..evaluation.scene_plot import plot_scene

    scenes = [scene for scene in splits.values() if scene is not None]
    first, folder = scenes[0], Path(scenes[0].source)
    cloud = load_points(poses_folder(folder) if description["format"] == UNPOSED else folder)
    points = None
    if cloud is not None and len(cloud.positions) and first.to_original is not None:
        points = replace(cloud, positions=transform_points(cloud.positions, torch.linalg.inv(first.to_original)))
    plot_scene(path, scenes, points, f"{first.name}: {description['format']}")


def _describe_split(scene: Scene) -> dict[str, Any]:
    import torch

    distances = (scene.cameras.positions - torch.tensor(scene.aabb.center)).norm(dim=-1)
    sizes = sorted({tuple(size) for size in scene.cameras.size.tolist()})
    found = {"views": len(scene), "sizes": sizes, "pixels": scene.images.n_pixels, "has_alpha": scene.has_alpha}
    reach = [float(distances.min()), float(distances.max())]
    return found | {"has_times": scene.cameras.times is not None, "camera_distance": reach}


def _describe_unposed(given: str, *, plot: bool) -> dict[str, Any] | None:
    """Of photos or a video whose poses are not known yet; None for all other scenes."""
    if (source := _unposed(given)) is None:
        return None
    from ..data.capture.photos import find_photos, is_video, photo_sizes
    from ..data.capture.process import poses_folder
    from ..data.capture.video import frame_count, open_decoder
    from ..data.images import image_size
    from ..data.scene import UNPOSED
    from ..data.scene_defaults import UNBOUNDED_PRESETS

    folder = poses_folder(source)
    if (folder / "sparse" / "0").is_dir():
        return None
    command = shlex.join(["nerfturbo", "process", str(source), str(folder)])
    refuse(plot, "--plot", "a scene with poses", "images without", f"find them first: {command}")
    bounded = starting_config(()).preset
    presets = [bounded, UNBOUNDED_PRESETS.get(bounded, bounded)]  # where the poses show an end, and where not
    name = {"name": source.resolve().name, "source": given, "format": UNPOSED, "poses": None}
    name |= {"preset": None, "presets": presets, "next": command}
    if not is_video(source):
        photos = find_photos(source)
        refuse(len(photos) < 2, str(source), "at least 2 photos, to find their poses", "one")
        sizes = photo_sizes(photos) or [image_size(photos[0])]  # raises, in its words
        return {**name, "pictures": len(photos), "damaged": len(photos) - len(sizes), "sizes": sorted(set(sizes))}
    try:
        decoder = open_decoder()
    except InputError as error:  # nothing here reads videos
        return {**name, "pictures": 0, "sizes": [], "video": None, "unknown_because": str(error)}
    facts = decoder.facts(source)
    taken = None if facts.frames is None else frame_count(facts.frames, facts.seconds or 0.0)
    sizes = [] if facts.size is None else [facts.size]
    return {**name, "pictures": 0, "sizes": sizes, "video": {**asdict(facts), "taken": taken}, "unknown_because": None}


def _print_unposed(found: dict[str, Any]) -> None:
    """What it is, the command to go on with, and the presets that may come."""
    print(f"{found['name']}: {found['format']}, without poses; {_what(found)}")
    if found.get("unknown_because"):
        print(f"  warning  {found['unknown_because']}")
    print(f"  next  {found['next']}")
    train = f"`nerfturbo train {shlex.quote(found['source'])}`"
    print(f"        finds the poses, once, by COLMAP; {train} does that first by itself")
    bounded, unbounded = found["presets"]
    print(f"  preset  {bounded}, or {unbounded} where the poses show an unbounded scene")


def _what(found: dict[str, Any]) -> str:
    sizes = ", ".join("{} x {}".format(*size) for size in found["sizes"][:4])
    if "video" not in found:
        damaged = f" ({found['damaged']} damaged)" if found["damaged"] else ""
        return f"{counted(found['pictures'], 'photo')}{damaged}, {sizes}" + (", ..." if len(found["sizes"]) > 4 else "")
    if (facts := found["video"]) is None:
        return "a video"
    parts = [] if facts["frames"] is None else [counted(facts["frames"], "frame")]
    parts += [sizes] if sizes else []
    parts += [] if facts["fps"] is None else [f"{facts['fps']:g} fps"]
    parts += [] if facts["seconds"] is None else [f"{facts['seconds']:.1f} s"]
    taken = "" if facts["taken"] is None else f"; `process` takes the sharpest {facts['taken']} of them"
    return "a video: " + ", ".join(parts) + taken


@dataclass(frozen=True)
class CheckArgs:
    """Say whether the poses of a scene are right: how far features that neighbouring images share are from their
    epipolar lines, which focal lengths and principal point fit better, and which images are wrong."""

    scene: Annotated[Positional[str], arg(metavar="DATA")]  # A scene with poses.
    images: Number = 80  # Compare at most so many images.
    output: Annotated[Path | None, arg(metavar="FILE.html")] = None  # Write a page with plots.
    overwrite: bool = False  # Replace a page that is there.
    allow_outside: bool = False  # Let the scene's files name images outside its folder.
    json: bool = False  # Print one JSON object.


def check(argv: Sequence[str]) -> int:
    args = parse(CheckArgs, argv, "scene check")
    check_source(args.scene)
    refuse(args.images < 2, "--images", "at least 2", args.images)
    if args.output is not None:
        check_ending(args.output, ".html", flag="--output")
        check_new(args.output, overwrite=args.overwrite)
    require_package("cv2", "opencv-python-headless", "the features of images", "check")
    from ..data.capture.photos import find_photos, photo_sizes
    from ..data.options import LoadOptions
    from ..data.scene import SPLITS, find_split
    from ..evaluation.pose_check import SIDE, check_poses
    from ..evaluation.report import write_page

    sizes = photo_sizes(find_photos(Path(args.scene).expanduser())[:8])
    options = LoadOptions(max([1, *(max(size) // SIDE for size in sizes)]), "bounded", args.allow_outside)
    with showing() as display:
        display.phase(f"opening {args.scene}")
        splits = [scene for split in SPLITS if (scene := find_split(args.scene, split, options, [])) is not None]
        say = lambda text, done: display.update(done) if done else display.phase(text)  # noqa: E731
        found = check_poses(splits, args.images, say)
    if args.output is not None:
        write_page(args.output, found, "check_page")
    found.pop("drawings")
    if args.json:
        print_json(found)
        return 0
    shown, size = f"{len(found['images'])} of {found['views']} images", "{} x {}".format(*found["size"])
    print(f"{found['scene']}: {found['text']}")
    print(f"  {shown} at {size}, {found['matches']} matches in {len(found['pairs'])} of {found['tried_pairs']} pairs")
    for row in found["by_image"][:5]:
        print(f"  {row['left']:6.2f} px  {row['image']}, in {row['pairs']} pairs")
    if few := found["few_matches"]:
        print(f"  too few matches: {counted(len(few), 'image')}, {', '.join(few[:8])}{', ...' if len(few) > 8 else ''}")
    return 0


@dataclass(frozen=True)
class WriteArgs:
    """Write a built-in scene to disk in Blender's format, so that other tools can read it."""

    name: Annotated[Positional[str], arg(metavar="NAME")]  # A built-in scene.
    folder: Annotated[Positional[Path], arg(metavar="FOLDER")]  # A new or empty folder.
    resolution: Annotated[int, arg(metavar="PIXELS")] = 200  # Width and height of the images.
    train_views: Number = 60  # Images to train on.
    test_views: Number = 20  # Images to score on.
    all_around: bool = False  # Cameras look from below too, not from above alone.


def write(argv: Sequence[str]) -> int:
    args = parse(WriteArgs, argv, "scene write")
    check_source(BUILTIN_PREFIX + args.name.removeprefix(BUILTIN_PREFIX))
    from ..data.builtin import builtin_scene, check_name
    from ..data.formats.transforms import write_blender
    from ..evaluation.run_folder import check_writable

    name = check_name(args.name)
    check_writable(args.folder)
    for flag, value in (("--train-views", args.train_views), ("--test-views", args.test_views)):
        check_within(flag, value, 1, 65536)
    views: dict[Split, int] = {"train": args.train_views, "test": args.test_views}
    given = {"resolution": args.resolution, "all_around": args.all_around}
    print(write_blender([builtin_scene(name, split, n_views=n, **given) for split, n in views.items()], args.folder))
    return 0


@dataclass(frozen=True)
class ProcessArgs:
    """Find where photos, or the frames of a video, were taken from, and write a scene folder that trains. Structure
    from motion by COLMAP. Run the same command again after an interrupt: what is finished is kept."""

    source: Annotated[Positional[Path], arg(metavar="INPUT")]  # A folder of photos (JPEG, PNG, WebP, TIFF), or a video.
    output: Annotated[Positional[Path], arg(metavar="OUTPUT")]  # The scene folder to write: images/ and sparse/0/.
    settings: Annotated[ProcessConfig, arg(name="")] = field(default_factory=ProcessConfig)
    allow_outside: bool = False  # Let links among the photos lead outside their folder.
    json: bool = False  # Print the verdict as one JSON object on stdout.


def process(argv: Sequence[str]) -> int:
    args = parse(ProcessArgs, argv, "process")
    check_source(str(args.source), ("photos or a video", "no such file or folder"))
    source, output = args.source.expanduser(), args.output.expanduser()
    from ..data.scene import check_links

    check_links(source, args.allow_outside)
    with showing() as display:
        verdict = run_process(source, output, args.settings, display)
    if args.json:
        print_json(asdict(verdict) | {"output": str(output)})
    else:
        print(f"{verdict.text}\n{output}")
    print(f"train it with: {shlex.join(['nerfturbo', 'train', str(output)])}", file=sys.stderr)
    return 0


def find_poses(source: str, display: Display, *, wait: bool = False, allow_outside: bool = False) -> None:
    """Before training: photos or a video get their poses, unless they have them; `wait`: another process finds them."""
    from ..data.capture.process import check_capture, has_poses, poses_folder
    from ..data.scene import check_links

    if (path := _unposed(source)) is None or has_poses(path):
        return
    if wait:
        while not has_poses(path):
            time.sleep(1.0)
        return
    check_links(path, allow_outside)
    check_capture(path)
    folder = poses_folder(path)
    display.note(f"{path} has no poses: finding them by COLMAP, once, into {folder}")
    run_process(path, folder, ProcessConfig(), display)
    display.phase(f"opening {folder}")


def run_process(source: Path, output: Path, settings: ProcessConfig, display: Display) -> Verdict:
    """Process with everything shown, the verdict's advice included."""
    from ..data.capture import process as capture

    try:
        verdict = capture.process(source, output, settings, report=display)
    except KeyboardInterrupt:
        display.note(f"interrupted; finished stages are kept in {output}: run the same command again to go on")
        raise
    display.note(verdict.text)
    for line in verdict.advice:
        display.note(f"warning: {line}")
    return verdict


def _unposed(source: str) -> Path | None:
    """Where photos or a video lie that bring no poses; None for all other scenes."""
    from ..data.scene import UNPOSED, is_builtin, recognise

    path = Path(source).expanduser()
    found = None if is_builtin(source) else recognise(path)
    return None if found is None or found.name != UNPOSED else path
