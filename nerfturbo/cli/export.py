"""`nerfturbo export KIND RUN OUT`: what other programs and browsers can open."""

from __future__ import annotations

import contextlib
import time
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, Literal

from tyro.conf import Positional, arg

from ..errors import CheckpointError, InputError, counted, refuse
from ..export import check_ending, paced
from .common import OpenRun, RunArgs, box_of, check_new, learned_cameras, open_views, opened_run, print_json
from .flags import Box, Count, Number, check_within, parse
from .progress import Display, duration

if TYPE_CHECKING:
    from ..data.scene import Scene
    from ..evaluation.evaluate import Comparison
    from ..export.mesh import Mesh
    from ..types import Aabb

PHONE_MB = 8.0
ALIGN_STEPS = {"cpu": 40, "cuda": 200}
Made = tuple[dict[str, Any], list[str]]  # what --json prints, and what is said instead


@dataclass(frozen=True)
class ExportArgs(RunArgs):
    """What every export asks for."""

    out: Annotated[Positional[Path], arg(metavar="OUT")]  # The file to write.
    overwrite: bool = False  # Replace a file that is there.
    json: bool = False  # Print what was written, and what it cost, as one JSON object on stdout.


@dataclass(frozen=True)
class BoxArgs(ExportArgs):
    """And what exports of a part of the scene ask for."""

    box: Box = None  # Only what lies inside this box: its low and its high corner, in the coordinates of training.
    crop: bool = True  # --no-crop exports the whole scene, not the crop saved in the viewer.


@dataclass(frozen=True)
class MeshArgs(BoxArgs):
    """Write the surface, with colours and normals, in the units of the scene's files (.glb, .ply, .obj, .usdz)."""

    resolution: Number = 256  # Voxels along the longest side of the scene's box; only its occupied part is looked at.
    density: Annotated[float | None, arg(metavar="SIGMA")] = None
    """Iso-level for marching cubes; unless given, where a marching step has an optical thickness of 0.1, or, of an
    unbounded scene, the surface that training cameras see."""
    faces: Count = None  # Decimate to about this many triangles.
    up: Annotated[Literal["y", "z", "file"] | None, arg(metavar="AXIS")] = None
    """y or z: the axis that points up; file: the scene's own axes; unless given, the scene's in a .ply, y in others."""
    keep_hidden: bool = False
    """Keep surfaces that no camera of training sees: undersides, and the inside of solid things."""
    texture: bool = False
    """Bake a texture: writes OUT as .glb and as .obj with .mtl and .png, or as .usdz, of 100,000 triangles unless
    --faces is given, and compares renders of it with the test photos."""
    texture_size: Number = 2048  # Texels along each side of the texture.


def mesh(argv: Sequence[str]) -> int:
    args = parse(MeshArgs, argv, "export mesh")
    from ..export.mesh import MeshSettings, check_mesh_path, extract_mesh, voxel_size, write_mesh
    from ..export.texture import FACES, check_texture_path

    files = check_texture_path(args.out, args.texture_size) if args.texture else [args.out]
    settings = MeshSettings(args.resolution, args.density, FACES if args.texture and args.faces is None else args.faces)
    check_mesh_path(args.out, settings, textured=args.texture)
    for file in files:
        check_new(file, overwrite=args.overwrite)

    def work(opened: OpenRun, display: Display) -> Made:
        voxel, nested = voxel_size(opened.model, args.resolution), opened.model.grid.config.levels > 1
        box = _box(args, opened, display, opened.model.bounds.aabb if nested else None)
        train, test = _plain_scenes(opened, display)
        display.phase("extracting the surface")
        cameras = None if args.keep_hidden else train.cameras
        made = extract_mesh(opened.model, box, settings, cameras=cameras, progress=display.update)
        document = {"vertices": made.vertices.shape[0], "faces": made.faces.shape[0], "voxel": voxel}
        said = [f"{document['vertices']} vertices, {document['faces']} triangles"]
        document |= {"low": list(box.low), "high": list(box.high)}
        if args.texture:
            more, lines = _texture(args, opened, display, made, (train, test))
            return document | more | {"files": [str(file) for file in files]}, said + lines
        display.phase("writing")
        write_mesh(args.out, made, train.to_original, up=args.up)
        return document, said

    return _export(args, work)


def _texture(args: MeshArgs, opened: OpenRun, display: Display, made: Mesh, scenes: tuple[Scene, Scene]) -> Made:
    """Bake, compare and write; what to add to what is said of the mesh."""
    from ..export.mesh import COLOR_REACH, voxel_size
    from ..export.texture import bake_texture, score_texture, write_textured

    model, (train, test) = opened.model, scenes
    display.phase("baking the texture")
    reach = COLOR_REACH * voxel_size(model, args.resolution)
    options = {"size": args.texture_size, "reach": reach, "progress": display.update}
    textured = bake_texture(model, made, train.cameras, **options)
    test, views, _ = _test_views(None, opened, test, display)
    found, covered = score_texture(model, textured, test, views=views, progress=display.update)
    display.phase("writing")
    write_textured(args.out, textured, train.to_original, up=args.up)
    where = "" if test.has_alpha else f", where it covers them: {100 * covered:.0f}%"
    return {"texture": asdict(found) | {"covered": covered}}, [_said_score(found) + where]


@dataclass(frozen=True)
class PointsArgs(BoxArgs):
    """Write a point cloud (.ply) of what the cameras of training see, with colours and normals."""

    points: Number = 500_000  # How many points, at most.


def points(argv: Sequence[str]) -> int:
    args = parse(PointsArgs, argv, "export points")
    from ..export.points import FILE_BYTES, extract_points, write_points

    check_ending(args.out, ".ply")
    check_within("--points", args.points, 1, 1 << 28)

    def work(opened: OpenRun, display: Display) -> Made:
        box, (train, _) = _box(args, opened, display), _plain_scenes(opened, display)
        display.phase("rendering depths")
        cloud = extract_points(opened.model, train.cameras, box, args.points, progress=display.update)
        write_points(args.out, cloud, train.to_original)
        count = cloud.positions.shape[0]
        return {"points": count, "low": list(box.low), "high": list(box.high)}, [f"{count} points"]

    return _export(args, work, room=FILE_BYTES * args.points)


@dataclass(frozen=True)
class SplatsArgs(BoxArgs):
    """Write 3D Gaussians for splat viewers: .ply with spherical harmonics, .splat with one colour each, or a page that
    shows these (.html)."""

    splats: Number = 200_000  # How many splats, at most; no more than an image has pixels, and no finer.
    tune_seconds: Annotated[float, arg(metavar="S")] = 60.0  # Fine-tune for so long; 0 leaves it out.
    eval_views: Count = None  # Compare so many test views; unless given, 10 on a GPU, fewer large ones on a CPU.


def splats(argv: Sequence[str]) -> int:
    args = parse(SplatsArgs, argv, "export splats")
    check_ending(args.out, ".ply", ".splat", ".html")
    check_within("--splats", args.splats, 1, 1 << 24)
    check_within("--tune-seconds", args.tune_seconds, 0, 3600)
    check_within("--eval-views", args.eval_views, 0)
    return _export(args, lambda opened, display: _splats(args, opened, display), room=248 * args.splats)


def _splats(args: SplatsArgs, opened: OpenRun, display: Display) -> Made:
    from ..evaluation.evaluate import compare
    from ..export.splats import REST
    from ..export.splats.files import splat_bytes, write_splats
    from ..export.splats.make import as_pinholes, picture, refine, seed, teacher_of, undistorted
    from ..export.web.page import splat_page
    from ..files import write_atomically

    model, (train, test), chosen = opened.model, _plain_scenes(opened, display), _chosen_box(args, opened, display)
    if chosen is not None:
        model.crop(chosen[0], what=chosen[1])
    cameras = as_pinholes(train.cameras)
    display.phase("placing splats on surfaces")
    made, ending = seed(model, cameras, args.splats, progress=display.update), args.out.suffix.lower()
    if ending != ".ply":  # others have one colour a splat: what is tuned and compared is what is written
        made[:, REST] = 0.0
    display.phase("fine-tuning")
    teacher = teacher_of(model, train, cameras, cropped=chosen is not None)
    made, steps = refine(made, cameras, teacher, pace=paced(args.tune_seconds, progress=display.update))
    test, views, aligned = _test_views(args.eval_views, opened, test, display)
    plain = chosen is None and (test.cameras.model == "pinhole" or test.images.mask is None)
    options = {"time": 0.0, "photos": plain, "views": views, "progress": display.update}
    found = compare(model, undistorted(test), lambda *view: (picture(made, *view), None), **options) if views else None
    display.phase("writing")
    if ending == ".html":
        write_atomically(args.out, splat_page(splat_bytes(made), model.bounds.aabb, train.cameras, train.name))
    else:
        write_splats(args.out, made, train.to_original)
    document = {"splats": len(made), "tune_steps": steps, "poses_aligned": aligned}
    document |= {"score": None if found is None else asdict(found)}
    return document, [f"{len(made)} splats", *([] if found is None else [_said_score(found)])]


@dataclass(frozen=True)
class GridArgs(ExportArgs):
    """Write the occupancy grid (.npz): occupied, density, low, high, to_original."""


def grid(argv: Sequence[str]) -> int:
    args = parse(GridArgs, argv, "export grid")
    from ..export.grid import write_grid

    check_ending(args.out, ".npz")

    def work(opened: OpenRun, display: Display) -> Made:
        write_grid(args.out, opened.model.grid, _plain_scenes(opened, display)[0].to_original)
        config, share = opened.config.grid, float(opened.model.grid.occupied_fraction())
        document = {"levels": config.levels, "resolution": config.resolution, "occupied_fraction": share}
        return document, [f"{config.levels} x {config.resolution}^3 cells, {100 * share:.1f}% of them occupied"]

    return _export(args, work)


@dataclass(frozen=True)
class OnnxArgs(ExportArgs):
    """Write the field (.onnx): positions, directions -> rgb, density; compared with torch by onnxruntime."""


def onnx(argv: Sequence[str]) -> int:
    args = parse(OnnxArgs, argv, "export onnx")
    from ..export.onnx import check_onnx_path, write_onnx

    check_onnx_path(args.out)

    def work(opened: OpenRun, display: Display) -> Made:
        display.phase("tracing the field")
        check = write_onnx(args.out, opened.model)
        errors = f"{check.color_error:.1g} in colour, {100 * check.density_error:.1g}% in density"
        return asdict(check), [f"agrees with torch to {errors}"]

    return _export(args, work)


@dataclass(frozen=True)
class CamerasArgs(ExportArgs):
    """Write the cameras of all images (.json, as transforms.json) in the coordinates of the scene's own file. Those
    of training are as they were learned, where --cameras.refine, .focal or .distortion was on."""


def cameras(argv: Sequence[str]) -> int:
    args = parse(CamerasArgs, argv, "export cameras")
    from ..evaluation.align import camera_changes
    from ..export.cameras import write_cameras

    check_ending(args.out, ".json")

    def work(opened: OpenRun, display: Display) -> Made:
        display.phase(f"opening {opened.config.data.source}")
        given, test = open_views(opened.config)
        learned = learned_cameras(opened.model, given)
        written, refined = write_cameras(args.out, [learned, test]), opened.model.photos is not None
        changes = camera_changes(given, learned)
        turned, moved, focal = (changes[name] for name in ("turned_degrees", "moved", "focal_factor"))
        said = f"; turned by {turned:.3g} degrees, moved by {moved:.3g}, focal x {focal:.4g}"
        said = f"{written} cameras" + (said if refined else ", as they were given: none was refined")
        return {"cameras": written, "learned": refined, **changes}, [said]

    return _export(args, work)


@dataclass(frozen=True)
class NerfstudioArgs(ExportArgs):
    """Write a folder for nerfstudio's tools: transforms.json, camera_path.json and dataparser_transforms.json."""


def nerfstudio(argv: Sequence[str]) -> int:
    args = parse(NerfstudioArgs, argv, "export nerfstudio")
    from ..evaluation.camera_path import around_object, capture_path
    from ..export.cameras import write_nerfstudio

    def work(opened: OpenRun, display: Display) -> Made:
        train, test = _plain_scenes(opened, display)
        path, _ = capture_path(train.cameras, opened.model.bounds.aabb.center, 60)
        written = write_nerfstudio(args.out, [train, test], around_object(path, opened.model, train))
        return {"cameras": written}, [f"{written} cameras, a path of {len(path)}"]

    return _export(args, work, folder=True)


@dataclass(frozen=True)
class WebArgs(BoxArgs):
    """Write one self-contained page (.html) that shows the scene in real time in any browser with WebGL2."""

    split: bool = False  # Write a folder of static files for a web server instead; OUT is its name.
    budget_mb: Annotated[float, arg(metavar="MB")] = 30.0  # What the files may take; the resolution is chosen to fit.
    phone: bool = False  # At most 8 MB, for phones and mobile networks; short for --budget-mb 8.
    tune_seconds: Annotated[float | None, arg(metavar="S")] = None
    """Fine-tune for so long; unless given, 30 s on a GPU and 20 s on a CPU. 0 leaves it out."""
    tune_steps: Count = None  # Fine-tune by so many steps instead: on a CPU two pages of one run are then the same.
    eval_views: Count = None  # Compare so many test views; unless given, 10 on a GPU, fewer large ones on a CPU.
    time: Annotated[float, arg(metavar="T")] = 0.0  # The moment to show of a scene that moves, 0 to 1.
    name: Annotated[str | None, arg(metavar="NAME")] = None  # The scene's name on the page; its folder's unless given.


def web(argv: Sequence[str]) -> int:
    args = parse(WebArgs, argv, "export web")
    check_within("--budget-mb", args.budget_mb, 0.5, 2000)
    args = replace(args, budget_mb=min(args.budget_mb, PHONE_MB)) if args.phone else args
    check_within("--tune-seconds", args.tune_seconds, 0, 3600)
    if args.tune_steps is not None and args.tune_steps < 1:
        raise InputError("--tune-steps", "a number > 0", str(args.tune_steps), "--tune-seconds 0 leaves it out")
    check_within("--eval-views", args.eval_views, 0)
    check_within("--time", args.time, 0, 1)
    refuse(not (args.name or "").isprintable(), "--name", "text that can be printed", ascii(args.name))
    from ..export.web.page import check_page_path

    check_page_path(args.out, split=args.split)
    options = {"folder": args.split, "room": int(args.budget_mb * 1e6)}
    return _export(args, lambda opened, display: _bake(args, opened, display), **options)


def _bake(args: WebArgs, opened: OpenRun, display: Display) -> Made:
    from ..export.web.bake import BakeSettings, bake, score
    from ..export.web.page import PageFacts, room_for_data, write_page

    model, (train, test), chosen = opened.model, opened.views(display), _chosen_box(args, opened, display)
    if chosen is not None:
        model.crop(chosen[0], what=chosen[1])
    started = time.perf_counter()
    moment = args.time if train.cameras.times is not None else None
    tuning = {"tune_seconds": args.tune_seconds, "tune_steps": args.tune_steps, "seed": opened.config.train.seed}
    budget, growth = room_for_data(args.budget_mb * 1e6), 1.0 if args.split else 4.0 / 3.0
    settings = BakeSettings(budget, growth, time=moment, **tuning)
    result = bake(model, train.cameras, settings, say=display.phase, progress=display.update)
    seconds = time.perf_counter() - started
    test, views, aligned = _test_views(args.eval_views, opened, test, display)
    shown = {"time": moment, "photos": chosen is None}  # photos show what a crop leaves out
    found = score(model, result.baked, test, views=views, **shown, progress=display.update) if views else None
    display.phase("writing")
    facts = PageFacts(args.name or train.name, found, seconds)
    size = write_page(args.out, result, train.cameras, facts, split=args.split)
    if size > args.budget_mb * 1e6:
        over = f"{size / 1e6:.1f} MB are more than --budget-mb {args.budget_mb:g}"
        display.note(f"{over}: the scene has no less to give")
    blocks, lattice = result.baked.blocks, result.baked.blocks.lattice
    document: dict[str, Any] = {"bytes": size, "budget_mb": args.budget_mb, "data_bytes": result.data_bytes}
    document |= {"blocks": blocks.n_blocks, "vertices": blocks.n_vertices, "cells": list(lattice.cells)}
    document |= {"levels": lattice.levels, "features": result.baked.n_features, "voxel": lattice.voxel}
    document |= {"score": None if found is None else asdict(found), "scored_size": test.cameras.size[0].tolist()}
    document |= {"poses_aligned": aligned, "tune_steps": result.tune_steps}
    document |= {"bake_seconds": seconds, "seconds_by_part": result.seconds}
    x, y, z = lattice.cells
    levels = f" on {lattice.levels} levels" if lattice.levels > 1 else ""
    lines = [f"{x} x {y} x {z} cells{levels}, {blocks.n_blocks} blocks, {result.baked.n_features} features"]
    if found is not None:
        cost = f"{found.steps_per_pixel:.1f} steps and {found.fetches_per_pixel:.1f} texture fetches"
        lines += [_said_score(found), f"  a pixel of them takes {cost}"]
    last = "  serve the folder, say by python -m http.server" if args.split else "  open it in a browser"
    return document, [*lines, last]


def _test_views(views: int | None, opened: OpenRun, test: Scene, display: Display) -> tuple[Scene, int, int]:
    """The views to compare, how many of them, and by how many steps their poses were fitted: where those of training
    were refined, the scene stands a little beside the test views' own."""
    from ..evaluation.evaluate import views_to_score

    steps, device = 0, opened.model.device
    if views is None:
        test, views = views_to_score(test, device)
    if views and opened.config.cameras.refine:
        steps = ALIGN_STEPS.get(device.type, ALIGN_STEPS["cuda"])
        test = opened.align(test, steps, display)
    if views:
        display.phase("comparing with the field and with the test photos")
    return test, views, steps


def _said_score(found: Comparison) -> str:
    words = [f"{found.against_field:.2f} dB against the field's own render"]
    if found.against_photos is not None:
        words += [f"{found.against_photos:.2f} dB against the photos (the field: {found.field_against_photos:.2f})"]
    return f"  {', '.join(words)}; {counted(found.views, 'test view')}"


def _plain_scenes(opened: OpenRun, display: Display) -> tuple[Scene, Scene]:
    """The views; exports in the scene's coordinates refuse those that were bent."""
    from ..data.placement import require_plain

    train, test = opened.views(display)
    require_plain(train.cameras.ndc, str(opened.run.path))
    return train, test


def _chosen_box(args: BoxArgs, opened: OpenRun, display: Display) -> tuple[Aabb, str] | None:
    """The box of the flag, or the one saved with the run, and its name; a saved one is announced."""
    from ..sampling.grid import describe_box

    if args.box is not None:
        return box_of(args.box, "--box"), "--box"
    saved = opened.run.read_crop() if args.crop else None
    if saved is None:
        return None
    display.note(f"cropped to {describe_box(saved)}, as saved in the viewer; --no-crop or --box override it")
    return saved, str(opened.run.crop_file)


def _box(args: BoxArgs, opened: OpenRun, display: Display, whole: Aabb | None = None) -> Aabb:
    from ..export.mesh import export_box

    box, what = _chosen_box(args, opened, display) or (whole, "the scene's box")
    if whole and box is whole:
        display.note("unbounded: the surface inside the scene's box; --box takes another")
    return export_box(opened.model, box, what)


def _export(args: ExportArgs, work: Callable[[OpenRun, Display], Made], *, folder: bool = False, room: int = 0) -> int:
    """Open the run, do the work, say what came of it and what it cost."""
    from ..evaluation.report import renew_links
    from ..evaluation.results import peak_memory

    check_new(args.out, overwrite=args.overwrite, folder=folder, room=room)
    with opened_run(args) as (opened, display):
        started = time.perf_counter()
        made, (first, *rest) = work(opened, display)
        seconds = time.perf_counter() - started
    renew_links(opened.run, [args.out])
    size = sum(one.stat().st_size for one in (args.out, *args.out.rglob("*")) if one.is_file())
    document = {"file": str(args.out), "bytes": size, **made, "seconds": seconds}
    document |= peak_memory(opened.model.device)
    with contextlib.suppress(OSError, CheckpointError):  # the file is there, whatever the run's own are like
        if metrics := opened.run.read_metrics():  # else training is not over
            opened.run.write_metrics(metrics | {"exports": (metrics.get("exports") or {}) | {args.out.name: document}})
    if args.json:
        print_json(document)
        return 0
    print(f"{args.out}: {first}, {document['bytes'] / 1e6:.1f} MB in {duration(seconds)}")
    for line in rest:
        print(line)
    return 0
