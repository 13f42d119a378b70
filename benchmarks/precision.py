"""Hold mixed precision against its bars on a GPU: InstantNGP and the original NeRF, every precision, three seeds.

    python benchmarks/precision.py DATA --output benchmarks/results/h200/precision.json

Runs `nerfturbo bench precision` for both presets and says what holds: mixed within 0.1 dB of fp32; for the original
NeRF fp16 at least 3 times the samples/s of IEEE fp32, 1.5 times those of TF32, in at most 60% of the memory.
Flags behind `--` go to both. When it is cut short, what was measured stays, and the same command goes on with the rest.
"""

from __future__ import annotations

import argparse
import json
import sys
from pathlib import Path

from nerfturbo.bench.record import write_json
from nerfturbo.cli.main import main as nerfturbo

INTERRUPTED = 130  # the exit code after Ctrl-C or SIGTERM


def bars(preset: str, lines: dict[str, dict]) -> dict[str, bool | None]:
    """Whether each bar holds; None where there is nothing to compare."""

    def ratio(name: str, other: str) -> float | None:
        values = [lines.get(kind, {}).get(name) for kind in ("fp16", other)]
        return None if None in values else values[0] / max(values[1], 1e-9)

    kinds = ("fp16", "bf16")
    differences = {kind: lines[kind]["psnr_difference"] for kind in kinds if kind in lines}
    found: dict[str, bool | None] = {
        f"{kind} within 0.1 dB of fp32": None if d is None else abs(d) <= 0.1 for kind, d in differences.items()
    }
    if preset == "vanilla":
        ieee, tf32 = (ratio("samples_per_second", kind) for kind in ("fp32", "tf32"))
        memory = ratio("peak_bytes", "fp32")
        found["fp16 at least 3 times IEEE fp32"] = None if ieee is None else ieee >= 3.0
        found["fp16 at least 1.5 times TF32"] = None if tf32 is None else tf32 >= 1.5
        found["fp16 in at most 60% of the memory"] = None if memory is None else memory <= 0.6
    return found


def main() -> int:
    words = sys.argv[1:]
    flags = words[words.index("--") + 1 :] if "--" in words else []
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("data")
    parser.add_argument("--output", type=Path, default=Path("precision.json"))
    parser.add_argument("--steps", type=int, nargs=2, default=(5000, 10_000), help="of ngp and of vanilla")
    parser.add_argument("--presets", nargs="+", default=["ngp", "vanilla"])
    parser.add_argument("--seeds", nargs="+", default=["0", "1", "2"])
    args = parser.parse_args(words[: words.index("--")] if "--" in words else words)
    result: dict[str, dict] = {}
    for preset in args.presets:
        path = args.output.with_name(f"{args.output.stem}_{preset}.json")
        steps = args.steps[1] if preset == "vanilla" else args.steps[0]
        command = ["bench", "precision", args.data, "--preset", preset, "--steps", str(steps), "--seeds", *args.seeds]
        code = nerfturbo([*command, "--output", str(path), *flags])
        if code not in (0, INTERRUPTED) or not path.is_file():
            return code
        record = json.loads(path.read_text())
        lines = {line["kind"]: line for line in record["values"]["same_batch"]}
        result[preset] = {"bars": bars(preset, lines), "file": path.name, "machine": record["machine"]}
        result[preset]["unfinished"] = record["values"]["unfinished"]
        for name, holds in result[preset]["bars"].items():
            print(f"{preset}: {name}: {'not measured' if holds is None else 'yes' if holds else 'NO'}", flush=True)
        write_json(args.output, result)
        if code != 0:
            return code
    return 0


if __name__ == "__main__":
    sys.exit(main())
