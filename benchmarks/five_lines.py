"""The plain NeRF of examples/02 against the same with five changed lines: seconds to the same PSNR.

    python benchmarks/five_lines.py --device cpu --target 22 --out benchmarks/results/cpu/five_lines.json
    python benchmarks/five_lines.py --device cuda --target 24 --out benchmarks/results/h200/five_lines.json

Both train on the built-in toybox in one run, after one short run of each that compiles and warms up. Time is that of
training steps; the PSNR is that of an unseen view.
"""

from __future__ import annotations

import argparse
import importlib.util
import tempfile
from pathlib import Path

from nerfturbo.bench.record import Record, machine, write_json

LABELS = {"plain": True, "five lines changed": False}


def load():
    path = Path(__file__).parents[1] / "examples" / "02_five_lines_faster.py"
    spec = importlib.util.spec_from_file_location("five_lines_faster", path)
    assert spec is not None and spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--device", default="cpu")
    parser.add_argument("--target", type=float, default=22.0, help="dB on unseen pixels")
    parser.add_argument("--steps", type=int, default=5000, help="at most")
    parser.add_argument("--rays", type=int, default=1024)
    parser.add_argument("--out", type=Path)
    options = parser.parse_args()
    values, train, image = {}, load().main, Path(tempfile.mkdtemp()) / "nerf.png"
    for label, plain in LABELS.items():
        chosen = {"plain": plain, "n_rays": options.rays}
        train(64, image, options.device, **chosen)  # every shape that is compiled for has come up by then
        print(f"-- {label}")
        curve = train(options.steps, image, options.device, target=options.target, **chosen)
        reached = curve[-1][1] >= options.target
        values[label] = {"seconds_to_target": curve[-1][0] if reached else None, "curve": curve}
    times = [values[label]["seconds_to_target"] for label in LABELS]
    if all(times):
        values["speed_up"] = times[0] / times[1]
        print(f"{options.target} dB: {times[0]:.1f} s, then {times[1]:.1f} s: {values['speed_up']:.1f} times as fast")
    if options.out:
        record = Record(
            what=f"seconds to {options.target} dB on unseen pixels: a plain NeRF, and the same with five changed lines",
            protocol=f"{options.rays} rays a step; training steps alone are timed; a run of 64 steps goes before each",
            seed=0,
            values=values,
            machine=machine(options.device),
        )
        print(write_json(options.out, record))


if __name__ == "__main__":
    main()
