"""What a run gives away, and what that costs: a video of 120 frames, and every export, with time and memory.

    python benchmarks/outputs.py RUN benchmarks/results/h200/outputs.json [--frames 120] [--size 800] [--resolution 256]

The video is timed in this process, best of three, after one frame that compiles and records; encoding is inside. Each
export runs as a command of its own, so that its memory is its own. The mesh of a built-in scene is compared with its
exact surface: mean distances in voxels, both ways.
"""

from __future__ import annotations

import argparse
import json
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from dataclasses import asdict
from pathlib import Path

import torch

from nerfturbo.bench.record import Record, machine, write_json
from nerfturbo.cli.common import load_run, open_views
from nerfturbo.data.scene import BUILTIN_PREFIX
from nerfturbo.errors import InputError
from nerfturbo.evaluation.camera_path import orbit_path
from nerfturbo.evaluation.results import peak_memory
from nerfturbo.export.frames import FrameMaker, Look
from nerfturbo.export.mesh import MeshSettings, export_box, extract_mesh, seen_by, voxel_size
from nerfturbo.export.video import can_write_mp4, video_writer
from surface import score_surface, surface_points

PROTOCOL = (
    "video: seconds for all frames of an orbit, rendering, copying and encoding included, best of three after one "
    "warm-up frame; exports: one process each, seconds of the work without loading the run, peak memory of the "
    "process; "
    "surface: mean distance in voxels from mesh to truth (accuracy) and back (completeness, over what cameras see)"
)


def video(opened, cameras, folder: Path, n_frames: int, size: int) -> dict[str, float | int | None]:
    path = orbit_path(cameras, opened.model.bounds.aabb.center, n_frames)
    path = path.resized(torch.full_like(path.size, size))
    maker = FrameMaker(opened.model, path, Look())
    begun = time.perf_counter()
    maker.frame(0)
    first = time.perf_counter() - begun
    rendered, encoded = [], []
    for _ in range(3):
        begun = time.perf_counter()
        for index in range(n_frames):
            maker.frame(index)
        rendered.append(time.perf_counter() - begun)
        begun = time.perf_counter()
        with video_writer(folder / ("orbit.mp4" if can_write_mp4() else "orbit.gif"), fps=24) as add:
            for index in range(n_frames):
                add(maker.frame(index)["color"])
        encoded.append(time.perf_counter() - begun)
    return {
        "frames": n_frames,
        "size": size,
        "first_frame_seconds": first,
        "rendered_seconds": min(rendered),
        "with_encoding_seconds": min(encoded),
        "peak_gpu_memory_bytes": peak_memory(opened.model.device)["peak_gpu_memory_bytes"],
    }


def export(run: str, kind: str, out: Path, device: str, *flags: str) -> dict:
    command = [sys.executable, "-m", "nerfturbo", "export", kind, run, str(out), "--json", "--device", device, *flags]
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    if done.returncode != 0:
        return {"error": (done.stderr.strip().splitlines() or [f"ended with {done.returncode}"])[-1]}
    return {name: value for name, value in json.loads(done.stdout).items() if name != "file"}


def surface(opened, cameras, resolution: int, name: str) -> dict:
    model = opened.model
    voxel = voxel_size(model, resolution)
    mesh = extract_mesh(model, export_box(model, None), MeshSettings(resolution), cameras=cameras)
    truth = surface_points(name, 50_000)
    seen = seen_by(model, cameras, truth.to(model.device), 2.0 * voxel).cpu()
    return {"scene": name, "voxel": voxel} | asdict(score_surface(mesh, name, seen, truth, voxel=voxel))


def video_and_exports(opened, cameras, args: argparse.Namespace) -> Iterator[dict]:
    """Part by part, so that a benchmark that is cut keeps what was done."""
    mesh_flags = ("--resolution", str(args.resolution))
    wanted = {
        "mesh": ("mesh", "a.glb", *mesh_flags),
        "mesh_100k_faces": ("mesh", "b.ply", *mesh_flags, "--faces", "100000"),
        "points": ("points", "c.ply"),
        "grid": ("grid", "d.npz"),
        "onnx": ("onnx", "e.onnx"),
    }
    with tempfile.TemporaryDirectory() as name:
        folder, exports = Path(name), {}
        yield {"video": video(opened, cameras, folder, args.frames, args.size)}
        for key, (kind, file, *flags) in wanted.items():
            exports[key] = export(args.run, kind, folder / file, args.device, *flags)
            yield {"exports": exports}


def keep(values: dict, opened, args: argparse.Namespace) -> None:
    what = "a video of a trained run, its exports, and its mesh against the exact surface"
    seed = opened.config.train.seed
    write_json(args.output, Record(what, PROTOCOL, seed, values, machine=machine(args.device)))


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("run")
    parser.add_argument("output", type=Path)
    parser.add_argument("--frames", type=int, default=120)
    parser.add_argument("--size", type=int, default=800)
    parser.add_argument("--resolution", type=int, default=256)
    parser.add_argument("--device", default="cuda" if torch.cuda.is_available() else "cpu")
    parser.add_argument("--truth", help="the built-in scene, where the run was trained on its pictures in a folder")
    parser.add_argument("--surface-only", action="store_true", help="neither the video nor the exports")
    args = parser.parse_args()
    opened = load_run(args.run, args.device)
    train, test = open_views(opened.config)
    values: dict = {"scene": train.name, "steps": opened.state.step}
    for part in () if args.surface_only else video_and_exports(opened, test.cameras, args):
        values |= part
        keep(values, opened, args)
    source = opened.config.data.source
    truth = args.truth or (source.removeprefix(BUILTIN_PREFIX) if source.startswith(BUILTIN_PREFIX) else None)
    if truth is not None:
        try:
            values["surface"] = surface(opened, train.cameras, args.resolution, truth)
        except InputError as error:  # too little training for a surface must not cost the other results
            values["surface"] = {"error": str(error)}
    print(json.dumps(values, indent=1))
    keep(values, opened, args)


if __name__ == "__main__":
    main()
