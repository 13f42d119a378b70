"""Kill a training run at random moments, half of them inside a save, and check that nothing is ever lost.

    python scripts/kill_resume.py DATA --kills 20 --output kills.json -- --downscale 4 --device cpu

One run is never disturbed. The other is killed (SIGKILL) again and again and resumed each time. After every kill the
newest checkpoint must load, be no older than the last one seen, and hold all but the steps since the last save. In the
end both runs must hold the same bits. Flags behind `--` go to `nerfturbo train`.
"""

from __future__ import annotations

import argparse
import json
import os
import random
import subprocess
import sys
import tempfile
import time
from pathlib import Path

from safetensors.torch import load_file

from nerfturbo.bench.record import Record, machine, write_json
from nerfturbo.training.checkpoint import latest_checkpoint, list_checkpoints, read_state

COMMAND = [sys.executable, "-c", "import sys; from nerfturbo.cli.main import main; sys.exit(main())", "train"]
LOG_EVERY = 10  # steps between the lines of log.jsonl


def start(words: list[str], log: Path) -> subprocess.Popen[bytes]:
    with log.open("ab") as file:
        return subprocess.Popen([*COMMAND, *words], stdout=file, stderr=file)


def saved_step(run: Path) -> int:
    found = list_checkpoints(run / "checkpoints")
    return read_state(found[-1]).step if found else -1


def logged_step(run: Path) -> int:
    steps = [0]
    for line in (run / "log.jsonl").read_text().splitlines():
        try:
            steps.append(json.loads(line)["step"])
        except (ValueError, KeyError):
            continue
    return max(steps)


def kill_at_random(process: subprocess.Popen[bytes], run: Path, rng: random.Random, save_every: int) -> str | None:
    """Wait for some progress, then kill: inside a save, or anywhere. None where the run ended before."""
    goal = max(0, saved_step(run)) + rng.randint(1, 4) * save_every
    inside = rng.random() < 0.5
    deadline = time.monotonic() + 240.0
    while process.poll() is None and time.monotonic() < deadline:
        if saved_step(run) >= goal:
            if not inside:
                time.sleep(rng.random() * 0.5)
                break
            if any((run / "checkpoints").glob(".step_*.tmp")):
                time.sleep(rng.random() * 0.004)
                break
        time.sleep(0.0005 if inside else 0.005)
    if process.poll() is not None:
        return None
    if time.monotonic() >= deadline:
        process.kill()
        raise SystemExit("no progress for minutes: the machine is too busy for this test")
    process.kill()
    process.wait()
    return "inside a save" if any((run / "checkpoints").glob(".step_*.tmp")) else "elsewhere"


def check(run: Path, last: int, save_every: int) -> dict[str, int]:
    """What the kill left: loadable, not older, and nothing lost but what came after the last save."""
    checkpoint = latest_checkpoint(run)
    step = read_state(checkpoint).step
    load_file(checkpoint / "tensors.safetensors")
    lost = logged_step(run) - step
    assert step >= last, f"the newest checkpoint is of step {step}, it was of step {last} before"
    assert lost <= save_every + LOG_EVERY, f"{lost} steps were lost, saves come every {save_every}"
    return {"saved_step": step, "lost_steps_at_most": max(0, lost)}


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("data")
    parser.add_argument("--kills", type=int, default=20)
    parser.add_argument("--save-every", type=int, default=10, help="steps")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--output", type=Path, default=Path("kill-resume.json"))
    words = sys.argv[1:]
    flags = words[words.index("--") + 1 :] if "--" in words else []
    args = parser.parse_args(words[: words.index("--")] if "--" in words else words)
    rng = random.Random(args.seed)
    steps = args.kills * 6 * args.save_every
    with tempfile.TemporaryDirectory() as folder:
        whole, killed, log = Path(folder) / "whole", Path(folder) / "killed", Path(folder) / "output.txt"
        common = ["--turntable", "0", "--eval-views", "1", "--save-every", f"{args.save_every}steps"]
        begin = [args.data, *flags, *common, "--steps", str(steps)]
        undisturbed = start([*begin, "--output", str(whole)], log)
        kills = []
        process, last = start([*begin, "--output", str(killed)], log), 0
        given = [flag for flag in ("--backend", "--device") if flag in flags]  # no part of a run's config
        again = [word for flag in given for word in (flag, flags[flags.index(flag) + 1])]
        while len(kills) < args.kills:
            moment = kill_at_random(process, killed, rng, args.save_every)
            if moment is None:
                break
            kills.append({"moment": moment, **check(killed, last, args.save_every)})
            last = int(kills[-1]["saved_step"])
            print(f"kill {len(kills)}: {kills[-1]}", file=sys.stderr)
            process = start(["--resume", str(killed), *again, *common], log)
        codes = (process.wait(), undisturbed.wait())
        if codes != (0, 0):
            print(log.read_text(), file=sys.stderr)
            raise SystemExit(f"exit codes {codes}")
        one, two = (load_file(latest_checkpoint(run) / "tensors.safetensors") for run in (whole, killed))
        equal = one.keys() == two.keys() and all(bool((one[name] == two[name]).all()) for name in one)
        left = [path.name for path in killed.rglob(".*.tmp*")]
    result = {"kills": kills, "steps": steps, "save_every": args.save_every, "bit_equal": equal, "left_behind": left}
    what = f"{Path(args.data).name}: a training run killed at random moments and resumed each time"
    device = flags[flags.index("--device") + 1] if "--device" in flags else "cpu"
    protocol = "SIGKILL, inside a save or anywhere by a coin; in the end compared with a run that was left alone"
    write_json(args.output, Record(what, protocol, args.seed, result, machine=machine(device)))
    inside = sum(kill["moment"] == "inside a save" for kill in kills)
    print(f"{len(kills)} kills, {inside} of them inside a save: every resume worked, bit-equal in the end: {equal}")
    return 0 if equal and not left and kills else 1


if __name__ == "__main__":
    os.environ.setdefault("PYTHONUNBUFFERED", "1")
    sys.exit(main())
