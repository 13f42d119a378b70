"""Textured meshes of unbounded scenes, fused from depths and at a level of the density: how much of the test photos
they cover, and how well.

    python benchmarks/capture_meshes.py benchmarks/results/cpu/capture_meshes.json NAME=RUN[=DATA] ...
"""

from __future__ import annotations

import argparse
import tempfile
from pathlib import Path

import torch

from nerfturbo.bench.record import Record, machine, write_json
from nerfturbo.cli.common import load_run
from nerfturbo.export.mesh import THICKNESS
from outputs import export

PROTOCOL = (
    "one process each, 100,000 triangles; level: marching cubes where a marching step has an optical thickness of "
    f"{THICKNESS}; fused: the default; PSNR of the rendered mesh over the pixels that it covers"
)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("output", type=Path)
    parser.add_argument("runs", nargs="+", metavar="NAME=RUN[=DATA]")
    parser.add_argument("--device", default="cuda" if torch.cuda.is_available() else "cpu")
    args = parser.parse_args()
    values: dict = {}
    for name, run, *data in (one.split("=") for one in args.runs):
        opened = load_run(run, args.device)
        level = THICKNESS / opened.model.grid.step_size
        config = opened.config
        values[name] = {"preset": config.preset, "steps": opened.state.step, "downscale": config.data.downscale}
        flags = ["--texture", *(["--data", *data] if data else [])]
        with tempfile.TemporaryDirectory() as folder:
            for way, more in (("level", ["--density", str(level)]), ("fused", [])):
                made = export(run, "mesh", Path(folder) / f"{way}.glb", args.device, *flags, *more)
                values[name][way] = {key: value for key, value in made.items() if key != "files"}
        record = Record("textured meshes of captures", PROTOCOL, 0, values, machine=machine(args.device))
        write_json(args.output, record)


if __name__ == "__main__":
    main()
