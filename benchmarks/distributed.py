"""What several processes and other people's loops cost on one device, as one JSON file.

    python benchmarks/distributed.py --output benchmarks/results/h200/distributed.json # on a GPU
    python benchmarks/distributed.py --quick --device cpu --output quick.json  # to try it

1. Parity: two gloo ranks that share the device against one process with twice the rays (fp32, fixed number of rays):
   first gradients, losses, and whether the ranks are equal to the bit.
2. Collectives of a team of one: the step without a team, with NCCL recorded inside the graph, and with gloo between two
   graphs (on a CPU: gloo alone), milliseconds a step; then the same with half-precision messages.
3. As `benchmarks/trainers.py`: captured Lightning against the native trainer at the preset's sample budget.
4. Scaling, only when asked for (`--parts scaling`): 1, 2, 4, ... ranks with a GPU each, the same rays for every rank.
   Steps and rays a second, and the share of a step that the exchange of gradients takes: as it is, after the whole
   backward instead of beside it, and left out (each rank then trains by itself). `--ranks 1 2` on a machine with
   fewer GPUs lets ranks share one over gloo, marked as such: that shows that it runs, not how it scales.
"""

from __future__ import annotations

import argparse
import gc
import itertools
import os
import socket
import statistics
import tempfile
import time
from collections.abc import Sequence
from dataclasses import asdict, replace
from pathlib import Path
from typing import Any

import torch
import torch.multiprocessing as mp

from nerfturbo.bench.record import Record, machine, write_json
from nerfturbo.config import Config
from nerfturbo.data.builtin import builtin_scene
from nerfturbo.data.scene import Scene
from nerfturbo.ops.adam import COLUMNS
from nerfturbo.presets import preset
from nerfturbo.training.distributed import BACKEND_VARIABLE, GradientPiece, ProcessTeam, Team, join_team, rank_device
from nerfturbo.training.graph import DeviceStep
from nerfturbo.training.step import StepRecord
from nerfturbo.training.trainer import Trainer
from trainers import run_trainers_benchmark


def scene_for(args: argparse.Namespace) -> tuple[Scene, Scene]:
    size, views = (32, 6) if args.quick else (200, 60)
    made = {"resolution": size, "n_views": views}
    return builtin_scene("toybox", "train", **made), builtin_scene("toybox", "test", resolution=size, n_views=4)


def config_for(args: argparse.Namespace, *, steps: int) -> Config:
    config = preset("auto", args.device)
    if args.quick:
        field = replace(config.field, n_levels=2, log2_entries=10, max_resolution=64, width=16)
        train = replace(config.train, batch_samples=2048, max_rays=128)
        config = replace(config, field=field, grid=replace(config.grid, resolution=16), train=train)
    return replace(config, train=replace(config.train, steps=steps))


def parity_config(args: argparse.Namespace, world: int, *, steps: int) -> Config:
    """A fixed number of rays, and room for all of their samples: then one process and two see the same batch."""
    config = config_for(args, steps=steps)
    rays = (128 if args.quick else 4096) // world
    return replace(config, train=replace(config.train, precision="fp32", max_rays=rays, batch_samples=rays * 1024))


def train_for_parity(args: argparse.Namespace, team: Team) -> dict[str, Any]:
    """The first gradients, which are the first moments after one step; then loss and samples of every step, as the grid
    is learned in any training (a graph's steps are read from its ring)."""
    torch.use_deterministic_algorithms(True, warn_only=True)
    scene = scene_for(args)[0]
    first = Trainer(parity_config(args, team.world, steps=1), scene, device=args.device, team=team)
    first.fit()
    first.stepper.finish()
    moments = torch.cat([buffer.state.first for buffer in first.optimizer.buffers]).cpu().clone()
    rows: list[tuple[float, float]] = []

    def look(trainer: Trainer, record: StepRecord) -> None:
        rows.append((record.loss, record.n_samples))

    steps = 8 if args.quick else 50
    trainer = Trainer(
        parity_config(args, team.world, steps=steps), scene, device=args.device, callbacks=[look], team=team
    )
    trainer.fit()
    trainer.stepper.finish()
    if isinstance(trainer.stepper, DeviceStep):
        columns = [COLUMNS.index("loss"), COLUMNS.index("n_samples")]
        rows = [(loss, n) for loss, n in trainer.stepper.state.ring[:steps, columns].tolist()]
    state = {name: value.cpu() for name, value in trainer.model.state_dict().items()}
    return {"moments": moments, "losses": [row[0] for row in rows], "counts": [row[1] for row in rows], "state": state}


def time_steps(args: argparse.Namespace, team: Team) -> dict[str, Any]:
    """Milliseconds a step, from the trainer's own clock, after a third of the steps."""
    torch.use_deterministic_algorithms(False)  # the parity before it asked for it
    steps = 12 if args.quick else 1536
    marks: list[tuple[int, float]] = []
    rays: list[int] = []

    def look(trainer: Trainer, record: StepRecord) -> None:
        marks.append((record.step, time.perf_counter()))
        rays.append(record.n_rays)

    trainer = Trainer(
        config_for(args, steps=steps), scene_for(args)[0], device=args.device, callbacks=[look], team=team
    )
    trainer.fit()
    late = [mark for mark in marks if mark[0] >= steps // 3]
    spans = [1e3 * (b[1] - a[1]) / (b[0] - a[0]) for a, b in itertools.pairwise(late)]
    n_gradients = sum(buffer.grads.numel() for buffer in trainer.optimizer.buffers)
    found = {"step_ms": statistics.median(spans), "steps": steps, "gradient_bytes_fp32": 4 * n_gradients}
    return found | {"rays_per_step": statistics.median(rays[len(rays) // 3 :])}


class Late(ProcessTeam):
    """Sends gradients when all of them are computed, a message for each buffer."""

    def reduce_gradients(self, pieces: Sequence[GradientPiece], weight: torch.Tensor, found_inf: torch.Tensor) -> None:
        for runs, _ in pieces:
            for run in runs:
                run()
        whole = {grad._base.data_ptr(): grad._base for _, grad in pieces}
        super().reduce_gradients([((), grad) for grad in whole.values()], weight, found_inf)


class Silent(Late):
    """Does all but send: each rank takes the others for its like."""

    def start_sum(self, values: torch.Tensor) -> Any:
        if values.dtype == torch.float64:  # what was seen, by which the next number of rays is chosen
            values.mul_(self.world)
        return lambda: None

    def max_reduce(self, values: torch.Tensor) -> None:
        if values.numel() != 1:  # what ranks agree on, not the flag of the step
            super().max_reduce(values)


TEAMS = {"beside the backward": ProcessTeam, "after the backward": Late, "none": Silent}


def time_exchange(args: argparse.Namespace, team: Team) -> dict[str, Any]:
    """Milliseconds and rays of a step under each way to exchange gradients, of which the rounds take turns."""
    found: dict[str, list[dict[str, Any]]] = {way: [] for way in TEAMS}
    for _, (way, kind) in itertools.product(range(1 if args.quick else args.rounds), TEAMS.items()):
        own = Team() if team.world == 1 else kind(args.device)
        found[way].append(time_steps(args, own))
        gc.collect()  # recorded collectives must not outlive their team
    return {way: min(times, key=lambda one: one["step_ms"]) for way, times in found.items()}


WORK = {"parity": train_for_parity, "time": time_steps, "exchange": time_exchange}


def _child(rank: int, world: int, port: int, args: argparse.Namespace, job: dict[str, str], folder: str) -> None:
    os.environ |= {"RANK": str(rank), "WORLD_SIZE": str(world), "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(port)}
    os.environ |= {"LOCAL_RANK": str(rank), "LOCAL_WORLD_SIZE": str(world), BACKEND_VARIABLE: job["backend"]}
    args.device = rank_device(args.device)
    team = join_team(args.device)
    found = {}
    for compression in job["compressions"].split():
        own = ProcessTeam(args.device, compression=compression)  # type: ignore[arg-type]
        found[compression] = WORK[job["work"]](args, own)
    torch.save(found, Path(folder) / f"{rank}.pt")
    team.close()


def together(world: int, args: argparse.Namespace, *, compressions: str = "none", **job: str) -> list[dict[str, Any]]:
    """What each rank found, by compression; one team of processes for all of them, since a start takes long."""
    job["compressions"] = compressions
    with socket.socket() as probe, tempfile.TemporaryDirectory() as folder:
        probe.bind(("127.0.0.1", 0))
        port = probe.getsockname()[1]
        probe.close()
        mp.spawn(_child, args=(world, port, args, job, folder), nprocs=world, join=True)
        return [torch.load(Path(folder) / f"{rank}.pt", weights_only=False) for rank in range(world)]


def parity(args: argparse.Namespace) -> dict[str, Any]:
    one = train_for_parity(args, Team())
    two = [found["none"] for found in together(2, args, work="parity", backend="gloo")]
    truth, found = one["moments"].double(), two[0]["moments"].double()
    curve = [abs(a - b) / abs(a) for a, b in zip(one["losses"], two[0]["losses"], strict=True)]
    equal = all(torch.equal(value, two[1]["state"][name]) for name, value in two[0]["state"].items())
    return {
        "first_gradient_relative_error": float((truth - found).norm() / truth.norm()),
        "loss_curve_relative_error": max(curve),
        "first_ten_losses_relative_error": max(curve[:10]),
        "first_step_with_other_samples": next(
            (step for step, (a, b) in enumerate(zip(one["counts"], two[0]["counts"], strict=True)) if a != b), None
        ),
        "ranks_equal_to_the_bit": equal,
        "steps": len(curve),
    }


def collectives(args: argparse.Namespace) -> dict[str, Any]:
    found: dict[str, Any] = {"no team": time_steps(args, Team())}
    gpu = torch.device(args.device).type == "cuda"
    jobs = {"nccl inside the graph": "nccl", "gloo between two graphs": "gloo"} if gpu else {"gloo": "gloo"}
    for name, backend in jobs.items():
        (timed,) = together(1, args, work="time", backend=backend, compressions="none bf16 fp16")
        for compression, times in timed.items():
            label = name if compression == "none" else f"{name}, {compression} messages"
            found[label] = times
            print(label, times, flush=True)
    return found


def trainers(args: argparse.Namespace) -> list[dict[str, Any]]:
    steps, rounds = (10, 1) if args.quick else (args.steps, args.rounds)
    config, scenes = config_for(args, steps=steps), scene_for(args)
    timings = run_trainers_benchmark(config, scenes, device=args.device, rounds=rounds, report=print)
    return [asdict(timing) for timing in timings]


def scaling(args: argparse.Namespace) -> list[dict[str, Any]]:
    """One row for each number of ranks; a rank's `exchange_share` is what its step would save without exchange."""
    n_gpus, rows = torch.cuda.device_count() if torch.device(args.device).type == "cuda" else 0, []
    for world in args.ranks:
        shared = world > max(1, n_gpus)
        backend = "gloo" if shared or not n_gpus else "nccl"
        ranks = [found["none"] for found in together(world, args, work="exchange", backend=backend)]
        slowest = {way: max((rank[way] for rank in ranks), key=lambda one: one["step_ms"]) for way in TEAMS}
        silent, row = slowest["none"]["step_ms"], {"ranks": world, "backend": backend, "ranks_share_a_device": shared}
        for way in ("beside the backward", "after the backward"):
            step_ms = slowest[way]["step_ms"]
            steps_per_s, share = 1e3 / step_ms, max(0.0, 1.0 - silent / step_ms) if world > 1 else 0.0
            rays_per_s = steps_per_s * slowest[way]["rays_per_step"]
            own = {"step_ms": step_ms, "steps_per_s": steps_per_s, "rays_per_s": rays_per_s, "exchange_share": share}
            row[way] = own
            said = f"{world} ranks, {backend}{', sharing a device' if shared else ''}, exchange {way}: "
            said += f"{steps_per_s:.1f} steps/s, {rays_per_s:,.0f} rays/s, {share:.1%} of a step is exchange"
            print(said, flush=True)
        rows.append(row)
    first = rows[0]["beside the backward"]["rays_per_s"] / rows[0]["ranks"]
    for row in rows:
        row["efficiency"] = row["beside the backward"]["rays_per_s"] / row["ranks"] / first
    return rows


def ranks_to_time(args: argparse.Namespace, parser: argparse.ArgumentParser) -> list[int]:
    """1, 2, 4, ... up to the number of GPUs, and that; where there are not two, somebody has to ask for them."""
    n_gpus = torch.cuda.device_count()
    if any(world < 1 for world in args.ranks):
        parser.error(f"--ranks: expected numbers >= 1, got {args.ranks}")
    if args.ranks or "scaling" not in args.parts:
        return args.ranks
    if n_gpus < 2 or torch.device(args.device).type != "cuda":
        hint = "--ranks 1 2 lets ranks share a device, to see that everything runs"
        parser.error(f"--parts scaling: expected 2 GPUs or more, got {n_gpus}; {hint}")
    return sorted({*(2**k for k in range(n_gpus.bit_length())), n_gpus})


PARTS = {"parity": parity, "collectives": collectives, "trainers": trainers, "scaling": scaling}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--device", default="cuda" if torch.cuda.is_available() else "cpu")
    parser.add_argument("--output", type=Path, default=Path("distributed.json"))
    parser.add_argument("--quick", action="store_true", help="tiny sizes, to see that everything runs")
    parser.add_argument("--parts", nargs="+", choices=PARTS, default=[part for part in PARTS if part != "scaling"])
    parser.add_argument("--ranks", nargs="+", type=int, default=[], help="numbers of processes, for the scaling")
    parser.add_argument("--steps", type=int, default=600, help="of each loop of the trainers")
    parser.add_argument("--rounds", type=int, default=3, help="of all loops in the trainers and the scaling")
    args = parser.parse_args()
    args.ranks = ranks_to_time(args, parser)
    values: dict[str, Any] = {}
    for name in args.parts:
        values[name] = PARTS[name](args)
        print(name, values[name], flush=True)
        record = Record(
            "several processes and other loops on one device", __doc__ or "", 0, values, machine(args.device)
        )
        write_json(args.output, record)  # after each part: a later one that fails takes nothing away
    print(args.output)


if __name__ == "__main__":
    main()
