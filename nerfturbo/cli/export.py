"""`nerfturbo export mesh|points|grid|onnx|cameras RUN OUT`: what other programs can open."""

from __future__ import annotations

import json
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, Literal

import tyro

from ..errors import InputError
from .parse import parse

if TYPE_CHECKING:
    from ..data.scene import Scene
    from .common import OpenRun
    from .progress import Display

Corners = Annotated[tuple[float, float, float, float, float, float] | None, tyro.conf.arg(metavar="X Y Z X Y Z")]


@dataclass(frozen=True)
class ExportArgs:
    """What every export asks for."""

    run: Annotated[tyro.conf.Positional[str], tyro.conf.arg(metavar="RUN")]
    """A run folder."""
    out: Annotated[tyro.conf.Positional[Path], tyro.conf.arg(metavar="OUT")]
    """The file to write."""
    overwrite: bool = False
    """Replace a file that is there."""
    data: Annotated[str | None, tyro.conf.arg(metavar="DATA")] = None
    """The scene folder, where it is not the one of training any more."""
    device: str = "auto"
    """cpu, cuda, cuda:1, ...; auto takes a GPU where there is one."""
    backend: Literal["auto", "reference", "cpu", "triton"] = "auto"
    """Who runs the operations: numba (cpu), triton, or plain torch (reference)."""
    json: bool = False
    """Print what was written, and what it cost, as one JSON object on stdout."""


@dataclass(frozen=True)
class MeshArgs(ExportArgs):
    """Write the surface as a mesh with colours and normals (.glb, .ply or .obj), in the scene's own coordinates."""

    resolution: Annotated[int, tyro.conf.arg(metavar="N")] = 256
    """Voxels along the longest side of the scene's box; only the occupied part of it is looked at."""
    density: Annotated[float | None, tyro.conf.arg(metavar="SIGMA")] = None
    """Density of the surface; unless given, where a marching step has an optical thickness of 0.1."""
    faces: Annotated[int | None, tyro.conf.arg(metavar="N")] = None
    """Decimate to about this many triangles."""
    box: Corners = None
    """Only what lies inside this box: its low and its high corner, in the coordinates of training."""
    keep_hidden: bool = False
    """Keep surfaces that no camera of training sees: undersides, and what is inside solid things."""


@dataclass(frozen=True)
class PointsArgs(ExportArgs):
    """Write a point cloud (.ply) of what the cameras of training see, with colours and normals."""

    points: Annotated[int, tyro.conf.arg(metavar="N")] = 500_000
    """How many points, at most."""
    box: Corners = None
    """Only what lies inside this box: its low and its high corner, in the coordinates of training."""


@dataclass(frozen=True)
class GridArgs(ExportArgs):
    """Write the occupancy grid (.npz): occupied, density, low, high, to_original."""


@dataclass(frozen=True)
class OnnxArgs(ExportArgs):
    """Write the field (.onnx): positions, directions -> rgb, density; compared with torch by onnxruntime."""


@dataclass(frozen=True)
class CamerasArgs(ExportArgs):
    """Write the cameras of all pictures (.json, as transforms.json) in the coordinates of the scene's own file.

    Those of training are as they were learned, where --cameras.refine or --cameras.focal was on.
    """


def mesh(argv: Sequence[str]) -> int:
    """Volume, marching cubes, colours, file."""
    args = parse(MeshArgs, argv, "export mesh")
    from ..export.mesh import MeshSettings, check_mesh_path, extract_mesh, voxel_size, write_mesh

    settings = MeshSettings(args.resolution, args.density, args.faces)
    check_mesh_path(args.out, settings)

    def work(opened: OpenRun, scene: Callable[[], Scene], display: Display) -> dict[str, Any]:
        voxel, box = voxel_size(opened.model, args.resolution), _box(opened, args.box)
        train = scene()
        display.phase("extracting the surface")
        cameras = None if args.keep_hidden else train.cameras
        made = extract_mesh(opened.model, box, settings, cameras=cameras, progress=display.update)
        display.phase("writing")
        write_mesh(args.out, made, train.to_original)
        counts = {"vertices": made.vertices.shape[0], "faces": made.faces.shape[0]}
        return counts | {"voxel": voxel, "low": list(box.low), "high": list(box.high)}

    return _export(args, work, lambda made: f"{made['vertices']} corners, {made['faces']} triangles")


def points(argv: Sequence[str]) -> int:
    """Depths of the training cameras, colours, normals, file."""
    args = parse(PointsArgs, argv, "export points")
    from ..export.points import check_points_path, extract_points, write_points

    check_points_path(args.out, args.points)

    def work(opened: OpenRun, scene: Callable[[], Scene], display: Display) -> dict[str, Any]:
        box, train = _box(opened, args.box), scene()
        display.phase("rendering depths")
        cloud = extract_points(opened.model, train.cameras, box, args.points, progress=display.update)
        write_points(args.out, cloud, train.to_original)
        return {"points": cloud.positions.shape[0], "low": list(box.low), "high": list(box.high)}

    return _export(args, work, lambda made: f"{made['points']} points")


def grid(argv: Sequence[str]) -> int:
    """The grid as it is in the checkpoint."""
    args = parse(GridArgs, argv, "export grid")
    from ..export.grid import check_grid_path, write_grid

    check_grid_path(args.out)

    def work(opened: OpenRun, scene: Callable[[], Scene], display: Display) -> dict[str, Any]:
        write_grid(args.out, opened.model.grid, scene().to_original)
        config, share = opened.config.grid, float(opened.model.grid.occupied_fraction())
        return {"levels": config.levels, "resolution": config.resolution, "occupied_fraction": share}

    def say(made: dict[str, Any]) -> str:
        size = f"{made['levels']} x {made['resolution']}^3 cells"
        return f"{size}, {100 * made['occupied_fraction']:.1f}% of them occupied"

    return _export(args, work, say)


def onnx(argv: Sequence[str]) -> int:
    """Trace, check, file."""
    args = parse(OnnxArgs, argv, "export onnx")
    from ..export.onnx import check_onnx_path, write_onnx

    check_onnx_path(args.out)

    def work(opened: OpenRun, scene: Callable[[], Scene], display: Display) -> dict[str, Any]:
        display.phase("tracing the field")
        check = write_onnx(args.out, opened.model)
        return {"color_error": check.color_error, "density_error": check.density_error}

    def say(made: dict[str, Any]) -> str:
        return (
            f"agrees with torch to {made['color_error']:.1g} in colour, {100 * made['density_error']:.1g}% in density"
        )

    return _export(args, work, say)


def cameras(argv: Sequence[str]) -> int:
    """Learned poses and focal lengths, file."""
    args = parse(CamerasArgs, argv, "export cameras")
    from ..evaluation.align import camera_changes
    from ..export.cameras import check_cameras_path, write_cameras
    from .common import learned_cameras, open_views, with_data

    check_cameras_path(args.out)

    def work(opened: OpenRun, scene: Callable[[], Scene], display: Display) -> dict[str, Any]:
        config = with_data(opened.config, args.data)
        display.phase(f"opening {config.data.source}")
        given, test = open_views(config)
        learned = learned_cameras(opened.model, given)
        written = write_cameras(args.out, [learned, test])
        return {"cameras": written, "learned": opened.model.photos is not None} | camera_changes(given, learned)

    def say(made: dict[str, Any]) -> str:
        if not made["learned"]:
            return f"{made['cameras']} cameras, as they were given: none was refined"
        turned, moved, focal = (made[name] for name in ("turned_degrees", "moved", "focal_factor"))
        return f"{made['cameras']} cameras; turned by {turned:.3g} degrees, moved by {moved:.3g}, focal x {focal:.4g}"

    return _export(args, work, say)


def _box(opened: OpenRun, corners: tuple[float, ...] | None) -> Any:
    from ..export.mesh import export_box
    from .common import box_of

    return export_box(opened.model, None if corners is None else box_of(corners, "--box"))


def _export(
    args: ExportArgs,
    work: Callable[[OpenRun, Callable[[], Scene], Display], dict[str, Any]],
    say: Callable[[dict[str, Any]], str],
) -> int:
    """Open the run, do the work, say what came of it and what it cost."""
    import torch

    from ..data.ndc import require_plain
    from ..evaluation.results import peak_gpu_memory_bytes, peak_memory_bytes
    from ..evaluation.run_folder import check_writable, open_run
    from .common import chosen_backend, load_run, open_views, with_data
    from .progress import duration, showing
    from .settings import resolve_device

    open_run(args.run)
    check_writable(args.out)
    if args.out.is_dir():
        raise InputError(str(args.out), "a file", "a folder of that name")
    if args.out.exists() and not args.overwrite:
        raise InputError(str(args.out), "a new file", "one that is there", "replace it by --overwrite")
    device = resolve_device(args.device)
    with showing() as display, chosen_backend(args.backend):
        opened = load_run(args.run, device)

        def scene() -> Scene:
            config = with_data(opened.config, args.data)
            display.phase(f"opening {config.data.source}")
            opened_scene = open_views(config, opened.model)[0]
            require_plain(opened_scene.cameras.ndc, args.run)
            return opened_scene

        started = time.perf_counter()
        made = work(opened, scene, display)
        seconds = time.perf_counter() - started
    document = {
        "file": str(args.out),
        "bytes": args.out.stat().st_size,
        **made,
        "seconds": seconds,
        "peak_memory_bytes": peak_memory_bytes(),
        "peak_gpu_memory_bytes": peak_gpu_memory_bytes(torch.device(device)),
    }
    if args.json:
        print(json.dumps(document))
    else:
        print(f"{args.out}: {say(made)}, {document['bytes'] / 1e6:.1f} MB in {duration(seconds)}")
    return 0
