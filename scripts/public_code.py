"""Run the training script of a checkout with nerfturbo in place of nerfacc and tiny-cuda-nn, and time its steps.

    python scripts/public_code.py CHECKOUT SCRIPT [--steps 60] [--warm-up 10] [--device cpu] [-- ITS ARGUMENTS]
    python scripts/public_code.py ~/nerfacc examples/train_ngp_nerf_occ.py -- --data_root ~/data --scene lego

The one change is `nerfturbo.compat.install()` before the script's first line. Everything else is the repository's: its
dataset, its model, its losses, its loop, in an environment that has what it imports. It runs in a copy whose Python
files alone are copied, so the checkout stays as it is. On the CPU, and nowhere else, the quoted names "cuda" and
"cuda:0" in the copies are read as "cpu"; `.cuda()` and `torch.cuda.synchronize()` do nothing.

A step is one of the first optimizer that takes one. After --steps of them, counted from the end of the warm-up, the
script is stopped and one JSON object is printed: commit, steps, steps a second, and the loss, the mean over the first
and over the last tenth. The exit status is 1 where the script fails or ends before.
"""

from __future__ import annotations

import argparse
import json
import os
import re
import runpy
import subprocess
import sys
import tempfile
import time
import traceback
from collections.abc import Callable
from pathlib import Path
from shutil import copytree, ignore_patterns
from typing import Any

import torch
from torch.optim.optimizer import register_optimizer_step_post_hook

import nerfturbo
import nerfturbo.compat

QUOTED = re.compile(r"""(["'])cuda(:0)?\1""")


class Enough(BaseException):
    """Ends the script; nothing that catches Exception stops it."""


class Watch:
    """What the loop does, seen from torch: losses that `backward` is called on, steps of the first optimizer."""

    def __init__(self, warm_up: int, steps: int) -> None:
        self.warm_up, self.last = warm_up, warm_up + steps
        self.first: Any = None
        self.count, self.begun, self.seconds = 0, 0.0, 0.0
        self.losses: list[float] = []
        self.scaled: Any = None  # a loss that a GradScaler multiplied

    def stepped(self, optimizer: Any, *_: Any) -> None:
        self.first = self.first or optimizer
        if optimizer is not self.first:
            return
        self.count += 1
        if self.count == self.warm_up:
            self.begun = self.now()
        if self.count >= self.last:
            self.seconds = self.now() - self.begun
            raise Enough

    @staticmethod
    def now() -> float:
        if torch.cuda.is_available():
            torch.cuda.synchronize()
        return time.perf_counter()

    def backward(self, original: Callable[..., Any]) -> Callable[..., Any]:
        def call(loss: Any, *args: Any, **options: Any) -> Any:
            meant = loss if self.scaled is None else self.scaled
            self.scaled = None
            if torch.is_tensor(meant) and meant.numel() == 1:
                self.losses.append(float(meant.detach()))
            return original(loss, *args, **options)

        return call

    def scale(self, original: Callable[..., Any]) -> Callable[..., Any]:
        def call(scaler: Any, outputs: Any) -> Any:
            self.scaled = outputs
            return original(scaler, outputs)

        return call

    def row(self) -> dict[str, Any]:
        part = max(1, len(self.losses) // 10)
        means = [sum(some) / part for some in (self.losses[:part], self.losses[-part:])] if self.losses else None
        timed = self.last - self.warm_up
        return {"steps": timed, "steps_per_second": timed / self.seconds, "loss": means}


def copy_checkout(checkout: Path, folder: Path, device: str) -> None:
    """Python files as copies, for the device; everything else, data too, as links."""

    def bring(source: str, target: str) -> None:
        if source.endswith(".py"):
            text = Path(source).read_text(encoding="utf-8")
            Path(target).write_text(QUOTED.sub('"cpu"', text) if device == "cpu" else text, encoding="utf-8")
        else:
            os.symlink(os.path.abspath(source), target)

    copytree(checkout, folder, copy_function=bring, ignore=ignore_patterns(".git", "__pycache__"))


def commit_of(checkout: Path) -> str:
    command = ["git", "-C", str(checkout), "rev-parse", "--short", "HEAD"]
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    return done.stdout.strip() or "no git checkout"


def run(script: Path, arguments: list[str], watch: Watch, device: str) -> None:
    """The script as Python would run it, in its own folder's company, until the watch has seen enough."""
    torch.Tensor.backward = watch.backward(torch.Tensor.backward)
    torch.amp.GradScaler.scale = watch.scale(torch.amp.GradScaler.scale)
    if device == "cpu":
        torch.Tensor.cuda = torch.nn.Module.cuda = lambda self, *args, **options: self
        torch.cuda.synchronize = lambda *args: None
    register_optimizer_step_post_hook(watch.stepped)
    nerfturbo.compat.install()
    sys.argv, sys.path[0] = [str(script), *arguments], str(script.parent)
    sys.path.insert(1, os.getcwd())
    try:
        runpy.run_path(str(script), run_name="__main__")
    except Enough:
        pass
    except SystemExit as stop:
        if stop.code:
            raise


def arguments_of(argv: list[str]) -> tuple[argparse.Namespace, list[str]]:
    parser = argparse.ArgumentParser(description="Run a public training script over nerfturbo.compat.")
    parser.add_argument("checkout", type=Path, help="the folder of the repository")
    parser.add_argument("script", type=Path, help="its training script, from there")
    parser.add_argument("--steps", type=int, default=60, help="steps that are timed; default: 60")
    parser.add_argument("--warm-up", type=int, default=10, help="steps before the clock starts; default: 10")
    default = "cuda" if torch.cuda.is_available() else "cpu"
    parser.add_argument("--device", choices=("cpu", "cuda"), default=default, help="default: cuda where there is one")
    own, rest = (argv[: argv.index("--")], argv[argv.index("--") + 1 :]) if "--" in argv else (argv, [])
    options = parser.parse_args(own)
    if not (options.checkout / options.script).is_file():
        parser.error(f"SCRIPT: expected a file of {options.checkout}, got {options.script}, which is not there")
    if options.steps < 1 or options.warm_up < 1:
        parser.error("--steps, --warm-up: expected numbers > 0")
    return options, rest


def main(argv: list[str] | None = None) -> int:
    options, rest = arguments_of(sys.argv[1:] if argv is None else argv)
    watch, checkout = Watch(options.warm_up, options.steps), options.checkout.resolve()
    with tempfile.TemporaryDirectory() as folder:
        copy = Path(folder, checkout.name)
        copy_checkout(checkout, copy, options.device)
        os.chdir(copy)
        try:
            run(copy / options.script, rest, watch, options.device)
        except Exception:
            traceback.print_exc()
        os.chdir(checkout)
    if not watch.seconds:
        print(f"{options.script} ended after {watch.count} of {watch.last} steps", file=sys.stderr)
        return 1
    versions = {"torch": torch.__version__, "nerfturbo": nerfturbo.__version__, "device": options.device}
    row = {"repository": checkout.name, "commit": commit_of(checkout), "script": str(options.script)} | watch.row()
    print(json.dumps(row | {"arguments": rest, "versions": versions}))
    return 0


if __name__ == "__main__":
    code = main()
    sys.stdout.flush()
    os._exit(code)  # viewers and loaders of the script may have left threads behind
