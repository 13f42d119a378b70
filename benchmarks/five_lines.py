"""The plain NeRF of examples/04 against the same with five changed lines (examples/05): seconds to the same PSNR.

    python benchmarks/five_lines.py --device cpu --target 22 --out benchmarks/results/cpu/five_lines.json
    python benchmarks/five_lines.py --device cuda --target 24 --out benchmarks/results/h200/five_lines.json

Both train on the built-in toybox in one run, after one short run of each that compiles and warms up. Time is that of
training steps; the PSNR is that of 2048 pixels of unseen views.
"""

from __future__ import annotations

import argparse
import importlib.util
from pathlib import Path

from nerfturbo.bench.record import Record, machine, write_json

EXAMPLES = {"plain": "04_plain_nerf.py", "five lines changed": "05_five_lines_faster.py"}


def load(name: str):
    path = Path(__file__).parents[1] / "examples" / name
    spec = importlib.util.spec_from_file_location(path.stem[3:], path)
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
    values = {}
    for label, name in EXAMPLES.items():
        module = load(name)
        module.main(64, options.device, n_rays=options.rays)  # every shape that is compiled for has come up by then
        print(f"-- {label}")
        curve = module.main(options.steps, options.device, options.target, options.rays)
        reached = curve[-1][1] >= options.target
        values[label] = {"seconds_to_target": curve[-1][0] if reached else None, "curve": curve}
    times = [values[label]["seconds_to_target"] for label in EXAMPLES]
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
